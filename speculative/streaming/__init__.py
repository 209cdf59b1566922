"""Weights in slower memory (disk, or host memory for a GPU), loaded while earlier layers compute."""
