"""Helpers of tests/options/test_tensor_parallel.py and its neighbours."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def llama(seed, heads=12, layers=2):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=100,  # which neither 3 nor, in whole parts of 8, 4 divides
        hidden_size=8 * heads, intermediate_size=144, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=8, max_position_embeddings=128, initializer_range=0.3, eos_token_id=None,
        pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()
