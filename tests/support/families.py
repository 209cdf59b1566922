"""Helpers of tests/core/test_transformers_forward.py and its neighbours."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

TINY = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 64, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
GPT = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MODELS = {
    "apertus": {}, "arcee": {}, "cohere": {}, "cohere2": {"sliding_window": 32}, "deepseek_v3": EXPERTS | LATENT,
    "ernie4_5": {}, "exaone4": {"sliding_window": 32}, "gemma": {},
    "gemma2": {"sliding_window": 32, "query_pre_attn_scalar": 8}, "gemma3_text": {"sliding_window": 32},
    "glm4": {"partial_rotary_factor": 0.5}, "gpt2": GPT, "gpt_neox": {}, "gpt_oss": EXPERTS | {"sliding_window": 32},
    "granite": {}, "mixtral": EXPERTS, "nemotron": {}, "olmo": {}, "olmo2": {}, "opt": {"word_embed_proj_dim": 32},
    "phi3": {}, "qwen3_moe": EXPERTS, "smollm3": {}, "stablelm": {}, "starcoder2": {},
}  # fmt: skip


def tiny(kind: str, **changes):
    """A random model, no weight at its neutral initial value."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY | MODELS.get(kind, {}) | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()
