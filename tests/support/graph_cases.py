"""The small model of tests/core/test_graphs.py, by its former place."""

from tiny_models import small_llama

__all__ = ["small_llama"]
