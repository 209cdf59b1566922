"""Forward passes that run a model over the nodes of a tree, and the key-value caches that they fill."""
