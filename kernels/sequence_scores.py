"""Sampling settings per sequence: convert logits to scores from which all sequences are drawn in the same way.

Let each sequence of a batch have its temperature T, top-k, top-p and min-p, and x be the logits after one of its nodes:

    T > 0    score(v) = (x(v) - max x) / T, -inf outside the support that the filters leave (see `filtering`)
    T = 0    score(v) = 0 for the largest logit, the first of equal ones, and -inf for all others

Drawing from the scores at temperature 1 without filters is the same as drawing from the logits with these settings, to
the last bit: the largest score is 0, so subtracting it and dividing by 1 changes nothing. At T = 0 one token has all of
the probability, whatever the noise.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

import torch
from torch import Tensor

from heavypath.kernels.filter_cuts import cuts_by_sequence, filtered, in_fp32
from heavypath.kernels.filtering import (
    GREATEST_TEMPERATURE,
    LEAST,
    LEAST_TEMPERATURE,
    Filters,
    check_kernel_takes,
    score,
)
from heavypath.kernels.implementation import choose_impl, in_rows, operator
from heavypath.kernels.language import tl, triton
from heavypath.kernels.step_kernels import kernels_by

LOWEST = torch.finfo(torch.float32).min


def settings_of(filters: Filters) -> list[float]:
    """Return a row of `settings`: temperature, top_k, top_p, min_p, with neutral numbers for filters that are off."""
    top_p = 1.0 if filters.top_p is None else float(filters.top_p)
    return [float(filters.temperature), float(filters.top_k or 0), top_p, float(filters.min_p or 0)]


def filtered_scores(logits: Tensor, filters: Filters) -> Tensor:
    """Return scores fp32 [B, N, V] of logits [B, N, V] with the same filters for all sequences, without host sync."""
    settings = [
        torch.full(logits.shape[:1], each, dtype=torch.float64, device=logits.device) for each in settings_of(filters)
    ]
    return sequence_scores(logits, torch.stack(settings, 1))


@operator
def sequence_scores(logits: Tensor, settings: Tensor, *, impl: str = "auto") -> Tensor:
    """Return scores fp32 [B, N, V] of logits [B, N, V], with each sequence's settings.

    settings: fp64 [B, 4], for each sequence temperature, top_k (0 for none), top_p (1 for none), min_p (0 for none), as
              from `settings_of`. They are read when the kernel runs, so that one recorded step serves all settings
    impl:     "auto", "native", "triton" or "torch", see `implementation`

    A row of only -inf stays so, and a row with NaN or +inf becomes NaN. Raises ValueError for settings of another shape
    or dtype, and for logits that the kernel does not support.
    """
    impl = choose_impl("sequence_scores", impl, logits, native=True)
    if settings.shape != (len(logits), 4) or settings.dtype != torch.float64:
        got = f"{settings.dtype} {[*settings.shape]}"
        raise ValueError(f"settings must be torch.float64 {[len(logits), 4]}, one row for each sequence, got {got}")
    if impl == "triton":
        check_kernel_takes(logits=logits)
    return kernels_by(impl).sequence_scores(logits, settings)


def reference(logits: Tensor, settings: Tensor) -> Tensor:
    """Compute the formulas at the top in PyTorch."""
    logits = logits.float()
    temperature, top_k, top_p, min_p = (column[:, None, None] for column in settings.unbind(1))  # [B, 1, 1]
    vocab_size = logits.shape[-1]
    largest = logits.amax(-1, keepdim=True)
    scores = (logits - largest) / temperature.clamp(LEAST_TEMPERATURE, GREATEST_TEMPERATURE).float()
    scores = scores.clamp(min=LOWEST).masked_fill(logits == -torch.inf, -torch.inf)
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    place = (top_k.long() - 1).clamp(0, vocab_size - 1).expand(*logits.shape[:2], 1)
    scores = scores.masked_fill((logits < ordered.gather(-1, place)) & (top_k > 0), -torch.inf)
    weights = scores.gather(-1, order).exp().double()
    before = weights.cumsum(-1) - weights  # the mass before each token
    outside = (before >= top_p.float().double() * weights.sum(-1, keepdim=True)) & (top_p < 1)
    outside[..., 0] = False  # also where top_p is 0 in fp32
    scores = scores.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
    scores = scores.masked_fill((scores < min_p.log().float()) & (min_p > 0), -torch.inf)
    first = logits.argmax(-1, keepdim=True) == torch.arange(vocab_size, device=logits.device)
    one = torch.zeros_like(scores).masked_fill(~first | (largest == -torch.inf), -torch.inf)
    no_number = largest.isnan() | (largest == torch.inf)
    return torch.where(temperature > 0, scores, one).masked_fill(no_number, torch.nan)


BLOCK = tl.constexpr(2048)  # tokens of a program


@triton.jit
def _scores_kernel(
    logits_ptr,  # [B, N, V]
    scores_ptr,  # [B, N, V]
    cut_ptr,  # [B, N], see `cuts_by_sequence`, as end_ptr and largest_ptr
    end_ptr,
    largest_ptr,
    settings_ptr,  # [B, 4]
    N,
    V,
    batch_stride,
    row_stride,
    settings_stride,
):
    row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row_ptr = logits_ptr + (row // N).to(tl.int64) * batch_stride + (row % N).to(tl.int64) * row_stride
    x = tl.load(row_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
    largest = tl.load(largest_ptr + row)
    temperature = tl.maximum(in_fp32(tl.load(settings_ptr + row // N * settings_stride)), LEAST)
    kept = filtered(x, token, tl.load(cut_ptr + row), tl.load(end_ptr + row))
    scores = tl.where(largest == largest, score(kept, largest, temperature), float("nan"))
    tl.store(scores_ptr + row.to(tl.int64) * V + token, scores, mask=token < V)


def launch(logits: Tensor, settings: Tensor) -> Tensor:
    """Compute the scores by two launches: the cuts of all rows, then the scores of the kept tokens."""
    batch, count, vocab_size = logits.shape
    logits = in_rows(logits)
    settings = in_rows(settings)
    scores = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if scores.numel() == 0:
        return scores
    cuts, largest = cuts_by_sequence(logits, settings)
    with torch.cuda.device_of(logits):
        _scores_kernel[(batch * count, triton.cdiv(vocab_size, BLOCK.value))](
            logits_ptr=logits,
            scores_ptr=scores,
            cut_ptr=cuts.cut,
            end_ptr=cuts.end,
            largest_ptr=largest,
            settings_ptr=settings,
            N=count,
            V=vocab_size,
            batch_stride=logits.stride(0),
            row_stride=logits.stride(1),
            settings_stride=settings.stride(0),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return scores
