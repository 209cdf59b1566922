"""Losses for training drafts: the distance between the draft's and the target's distribution at one position.

Let P be the target's distribution and Q the draft's. A drafted token is accepted with probability

    alpha = sum_v min(P(v), Q(v)) = 1 - TV(P, Q)                   (Leviathan et al. 2023, corollary 3.6)

    tv_kl    TV + 0.5 KL(P || Q)
    lk       lambda KL(P || Q) + (1 - lambda) TV, lambda = exp(-3 alpha), through which no gradient goes
             (LK losses, arXiv 2602.23881, the hybrid with eta = 3)

Acceptance depends on TV alone, but the gradient of TV is small if P and Q hardly overlap; there KL leads. In `tv_kl`
the weight of KL is constant, in `lk` it goes from 1 to 0.05 as alpha goes from 0 to 1.

If the draft has fewer tokens than the target, Q = 0 for the others. They count in TV. KL is computed with P restricted
to the draft's tokens and renormalised, because it would be infinite otherwise.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from heavypath.speculative.training.settings import LOSS_NAMES

Loss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(log P of the draft's tokens [..., Vd], the draft's logits [..., Vd]) -> (loss [...], overlap [...])."""

KL_WEIGHT = 0.5  # of tv_kl
LK_DECAY = 3.0  # of lk, eta in the paper


def tv_kl(target_logprobs: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    """TV + 0.5 KL, and the overlap sum_v min(P, Q), [...] each.

    target_logprobs: [..., Vd], log P of the draft's tokens; draft_logits: [..., Vd]
    """
    overlap, divergence = overlap_and_divergence(target_logprobs, draft_logits)
    return 1 - overlap + KL_WEIGHT * divergence, overlap


def lk(target_logprobs: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    """The hybrid LK loss, and the overlap sum_v min(P, Q), [...] each.

    target_logprobs: [..., Vd], log P of the draft's tokens; draft_logits: [..., Vd]
    """
    overlap, divergence = overlap_and_divergence(target_logprobs, draft_logits)
    share = (-LK_DECAY * overlap.detach()).exp()
    return share * divergence + (1 - share) * (1 - overlap), overlap


LOSSES: dict[str, Loss] = dict(zip(LOSS_NAMES, (tv_kl, lk), strict=True))


def overlap_and_divergence(target_logprobs: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    """sum_v min(P, Q), and KL(P || Q) with P renormalised to the draft's tokens, [...] each.

    target_logprobs: [..., Vd], log P of the draft's tokens
    draft_logits: [..., Vd]
    """
    draft_logprobs = draft_logits.float().log_softmax(-1)
    target_probs = target_logprobs.exp()
    overlap = torch.minimum(target_probs, draft_logprobs.exp()).sum(-1)
    within = target_probs.sum(-1).clamp(min=1e-30)
    divergence = F.kl_div(draft_logprobs, target_probs, reduction="none").sum(-1) / within - within.log()
    return overlap, divergence
