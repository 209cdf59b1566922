"""Layers with a recurrent state over the nodes of a tree: outputs of all nodes from one state, and its acceptance."""
