"""Helpers of tests/kernels/test_retrieval.py and its neighbours."""

TEXTS = [[3, 1, 4, 3, 1, 5, 3, 1, 4, 2, 6, 5, 3], [1, 4, 3, 6, 6, 2, 0, 1, 3]]
