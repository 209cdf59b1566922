"""Helpers of tests/core/test_llama.py and its neighbours."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

TINY = {
    "vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_theta": 5e5}  # fmt: skip
MODELS = {
    "llama": ("llama", {}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3}),
    "llama, dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "llama with biases, tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 24}),
}


def made(kind, **settings):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY | settings)).eval()


def sharpened(model):
    """Biases and norm weights away from their neutral initial values, so that leaving one out shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()
