"""A target of Llama-3.1-8B's shape with an EAGLE-3 head, both with random weights.

How long a step takes does not depend on the weights. How many tokens it accepts does, so tokens a second are reported
for the TOKENS_PER_STEP of others.
"""

from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from heavypath.speculative.drafts.heads.config import HeadConfig
from heavypath.speculative.drafts.heads.eagle import EagleHead

TOKENS_PER_STEP = 4.68  # SGLang with EAGLE-3's head of Llama-3.1-8B, github.com/sgl-project/sglang/issues/4247


class Shape(NamedTuple):
    """Widths of a target and its head, which reads three of the target's hidden states."""

    layers: int
    hidden: int
    heads: int
    key_heads: int
    intermediate: int
    vocabulary: int
    own_tokens: int  # that the head can propose


LLAMA_8B = Shape(32, 4096, 32, 8, 14336, 128_256, 32_000)
MINIATURE = Shape(3, 64, 4, 2, 96, 200, 120)


def random_pair(shape: Shape, dtype: torch.dtype, device: str) -> tuple[LlamaForCausalLM, EagleHead]:
    """A target and a head of this shape, made on the device."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(0)
            target: Any = LlamaForCausalLM(config).eval()
            head = EagleHead(head_config(shape)).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(usual)
    return target, head


def head_config(shape: Shape) -> HeadConfig:
    """An EAGLE-3 head that reads the first, the middle and one of the last hidden states."""
    return HeadConfig(
        generation=3,
        hidden_size=shape.hidden,
        target_hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.hidden // shape.heads,
        vocab_size=shape.vocabulary,
        draft_vocab_size=shape.own_tokens,
        taps=(1, shape.layers // 2, shape.layers - 1),
        owns_lm_head=True,
    )
