"""Kernels, each with its reference, for a transformer layer between its matrix products and its attention."""
