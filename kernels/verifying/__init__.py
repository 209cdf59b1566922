"""Parts of verify_tree: which child one node of a drafted tree accepts, by each rule, and the walk down the tree."""
