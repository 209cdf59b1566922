"""Helpers of tests/core/test_llama.py and its neighbours."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

TINY = {
    "vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_theta": 5e5}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**TINY)),
    "llama 3": lambda: LlamaForCausalLM(LlamaConfig(**TINY, rope_parameters=LLAMA3)),
    "llama, dynamic": lambda: LlamaForCausalLM(LlamaConfig(**TINY, rope_parameters=DYNAMIC)),
    "llama with biases, tied": lambda: LlamaForCausalLM(
        LlamaConfig(**TINY, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    ),
    "yarn": lambda: LlamaForCausalLM(LlamaConfig(**TINY, rope_parameters=YARN)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**TINY, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**TINY)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**TINY, head_dim=24)),
}


def sharpened(model):
    """Biases and norm weights away from their neutral initial values, so that leaving one out shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()
