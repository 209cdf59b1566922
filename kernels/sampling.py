"""Draw k tokens from each row of logits by Gumbel-top-k, with or without replacement.

For one row with log-probabilities logq (after temperature and filters) and independent Gumbels G(v):

    without replacement   the k largest keys logq(v) + G(v), largest first, are k successive draws, each from the
                          distribution renormalised over the tokens not drawn before
                          (Vieira 2014; Kool et al., "Stochastic beams and where to find them", ICML 2019, sec. 2.2)
    with replacement      draw j is the largest key under its own Gumbels G_j: k independent draws
    temperature 0         the k largest logits

Equal keys go to the lower token index, on every path.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.kernels.noise import Stream, gumbel_noise


class TopK(NamedTuple):
    """Drawn tokens in draw order.

    tokens:   LongTensor[..., R, k], -1 where the support ran out
    keys:     fp32 [..., R, k], the perturbed log-probabilities (the logits at temperature 0), -inf where undefined
    logprobs: fp32 [..., R, k], log-probability of the token in the filtered distribution (of the plain softmax at
              temperature 0), -inf where undefined or filled
    """

    tokens: Tensor
    keys: Tensor
    logprobs: Tensor


def gumbel_topk(
    logits: Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    rows: Tensor | None = None,
    replacement: bool = False,
    uniform_fill: bool = False,
    impl: str = "auto",
) -> TopK:
    """Draw k tokens per row of logits [..., R, V]; see `TopK` for what comes back.

    rows: LongTensor[..., R] >= 0 names each row's noise (default 0, 1, 2, ...): the same (seed, rows) gives the same
        draw in any batch. seed: any integer, taken modulo 2**64.
    replacement: k independent draws instead of k distinct tokens.
    uniform_fill: where fewer than k tokens have support, draw the rest uniformly from the other tokens.
    temperature 0 takes the k largest logits and ignores the filters.

    Raises ValueError for a bad shape, dtype or option, and (CPU tensors) for NaN or +inf logits.
    """
    filters = Filters(temperature, top_k, top_p, min_p).check()
    if not logits.is_floating_point() or logits.dim() < 2 or logits.shape[-1] == 0:
        raise ValueError(f"logits must be floating point [..., R, V] with V >= 1, got {logits.dtype} {[*logits.shape]}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    lead, vocab_size = logits.shape[:-1], logits.shape[-1]
    if rows is None:
        rows = torch.arange(lead.numel(), device=logits.device).view(lead)
    if not isinstance(rows, Tensor) or rows.shape != lead or rows.dtype != torch.long:
        raise ValueError(
            f"rows must be a LongTensor {[*lead]}, one per row of logits, got {rows.dtype} {[*rows.shape]}"
        )
    if impl not in ("auto", "torch"):
        raise ValueError(f"gumbel_topk has impl 'auto' or 'torch', got {impl!r}")
    logits = logits.reshape(-1, vocab_size).float()
    if logits.device.type == "cpu":
        _check_values(logits, rows)

    draw = _gumbel_topk_reference(logits, k, filters, seed, rows.reshape(-1), replacement, uniform_fill)
    return TopK(*(field.view(*lead, k) for field in draw))


def _check_values(logits: Tensor, rows: Tensor) -> None:
    largest = logits.amax(-1)
    bad = largest.isnan() | (largest == torch.inf)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise ValueError(f"logits must be finite or -inf, but row {row} holds {float(largest[row])}")
    if (rows < 0).any():
        raise ValueError(f"rows must be at least 0, got {int(rows.min())}")


def _gumbel_topk_reference(
    logits: Tensor, k: int, filters: Filters, seed: int, rows: Tensor, replacement: bool, uniform_fill: bool
) -> TopK:
    vocab_size = logits.shape[-1]
    if filters.temperature == 0:
        return _pad(stable_topk(logits, min(k, vocab_size)), logits.log_softmax(-1), k)

    logprobs = filtered_logprobs(logits, filters).float()  # [R, V]
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    logprobs = logprobs.masked_fill(empty, -torch.inf)
    if replacement:
        keys = logprobs[:, None] + gumbel_noise(seed, Stream.DRAFT, rows, vocab_size, draws=k)  # [R, k, V]
        best, tokens = keys.max(-1)
        return _pad((best, tokens), logprobs, k)

    draw = _pad(
        stable_topk(logprobs + gumbel_noise(seed, Stream.DRAFT, rows, vocab_size), min(k, vocab_size)), logprobs, k
    )
    if uniform_fill and (draw.tokens < 0).any():
        # Tokens outside the support, in a uniformly random order, take the places behind it.
        outside = gumbel_noise(seed, Stream.FILL, rows, vocab_size).masked_fill(logprobs > -torch.inf, -torch.inf)
        filler = _pad(stable_topk(outside, min(k, vocab_size)), logprobs, k).tokens
        place = torch.arange(k, device=logits.device) - (draw.tokens >= 0).sum(-1, keepdim=True)
        tokens = torch.where(place < 0, draw.tokens, filler.gather(-1, place.clamp(min=0)))
        draw = draw._replace(tokens=tokens)
    return draw


def _pad(top: tuple[Tensor, Tensor], logprobs: Tensor, k: int) -> TopK:
    """Mark tokens without support by -1, and fill up to k columns."""
    keys, tokens = top
    missing = k - tokens.shape[-1]
    chosen = logprobs.gather(-1, tokens).masked_fill(keys == -torch.inf, -torch.inf)
    tokens = tokens.masked_fill(keys == -torch.inf, -1)
    if missing > 0:
        keys = torch.nn.functional.pad(keys, (0, missing), value=-torch.inf)
        chosen = torch.nn.functional.pad(chosen, (0, missing), value=-torch.inf)
        tokens = torch.nn.functional.pad(tokens, (0, missing), value=-1)
    return TopK(tokens, keys, chosen)


def stable_topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of fp32 values [R, V], and their indices; equal values by lower index first."""
    if k == 1:
        index = values.argmax(-1, keepdim=True)
        return values.gather(-1, index), index
    bits = (values + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # signed integers in the order of the floats
    index = torch.arange(values.shape[-1], device=values.device)
    top = ((ordered.long() << 32) | (0xFFFFFFFF - index)).topk(k).values
    index = 0xFFFFFFFF - (top & 0xFFFFFFFF)
    return values.gather(-1, index), index
