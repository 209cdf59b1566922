"""Random models with recurrent layers, of each family, and trees for trials."""

from functools import lru_cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM

COMMON = {
    "vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip
THREE = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
CONV = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
GDN = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_d_state": 8, "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 4, "n_group": 1, "topk_group": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}  # fmt: skip
RECURRENT = {
    "qwen3_next": GDN | EXPERTS | THREE | {"head_dim": 8},
    "qwen3_5_text": GDN | THREE | {"head_dim": 16},
    "qwen3_5_moe_text": GDN | EXPERTS | THREE | {"head_dim": 8},
    "olmo_hybrid": GDN | THREE | {"linear_num_key_heads": 4},
    "kimi_linear": LATENT | EXPERTS | THREE | {"n_shared_experts": 1},
    "bailing_hybrid": LATENT | EXPERTS | THREE | {"head_dim": 8},
    "bamba": MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "granitemoehybrid": MAMBA | THREE | {
        "mamba_n_groups": 1, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16,
        "position_embedding_type": "rope",
    },
    "falcon_h1": MAMBA | {"num_hidden_layers": 3, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_n_groups": 1,
                          "head_dim": 8},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
        "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16, "head_dim": 8,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    },
    "zamba2": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_d_state": 8,
        "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_expand": 2, "chunk_size": 16,
        "num_mem_blocks": 1, "use_shared_attention_adapter": False, "adapter_rank": 4, "attention_head_dim": 16,
    },
    "lfm2": CONV | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": CONV | EXPERTS | {"num_dense_layers": 1},
    "lfm3": CONV,
    "mamba2": {"num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "expand": 2, "state_size": 8, "n_groups": 2,
               "chunk_size": 16},
}  # fmt: skip
FOUR = ("qwen3_5_text", "kimi_linear", "granitemoehybrid", "lfm2")  # one for each kind of layer


@lru_cache
def recurrent(kind: str, seed: int = 0, twice: bool = False, **changes):
    """A random model whose gates, convolutions and states have an effect; twice: with twice as many layers."""
    torch.manual_seed(seed)
    settings = COMMON | RECURRENT[kind] | changes
    if twice:
        settings["num_hidden_layers"] *= 2
        settings |= {name: settings[name] * 2 for name in ("layer_types", "mlp_layer_types") if name in settings}
    config = AutoConfig.for_model(kind, **settings)
    if getattr(config, "max_position_embeddings", None) is None:
        config.max_position_embeddings = COMMON["max_position_embeddings"]
    model = AutoModelForCausalLM.from_config(config).eval()
    wide = {"A_log": (-1, 1), "dt_bias": (-1, 1), "D": (0, 1), "bias": (0, 0.1)}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            last = name.rsplit(".", 1)[-1]
            if last in wide:
                mean, spread = wide[last]
                weight.copy_(mean + spread * torch.randn(weight.shape))
            elif weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape) * (0.5 if "conv" in name else weight.shape[-1] ** -0.5))
            elif "norm" in name.lower():
                weight.add_(0.2 * torch.randn(weight.shape))
    model.generation_config.eos_token_id = None
    return model


def for_kernels(kind: str, seed: int):
    """A random model with heads of 16 columns, which the kernels take."""
    columns = {"linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "mamba_d_head", "mamba_d_state"}
    changes = dict.fromkeys(columns, 16) | {"mamba_n_heads": 4}
    return recurrent.__wrapped__(
        kind, seed, **{name: changes[name] for name in changes.keys() & RECURRENT[kind].keys()}
    )


def random_parents(nodes: int, climb: float) -> list[int]:
    """A tree in depth-first order: each node hangs below the one before it, or below one of its ancestors."""
    parents, path = [-1], [0]
    for node in range(1, nodes):
        while len(path) > 1 and torch.rand(()) < climb:
            path.pop()
        parents.append(path[-1])
        path.append(node)
    return parents


def path_of(parents: list[int], node: int) -> list[int]:
    """The nodes from the root to a node."""
    found = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]
