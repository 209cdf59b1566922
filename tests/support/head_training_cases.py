"""Helpers of tests/drafts/test_head_training.py and its neighbours."""

from dataclasses import replace
from typing import Any

import torch
from tiny_models import tiny_llama
from transformers import LlamaForCausalLM

from heavypath.speculative.demo.head_training import TapRows, head_config
from heavypath.speculative.drafts.heads.eagle import EagleHead

WIDTH, VOCABULARY, LENGTH, DEPTHS = 16, 24, 10, 4


def tiny_head(seed: int, **variant: Any) -> EagleHead:
    torch.manual_seed(seed)
    shape = {"hidden_size": WIDTH, "target_hidden_size": WIDTH, "intermediate_size": 24, "head_dim": 8}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "taps": (1, 2, 3)}
    shape |= {"vocab_size": VOCABULARY, "draft_vocab_size": VOCABULARY}
    return EagleHead(replace(head_config(), **(shape | variant)))


def tiny_target() -> LlamaForCausalLM:
    changes = {"tie_word_embeddings": True, "initializer_range": 0.3, "max_position_embeddings": 2048}
    return tiny_llama(0, VOCABULARY, 3, **changes, num_key_value_heads=2).requires_grad_(False)


def random_rows(seed: int, count: int = 2, length: int = LENGTH) -> TapRows:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (count, length), generator=generator).to(torch.int16)
    return TapRows(tokens, torch.randn(count, length, 3, WIDTH, generator=generator).bfloat16())
