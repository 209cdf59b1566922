"""Behind verify_tree: what one node of a drafted tree accepts, by each rule, and the walk down the tree."""
