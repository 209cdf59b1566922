"""Parts of tree_attention: masks, plans of launches, the kernels, and attention for all layers of a forward pass."""
