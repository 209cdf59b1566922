"""Helpers of tests/core/test_graphs.py and its neighbours."""

from tiny_models import tiny_llama


def small_llama(seed):
    return tiny_llama(seed, layers=1, hidden_size=32, num_attention_heads=2)
