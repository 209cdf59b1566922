"""Helpers of tests/drafts/test_head_training.py and its neighbours."""

from typing import Any, NamedTuple

import torch
from tiny_models import tiny_llama
from torch import Tensor
from transformers import LlamaForCausalLM

from heavypath.speculative.drafts.heads.config import HeadConfig
from heavypath.speculative.drafts.heads.eagle import EagleHead
from heavypath.speculative.training.learning import measure_agreement
from heavypath.speculative.training.memory import RowsAtATime
from heavypath.speculative.training.student import student_of_head
from heavypath.speculative.training.teacher import Teacher

WIDTH, VOCABULARY, LENGTH, DEPTHS = 16, 24, 10, 4


class TapRows(NamedTuple):
    """Token rows, int16 [rows, length], and a target's taps there, bf16 [rows, length, 3, WIDTH]."""

    tokens: Tensor
    taps: Tensor


def tiny_head(seed: int, **variant: Any) -> EagleHead:
    torch.manual_seed(seed)
    shape = {"hidden_size": WIDTH, "target_hidden_size": WIDTH, "intermediate_size": 24, "head_dim": 8}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "taps": (1, 2, 3)}
    shape |= {"vocab_size": VOCABULARY, "draft_vocab_size": VOCABULARY}
    shape |= {"generation": 3, "tap_norms": True}
    return EagleHead(HeadConfig(**(shape | variant)))


def tiny_target() -> LlamaForCausalLM:
    changes = {"tie_word_embeddings": True, "initializer_range": 0.3, "max_position_embeddings": 2048}
    return tiny_llama(0, VOCABULARY, 3, **changes, num_key_value_heads=2).requires_grad_(False)


def random_rows(seed: int, count: int = 2, length: int = LENGTH) -> TapRows:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (count, length), generator=generator).to(torch.int16)
    return TapRows(tokens, torch.randn(count, length, 3, WIDTH, generator=generator).bfloat16())


def agreement(head: EagleHead, target: LlamaForCausalLM, tokens: Tensor, depths: int) -> tuple[Tensor, Tensor]:
    """The overlap with the target at each depth, and how often both have the same likeliest token."""
    student, teacher = student_of_head(head, target), Teacher(target, head.config.taps)
    return measure_agreement(student, teacher, tokens, depths, RowsAtATime(2, "lower it", print))
