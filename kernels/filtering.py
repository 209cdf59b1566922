"""Temperature, top-k, top-p and min-p: convert logits to the log-probabilities to sample from.

Applied in Hugging Face's order, each to the renormalised result of the one before:

    temperature   logits / T
    top-k         keep logits >= the k-th largest (ties stay)
    top-p         keep the smallest set of largest probabilities whose sum reaches p (at least one token)
    min-p         keep probabilities >= min_p * the largest

"Support" means a finite filtered logit, never probability > 0: a probability can underflow and still be drawn.

On a GPU `filter_cuts` finds a threshold for each row; kernels that read the row drop tokens below it.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.language import tl, triton
from heavypath.kernels.numbers import real, whole

LEAST_TEMPERATURE = 2.0**-126  # the smallest normal fp32 number, to which lower temperatures above 0 are raised
GREATEST_TEMPERATURE = 2.0**127  # the largest power of two in fp32, to which higher temperatures are lowered


class Filters(NamedTuple):
    """Temperature and filters, which make a distribution of logits. `None` (or 0 for top_k) turns a filter off."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def override(
        self, temperature: float | None, top_k: int | None, top_p: float | None, min_p: float | None
    ) -> "Filters":
        """Return these filters, with each field replaced by its argument unless that is None."""
        return Filters(
            self.temperature if temperature is None else temperature,
            self.top_k if top_k is None else top_k,
            self.top_p if top_p is None else top_p,
            self.min_p if min_p is None else min_p,
        )

    def check(self, prefix: str = "") -> "Filters":
        """Return the filters as numbers of Python, which C++ and Triton take.

        Raises TypeError for a value that is no number, ValueError for one outside its range.
        """
        filters = self._replace(
            **{
                name: (whole if name == "top_k" else real)(f"{prefix}{name}", value)
                for name, value in self._asdict().items()
                if value is not None
            }
        )
        temperature, top_k, top_p, min_p = filters
        if not (math.isfinite(temperature) and temperature >= 0):
            raise ValueError(f"{prefix}temperature must be a finite number >= 0, got {temperature}")
        if top_k is not None and top_k < 0:
            raise ValueError(f"{prefix}top_k must be None or an integer >= 0, got {top_k}")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"{prefix}top_p must be None or in (0, 1], got {top_p}")
        if min_p is not None and not 0 <= min_p <= 1:
            raise ValueError(f"{prefix}min_p must be None or in [0, 1], got {min_p}")
        return filters

    def drop(self, vocab_size: int) -> bool:
        """Whether top-k, top-p or min-p may drop any of `vocab_size` tokens."""
        top_k = bool(self.top_k) and self.top_k < vocab_size
        return top_k or (self.top_p is not None and self.top_p < 1) or bool(self.min_p)


def within_fp32(temperature: float) -> float:
    """Return the temperature by which logits are divided: the nearest one by which fp32 can divide."""
    return min(max(float(temperature), LEAST_TEMPERATURE), GREATEST_TEMPERATURE)


def scores(logits: np.ndarray, largest: np.ndarray, temperature: float) -> np.ndarray:
    """Return (logits - largest) / temperature, fp32 [..., V]; finite for finite logits, however low the temperature.

    These numbers decide which tokens are drawn and filtered out. They have the same bits in all implementations. A row
    of only -inf, or with NaN or +inf in it, gives NaN.
    """
    scaled = logits - largest
    if temperature != 1:
        scaled /= np.float32(within_fp32(temperature))
    if scaled.size and not scaled.min() > -math.inf:  # a number is -inf or NaN, or has overflowed
        scaled = np.where(logits == -math.inf, scaled, np.maximum(scaled, np.finfo(np.float32).min))
    return scaled


def filtered_scores(logits: np.ndarray, largest: np.ndarray, filters: Filters) -> np.ndarray:
    """Return `scores` of fp32 logits [..., V] with their largest [..., 1]; -inf for tokens that the filters drop.

    The temperature must be above 0.
    """
    scaled = scores(logits, largest, filters.temperature)
    vocab_size = logits.shape[-1]
    if filters.top_k and filters.top_k < vocab_size:
        place = vocab_size - int(filters.top_k)
        threshold = np.partition(logits, place)[..., place, None]
        scaled = np.where(logits < threshold, -math.inf, scaled)
    if filters.top_p is not None and filters.top_p < 1:
        order = (-logits).argsort(-1, kind="stable")
        weights = np.exp(np.take_along_axis(scaled, order, -1)).astype(np.float64)
        before = weights.cumsum(-1) - weights  # the mass before each token
        outside = np.empty(order.shape, dtype=bool)
        cut = before >= float(np.float32(filters.top_p)) * weights.sum(-1, keepdims=True)
        cut[..., 0] = False  # also where top_p is 0 in fp32
        np.put_along_axis(outside, order, cut, -1)
        scaled = np.where(outside, -math.inf, scaled)
    if filters.min_p:
        scaled = np.where(scaled < np.float32(math.log(filters.min_p)), -math.inf, scaled)
    return scaled.astype(np.float32, copy=False)


def filtered_logprobs(logits: Tensor, filters: Filters) -> Tensor:
    """Return log-probabilities fp64 [..., V] of the filtered distribution, -inf outside its support.

    logits: [..., V] fp32, -inf for excluded tokens; temperature > 0. A row of only -inf gives NaN.
    """
    largest = logits.amax(-1, keepdim=True)
    exact = (logits.double() - largest) / filters.temperature
    if filters.top_k or filters.top_p or filters.min_p:
        with np.errstate(all="ignore"):
            rows, most = (tensor.detach().float().cpu().numpy() for tensor in (logits, largest))
            kept = filtered_scores(rows, most, filters) > -math.inf
        exact = exact.where(torch.from_numpy(kept).to(logits.device), -math.inf)
    return exact.log_softmax(-1)


LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
LEAST = tl.constexpr(LEAST_TEMPERATURE)
GREATEST = tl.constexpr(GREATEST_TEMPERATURE)
LOG2E = tl.constexpr(1 / math.log(2))
HIDDEN_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # low bits that are 0 after conversion to fp32


def check_kernel_takes(**logits: Tensor | None) -> None:
    """Raise ValueError for logits of a dtype that the kernels do not support."""
    for name, value in logits.items():
        if value is not None and value.dtype not in HIDDEN_BITS:
            raise ValueError(f"impl 'triton' takes fp32, fp16 or bf16 {name}, got {value.dtype}; take impl 'torch'")


@triton.jit
def score(x, largest, temperature):
    """`scores` in a kernel, with the same bits."""
    scaled = tl.maximum(tl.div_rn(x - largest, temperature), LOWEST)
    return tl.where(x == float("-inf"), float("-inf"), scaled)


@triton.jit
def softmax_scale(temperature):
    """Return log2(e) / temperature, the factor of (logit - largest) in exp2; at most 1e20, so always finite."""
    return tl.minimum(LOG2E / temperature, 1e20)


@triton.jit
def sum_of_products(sums, weights):
    """Return sum(sums * weights), the same in all lanes: tl.where keeps products from being fused with additions."""
    return tl.sum(tl.where(sums == 0.0, 0.0, sums * weights))
