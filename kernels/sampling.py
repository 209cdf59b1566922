"""Draw tokens from rows of logits by Gumbel-top-k, and whole sequences by stochastic beam search.

For one row with log-probabilities logq (after temperature and filters) and independent Gumbels G(v):

    without replacement   the k largest keys logq(v) + G(v), largest first, are k successive draws, each from the
                          distribution renormalised over the tokens not drawn before
                          (Vieira 2014; Kool et al., "Stochastic beams and where to find them", ICML 2019, sec. 2.2)
    with replacement      draw j is the largest key under its own Gumbels G_j: k independent draws
    temperature 0         the k largest logits

Equal keys go to the lower token index, in the reference and in the kernel, which `sampling_kernel` has.
"""

import math
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from heavypath.kernels.filtering import Filters, check_kernel_takes, filtered_scores
from heavypath.kernels.implementation import choose_impl, operator
from heavypath.kernels.noise import Noise, Stream, check_seed, gumbels, noise_bits
from heavypath.kernels.step_kernels import kernels_by


class TopK(NamedTuple):
    """The tokens drawn from each row, in draw order.

    tokens:   LongTensor[..., R, k], -1 where the support has no more tokens
    keys:     fp32 [..., R, k], the perturbed log-probabilities (at temperature 0 the logits), -inf after the support
    logprobs: fp32 [..., R, k], the tokens' log-probabilities in the filtered distribution (at temperature 0 in the
              plain softmax), -inf after the support, also where uniform_fill has put a token

    A row with NaN or +inf in it has tokens -1 and keys and logprobs NaN: `keys[..., 0].isnan()` finds such rows.
    """

    tokens: Tensor
    keys: Tensor
    logprobs: Tensor


@operator
def gumbel_topk(
    logits: Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | Tensor = 0,
    rows: Tensor | None = None,
    replacement: bool = False,
    uniform_fill: bool = False,
    impl: str = "auto",
) -> TopK:
    """Draw k tokens from each row of logits [..., R, V].

    A row whose support has fewer than k tokens has tokens -1 after them. A row with k > V or of nothing but -inf is
    such a row. A row with NaN or +inf in it has tokens -1 alone, and no error is raised. See `TopK`.

    logits:       fp32, fp16 or bf16 for the kernel, any floating point for the reference. Rows may lie apart, so that
                  `logits[..., :vocabulary]` leaves out the last tokens of a padded vocabulary without a copy
    temperature, top_k, top_p, min_p: see `filtering`; temperature 0 takes the k largest logits, without filters
    seed, rows:   the same (seed, row) draws the same tokens in any batch. A seed is any integer, taken modulo 2**64, or
                  a LongTensor [] on the logits' device, which the kernel reads when it runs. rows is a
                  LongTensor[..., R] >= 0 (default 0, 1, 2, ...)
    replacement:  k independent draws instead of k different tokens
    uniform_fill: where the support has fewer than k tokens, draw the rest uniformly from the other tokens
    impl:         see `implementation`; "triton" is one launch, or two with filters, without host synchronisation. All
                  draw the same tokens, without gradients; keys and logprobs agree to fp32 rounding of the normaliser.
                  Where top_p or min_p falls on a token within rounding, one may keep the token and the other drop it.

    Raises ValueError for a bad shape, dtype or option, and for negative rows on a CPU.
    """
    filters = Filters(temperature, top_k, top_p, min_p).check()
    if not logits.is_floating_point() or logits.dim() < 2 or logits.shape[-1] == 0:
        raise ValueError(f"logits must be floating point [..., R, V] with V >= 1, got {logits.dtype} {[*logits.shape]}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    lead = logits.shape[:-1]
    vocab_size = logits.shape[-1]
    if rows is not None:
        if not isinstance(rows, Tensor) or rows.shape != lead or rows.dtype != torch.long:
            given = f"{rows.dtype} {[*rows.shape]}" if isinstance(rows, Tensor) else repr(rows)
            raise ValueError(f"rows must be a LongTensor {[*lead]}, one per row of logits, got {given}")
        if rows.device != logits.device:
            raise ValueError(f"rows must be on the logits' device {logits.device}, got {rows.device}")
        if rows.device.type == "cpu":
            _check_values(rows)
        rows = rows.reshape(-1)
    check_seed(seed, logits.device)
    impl = choose_impl("gumbel_topk", impl, logits, native=True)
    draw = kernels_by(impl).draw
    if impl == "triton":
        check_kernel_takes(logits=logits)
        from heavypath.kernels.sampling_kernel import launch_topk

        draw = partial(launch_topk, stream=Stream.DRAFT)  # whose keys and logprobs are those after top-p
    fields = draw(
        logits.reshape(-1, vocab_size),
        k,
        filters,
        noise=Noise(seed, rows),
        replacement=replacement,
        uniform_fill=uniform_fill,
    )
    return TopK(*(field.view(*lead, k) for field in fields))


def _check_values(rows: Tensor) -> None:
    if rows.numpy().min(initial=0) < 0:
        raise ValueError(f"rows must be at least 0, got {int(rows.min())}")


@np.errstate(all="ignore")
def reference(
    logits: Tensor, k: int, filters: Filters, *, noise: Noise, replacement: bool, uniform_fill: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw from logits [R, V] with noise.rows LongTensor[R]: tokens, keys and logprobs [R, k]."""
    values = logits.detach().float().cpu().numpy()
    vocab_size = values.shape[1]
    seed = int(noise.seed)
    noisy = filters.temperature > 0
    noise_rows = np.arange(len(values)) if noise.rows is None else noise.rows.cpu().numpy()
    largest = values.max(-1, keepdims=True)
    scores = filtered_scores(values, largest, filters if noisy else Filters())  # [R, V]
    normalizer = np.log(np.exp(scores).sum(-1, keepdims=True, dtype=np.float64))
    if noisy and replacement:
        independent = scores[:, None] + gumbels(seed, Stream.DRAFT, noise_rows, vocab_size, draws=k)  # [R, k, V]
        tokens = independent.argmax(-1)
        ranked = independent.max(-1)
    else:
        keys = scores + gumbels(seed, Stream.DRAFT, noise_rows, vocab_size) if noisy else values
        keys = np.pad(keys, ((0, 0), (0, max(0, k - vocab_size))), constant_values=-np.inf)
        tokens = (-keys).argsort(-1, kind="stable")[:, :k]  # of equal keys the lower token first
        ranked = np.take_along_axis(keys, tokens, -1)
    logprobs = np.take_along_axis(scores, np.minimum(tokens, vocab_size - 1), -1) - normalizer
    keys = ranked - normalizer if noisy else ranked
    undefined = largest - np.inf  # -inf, but NaN in a row with NaN or +inf in it
    defined = ranked > undefined
    tokens = np.where(defined, tokens, -1)
    keys = np.where(defined, keys, undefined)
    logprobs = np.where(defined, logprobs, undefined)
    if uniform_fill and noisy and not replacement:
        # Tokens outside the support follow in the order of their words of noise, which is uniformly random.
        words = noise_bits(seed, Stream.FILL, noise_rows, vocab_size)
        for row in np.flatnonzero(~np.isnan(undefined[:, 0])):
            drawn = int(defined[row].sum())
            outside = np.flatnonzero(~(scores[row] > -np.inf))
            filler = outside[words[row, outside].argsort(kind="stable")][: k - drawn]
            tokens[row, drawn : drawn + len(filler)] = filler
    fields = tokens, keys.astype(np.float32), logprobs.astype(np.float32)
    tokens, keys, logprobs = (torch.from_numpy(field).to(logits.device) for field in fields)
    return tokens, keys, logprobs


class Beam(NamedTuple):
    """The children that a stochastic beam keeps, largest key first; [..., W].

    parent:   LongTensor, the row of logits that a child was drawn from; -1 where there are fewer than W children
    tokens:   LongTensor, the child's token; -1 likewise
    logprobs: log-probability of the child's whole sequence; -inf likewise
    keys:     the child's Gumbel, under the condition that the largest of its siblings and it is their parent's key;
              -inf likewise
    """

    parent: Tensor
    tokens: Tensor
    logprobs: Tensor
    keys: Tensor


def stochastic_beam(
    logits: Tensor,
    parent_logprob: Tensor,
    parent_key: Tensor,
    width: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | Tensor = 0,
    rows: Tensor | None = None,
    impl: str = "auto",
) -> Beam:
    """Take one step of stochastic beam search, which draws whole sequences without replacement (RSD-S).

    Kool et al. 2019, algorithm 1. A parent of log-probability phi and key u has children with Gumbels
    G(v) = phi + log Q(v) + Gumbel(v). The largest of them is shifted to u, and the others along with it:

        key(v) = -log(exp(-u) - exp(-max G) + exp(-G(v)))
               = u - max(0, z) - log(1 + exp(-|z|)),    z = u - G(v) + log(1 - exp(G(v) - max G))      (their B.3)

    Keys rise with G, so the `width` largest keys of all rows are among the first `width` draws of each row. Siblings in
    the order of their keys are successive draws without replacement from their parent's distribution.

    logits:                     [..., R, V], a row for each parent
    parent_logprob, parent_key: floating point [..., R]; both are 0 at the root, and parent_logprob is -inf for an
                                absent parent
    width:                      W, the number of children kept from all R rows together

    The other arguments are those of `gumbel_topk`. At temperature 0 this is a plain beam search, whose keys are
    log-probabilities. It computes in fp64; logprobs and keys have parent_key's dtype.

    Raises ValueError for a bad shape, dtype or option.
    """
    for name, value in (("parent_logprob", parent_logprob), ("parent_key", parent_key)):
        if value.shape != logits.shape[:-1] or not value.is_floating_point() or value.device != logits.device:
            raise ValueError(
                f"{name} must be floating point {[*logits.shape[:-1]]} on {logits.device}, one for each row of logits, "
                f"got {value.dtype} {[*value.shape]} on {value.device}"
            )
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    drawn = gumbel_topk(
        logits,
        min(width, logits.shape[-1]),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        rows=rows,
        impl=impl,
    )
    return conditioned(drawn, parent_logprob, parent_key, width, noisy=temperature > 0)


def conditioned(drawn: TopK, parent_logprob: Tensor, parent_key: Tensor, width: int, *, noisy: bool) -> Beam:
    """The step of `stochastic_beam` after the draws; noisy: whether these were made at a temperature above 0."""
    phi = parent_logprob.double()[..., None]
    u = parent_key.double()[..., None]
    logprobs = phi + drawn.logprobs
    if not noisy:
        keys = logprobs
    else:
        below = (drawn.keys - drawn.keys[..., :1]).double()  # G(v) - max G <= 0
        z = (
            u
            - (phi + drawn.keys)
            + torch.where(below > -math.log(2), (-torch.expm1(below)).log(), torch.log1p(-below.exp()))
        )
        keys = u - z.clamp(min=0) - torch.log1p((-z.abs()).exp())
    there = (drawn.tokens >= 0) & (phi > -torch.inf)
    order = keys.where(there, -torch.inf).flatten(-2)  # [..., R * K]
    order = order.sort(dim=-1, descending=True, stable=True).indices[..., :width]
    there = there.flatten(-2).gather(-1, order)

    def kept(values: Tensor, otherwise: float) -> Tensor:
        """The values [..., R * K] of the children in `order`, [..., W]; `otherwise` where there are fewer."""
        return pad(values.where(there, otherwise), (0, width - order.shape[-1]), value=otherwise)

    return Beam(
        parent=kept(order // drawn.tokens.shape[-1], -1),
        tokens=kept(drawn.tokens.flatten(-2).gather(-1, order), -1),
        logprobs=kept(logprobs.flatten(-2).gather(-1, order), -torch.inf).to(parent_key.dtype),
        keys=kept(keys.flatten(-2).gather(-1, order), -torch.inf).to(parent_key.dtype),
    )
