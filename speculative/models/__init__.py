"""Models as decoding sees them: a forward pass over the nodes of a tree, and the caches that it fills."""
