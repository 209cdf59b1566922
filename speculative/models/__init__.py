"""What decoding asks of a model: a forward pass over the nodes of a tree, and the caches that it fills."""
