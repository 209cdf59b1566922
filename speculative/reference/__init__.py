"""Speculative decoding as in the papers, in plain PyTorch, for reading: one sequence, without a cache.

chain: a chain of drafted tokens (Leviathan et al. 2023)
tree:  a tree of drafted tokens (Sequoia, Chen et al. 2024)

With the same seed, both give the tokens of `SpeculativeDecoder` with verifier="rejection". For that, a random number is
determined by seed, use and row, as in `heavypath.kernels.noise`. A row belongs to one node of one step.
"""
