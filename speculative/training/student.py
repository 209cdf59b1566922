"""Students: a head, a block draft or a plain draft that learns, as the functions that training and measuring call."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from heavypath.speculative.drafts.blocks.head import BlockHead
from heavypath.speculative.drafts.heads.eagle import EagleHead
from heavypath.speculative.training.blocks import block_logits, block_outputs
from heavypath.speculative.training.chains import chain_outputs
from heavypath.speculative.training.teacher import Taught, logits_behind


@dataclass(frozen=True)
class Student:
    """A draft that learns from a target.

    outputs: its hidden states [R, N, H] at each of so many depths. Entry i at depth k, from 0, predicts the token that
             the target predicts from its hidden state i * stride + k + first
    logits:  [R, N, Vd] of such hidden states
    stride:  tokens between two entries
    tokens:  LongTensor[Vd], those of the target that it can propose; None for all
    dtype:   of its matrix products, if another than that of its weights
    """

    module: nn.Module
    outputs: Callable[[Taught, int], list[Tensor]]
    logits: Callable[[Tensor], Tensor]
    first: int
    stride: int = 1
    tokens: Tensor | None = None
    dtype: torch.dtype | None = None

    def autocast(self) -> torch.autocast:
        """The context of its forward passes."""
        device = next(self.module.parameters()).device
        return torch.autocast(device.type, self.dtype, enabled=self.dtype is not None)


def student_of_head(head: EagleHead, target: PreTrainedModel) -> Student:
    """A head, which takes embedding and lm_head from the target where it has none; those do not learn."""
    embedding: Any = target.get_input_embeddings() if head.embed_tokens is None else head.embed_tokens
    lm_head: Any = target.get_output_embeddings() if head.lm_head is None else head.lm_head

    def outputs(rows: Taught, depths: int) -> list[Tensor]:
        return chain_outputs(head, rows, embedding, depths)

    def logits(hidden: Tensor) -> Tensor:
        return lm_head(head.before_lm_head(hidden).to(lm_head.weight.dtype))

    return Student(head, outputs, logits, first=1, tokens=_tokens_of(head))


def student_of_block(head: BlockHead, target: PreTrainedModel) -> Student:
    """A block draft, which takes embedding and lm_head from the target as a head does."""
    embedding: Any = target.get_input_embeddings() if head.embed_tokens is None else head.embed_tokens
    if hasattr(embedding, "embed_norm"):  # which the target alone has, as in `BlockHeadDraft`
        embedding = partial(F.embedding, weight=embedding.weight)
    lm_head: Any = target.get_output_embeddings() if head.lm_head is None else head.lm_head

    def outputs(rows: Taught, depths: int) -> list[Tensor]:
        return block_outputs(head, rows, embedding, depths)

    def logits(hidden: Tensor) -> Tensor:
        return block_logits(head, hidden, lm_head)

    return Student(head, outputs, logits, first=0, stride=head.config.block_size, tokens=_tokens_of(head))


def student_of_model(draft: PreTrainedModel) -> Student:
    """A causal language model of the target's vocabulary. All depths are one to it: it reads the text's own tokens."""

    def outputs(rows: Taught, depths: int) -> list[Tensor]:
        return [draft.base_model(input_ids=rows.tokens.long(), use_cache=False).last_hidden_state]

    return Student(draft, outputs, lambda hidden: logits_behind(draft, hidden), first=0)


def _tokens_of(head: EagleHead | BlockHead) -> Tensor | None:
    """The target's tokens that a head can propose; None for all."""
    offsets = head.d2t
    return None if offsets is None else offsets + torch.arange(len(offsets), device=offsets.device)
