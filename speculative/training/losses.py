"""Losses that a draft learns from: its distance from its target at one position.

With P the target's distribution and Q the draft's, a drafted token is accepted with probability

    alpha = sum_v min(P(v), Q(v)) = 1 - TV(P, Q)                   (Leviathan et al. 2023, corollary 3.6)

    tv_kl    TV + 0.5 KL(P || Q)
    lk       lambda KL(P || Q) + (1 - lambda) TV, lambda = exp(-3 alpha), through which no gradient goes
             (LK losses, arXiv 2602.23881, the hybrid with eta = 3)

Acceptance is made of TV, but TV has hardly a gradient where P and Q hardly overlap: there KL leads. In `tv_kl` its
share is the same everywhere, in `lk` it goes from 1 to 0.05 as alpha goes from 0 to 1.

A draft of fewer tokens than the target has Q = 0 for the others. They count in TV. KL is that of P given that its token
is one of the draft's, as it would be infinite otherwise.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from heavypath.speculative.training.settings import LOSS_NAMES

Loss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Of log P [.., Vd] of the draft's tokens, and the draft's logits [.., Vd]: the loss and the overlap [..]."""

KL_WEIGHT = 0.5  # of tv_kl
LK_DECAY = 3.0  # of lk, eta in the paper


def tv_kl(target_logprobs: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    """TV + 0.5 KL, and the overlap, [..] each, of log P and the draft's logits, [.., Vd] each."""
    overlap, divergence = overlap_and_divergence(target_logprobs, draft_logits)
    return 1 - overlap + KL_WEIGHT * divergence, overlap


def lk(target_logprobs: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    """The hybrid LK loss, and the overlap, [..] each, of log P and the draft's logits, [.., Vd] each."""
    overlap, divergence = overlap_and_divergence(target_logprobs, draft_logits)
    share = (-LK_DECAY * overlap.detach()).exp()
    return share * divergence + (1 - share) * (1 - overlap), overlap


LOSSES: dict[str, Loss] = dict(zip(LOSS_NAMES, (tv_kl, lk), strict=True))


def overlap_and_divergence(target_logprobs: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    """sum_v min(P, Q), and KL(P || Q), P renormalised to the draft's tokens: [..] each of [.., Vd] each."""
    draft_logprobs = draft_logits.float().log_softmax(-1)
    target_probs = target_logprobs.exp()
    overlap = torch.minimum(target_probs, draft_logprobs.exp()).sum(-1)
    within = target_probs.sum(-1).clamp(min=1e-30)
    divergence = F.kl_div(draft_logprobs, target_probs, reduction="none").sum(-1) / within - within.log()
    return overlap, divergence
