"""A Llama of transformers as a GGUF file in fp32, for llama.cpp. Needs the package `gguf`: pip install '.[peers]'.

Tokens are spelled by their numbers, token 7 as "<0007>", in the place of the tokenizer's texts: llama.cpp knows the
expressions by which texts are split before merging only for the tokenizers on its list, which the shipped pair's is
not. So llama.cpp reads exactly the tokens that it is given, and what it writes can be compared token by token.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

MODULES = {  # of a layer, by the names that llama.cpp has for them
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def spelled(tokens: Sequence[int]) -> str:
    """The text that llama.cpp reads as these tokens."""
    return "".join(f"<{token:04}>" for token in tokens)


def tokens_spelled(text: str) -> list[int]:
    """The tokens of a text that llama.cpp wrote."""
    return [int(digits) for digits in re.findall(r"<(\d{4,})>", text)]


@torch.no_grad()
def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    """Write a model and its vocabulary. Raises ValueError for biases, and for rotary embeddings that are scaled."""
    import gguf

    config: Any = model.config
    if config.attention_bias or config.mlp_bias or config.rope_parameters["rope_type"] != "default":
        raise ValueError(
            f"expected a Llama without biases, with default rotary embeddings, got attention_bias="
            f"{config.attention_bias}, mlp_bias={config.mlp_bias}, {config.rope_parameters}; take another model"
        )
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_vocabulary(writer, gguf.TokenType.USER_DEFINED, config)

    def add(name: str, weight: Tensor) -> None:
        writer.add_tensor(f"{name}.weight", weight.float().contiguous().cpu().numpy())

    add("token_embd", model.model.embed_tokens.weight)
    for number, layer in enumerate(model.model.layers):
        for name, module in MODULES.items():
            weight = layer.get_submodule(module).get_parameter("weight")
            rows = paired(weight, config.head_dim) if name in ("attn_q", "attn_k") else weight
            add(f"blk.{number}.{name}", rows)
    add("output_norm", model.model.norm.weight)
    if not config.tie_word_embeddings:  # else llama.cpp takes the embeddings
        add("output", model.lm_head.weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def paired(weight: Tensor, head_dim: int) -> Tensor:
    """The rows of each head as llama.cpp rotates them: 2i with 2i + 1, where transformers rotates i with i + d/2."""
    order = torch.arange(head_dim).view(2, -1).T.flatten()
    return weight.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)


def _add_vocabulary(writer: Any, token_type: int, config: Any) -> None:
    """All tokens are user-defined, which are found in a text before any merging; so the merge is never used."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([spelled([token]) for token in range(config.vocab_size)])
    writer.add_token_types([token_type] * config.vocab_size)
    writer.add_token_merges(["< 0"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
