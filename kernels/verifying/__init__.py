"""Parts of verify_tree: the methods' rules for which child of a node is accepted, and the walk down the tree."""
