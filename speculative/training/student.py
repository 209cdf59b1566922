"""`Student`: one interface for training drafts of all kinds; a head, a block draft or a draft model as one."""

from collections.abc import Callable
from copy import deepcopy
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

    module:  the draft's module, whose parameters are trained
    outputs: outputs(rows, depths) -> the draft's hidden states [R, N, H] for each depth. Entry i at depth k (from 0)
             predicts the same token as the target's hidden state number i * stride + k + first
    logits:  logits(hidden states [R, N, H], their depth) -> [R, N, Vd]
    first, stride: see `outputs`; stride is the number of tokens between two entries
    tokens:  LongTensor[Vd], the target's tokens that the draft can propose; None for all
    dtype:   dtype of matrix products, if it differs from that of the weights
    """

    module: nn.Module
    outputs: Callable[[Taught, int], list[Tensor]]
    logits: Callable[[Tensor, int], Tensor]
    first: int
    stride: int = 1
    tokens: Tensor | None = None
    dtype: torch.dtype | None = None

    def autocast(self) -> torch.autocast:
        """The autocast context for the draft's forward passes, with `dtype`; it does nothing if that is None."""
        device = next(self.module.parameters()).device
        return torch.autocast(device.type, self.dtype, enabled=self.dtype is not None)


def student_of_head(head: EagleHead, target: PreTrainedModel, dtype: torch.dtype | None = None) -> Student:
    """The student of a head. An embedding or lm_head that the head lacks is the target's, and is not trained.

    dtype: of matrix products, see `Student`; with it the head's own lm_head is not trained either
    """
    embedding: Any = target.get_input_embeddings() if head.embed_tokens is None else head.embed_tokens
    lm_head = frozen_in(dtype, target.get_output_embeddings() if head.lm_head is None else head.lm_head)

    def outputs(rows: Taught, depths: int) -> list[Tensor]:
        return chain_outputs(head, rows, embedding, depths)

    def logits(hidden: Tensor, depth: int) -> Tensor:
        return lm_head(head.before_lm_head(hidden).to(lm_head.weight.dtype))

    return Student(head, outputs, logits, first=1, tokens=_tokens_of(head), dtype=dtype)


def student_of_block(head: BlockHead, target: PreTrainedModel, dtype: torch.dtype | None = None) -> Student:
    """The student of a block draft. An embedding or lm_head that it lacks is the target's, and is not trained.

    dtype: of matrix products, see `Student`; with it the draft's own lm_head is not trained either
    """
    embedding: Any = target.get_input_embeddings() if head.embed_tokens is None else head.embed_tokens
    if hasattr(embedding, "embed_norm"):  # the draft skips this norm, as in `BlockHeadDraft`
        embedding = partial(F.embedding, weight=embedding.weight)
    lm_head = frozen_in(dtype, target.get_output_embeddings() if head.lm_head is None else head.lm_head)

    def outputs(rows: Taught, depths: int) -> list[Tensor]:
        return block_outputs(head, rows, embedding, depths)

    def logits(hidden: Tensor, depth: int) -> Tensor:
        return block_logits(head, hidden, lm_head)

    return Student(head, outputs, logits, 0, head.config.block_size, _tokens_of(head), dtype)


def student_of_model(draft: PreTrainedModel, dtype: torch.dtype | None = None) -> Student:
    """The student of a causal language model with the target's vocabulary. It has one depth: all depths are alike.

    dtype: of matrix products, see `Student`
    """

    def outputs(rows: Taught, depths: int) -> list[Tensor]:
        return [draft.base_model(input_ids=rows.tokens.long(), use_cache=False).last_hidden_state]

    return Student(draft, outputs, lambda hidden, depth: logits_behind(draft, hidden), first=0, dtype=dtype)


def frozen_in(dtype: torch.dtype | None, lm_head: Any) -> Any:
    """An lm_head that is not trained, in the dtype of products, so that no pass converts its weights again.

    It is a copy if its dtype differs; if dtype is None, or it is more than a linear layer, it is lm_head itself.
    """
    if dtype is None or type(lm_head) is not nn.Linear or lm_head.weight.dtype == dtype:
        return lm_head
    return deepcopy(lm_head).to(dtype).requires_grad_(False)


def _tokens_of(head: EagleHead | BlockHead) -> Tensor | None:
    """The target's tokens that a head can propose; None for all."""
    offsets = head.d2t
    return None if offsets is None else offsets + torch.arange(len(offsets), device=offsets.device)
