"""Weights that lie in slower memory, and are read while the layers before them compute."""
