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
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx

from heavypath.speculative.training.settings import LOSS_NAMES

Loss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(log P of the draft's tokens [..., Vd], the draft's logits [..., Vd]) -> (loss [...], overlap [...])."""

KL_WEIGHT = 0.5  # of tv_kl
LK_DECAY = 3.0  # of lk, eta in the paper
LEAST_LOGPROB = -200.0  # exp of it is 0 in fp32; 0 times log 0 would be NaN


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

    target_logprobs: [..., Vd], log P of the draft's tokens; no gradient goes through them
    draft_logits: [..., Vd]
    """
    return _OverlapAndDivergence.apply(target_logprobs, draft_logits)  # pyright: ignore[reportReturnType]


class _OverlapAndDivergence(Function):
    """Both numbers with their gradients in closed form, for logits z, Q = softmax(z), and w the sum of P:

        d overlap / d z = M - Q sum(M)        M = Q where Q < P, else 0
        d KL / d z      = Q - P / w

    Autograd would keep six arrays of Vd numbers for a position, and pass through twice as many.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, target_logprobs: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
        draft_logprobs = draft_logits.float().log_softmax(-1)
        draft_probs = draft_logprobs.exp()
        target_probs = target_logprobs.exp()
        overlap = torch.minimum(target_probs, draft_probs).sum(-1)
        within = target_probs.sum(-1).clamp(min=1e-30)
        ratio = target_logprobs.clamp(min=LEAST_LOGPROB) - draft_logprobs
        divergence = ratio.mul_(target_probs).sum(-1) / within - within.log()
        ctx.save_for_backward(target_probs, draft_probs, within)
        ctx.logits_dtype = draft_logits.dtype  # pyright: ignore[reportAttributeAccessIssue]
        return overlap, divergence

    @staticmethod
    def backward(ctx: FunctionCtx, of_overlap: Tensor, of_divergence: Tensor) -> tuple[None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        target_probs, draft_probs, within = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue]
        smaller = draft_probs.where(draft_probs < target_probs, 0.0)  # M
        of_draft = of_divergence - of_overlap * smaller.sum(-1)
        grad = smaller.mul_(of_overlap[..., None])
        grad.addcmul_(draft_probs, of_draft[..., None])
        grad.addcmul_(target_probs, (of_divergence / within)[..., None], value=-1)
        return None, grad.to(ctx.logits_dtype)  # pyright: ignore[reportAttributeAccessIssue]
