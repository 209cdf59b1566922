"""Parts of tree_attention: masks, launch plans, the Triton kernels, and attention for all layers of a forward pass."""
