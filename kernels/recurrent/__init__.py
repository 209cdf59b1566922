"""Recurrent layers over the nodes of a tree: outputs of all nodes from one state, and the state after acceptance."""
