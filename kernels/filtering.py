"""Temperature, top-k, top-p and min-p: from logits to the log-probabilities that are sampled.

Applied in Hugging Face's order, each to the renormalised result of the one before:

    temperature   logits / T
    top-k         keep logits >= the k-th largest (ties stay)
    top-p         keep the smallest set of largest probabilities whose sum reaches p (at least one token)
    min-p         keep probabilities >= min_p * the largest

"Support" means a finite filtered logit, never probability > 0: a probability can underflow and still be drawn.
"""

# A type checker does not understand Triton kernels.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

import math
from numbers import Integral
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

LEAST_TEMPERATURE = 2.0**-126  # the smallest normal fp32 number, to which lower temperatures above 0 are raised


class Filters(NamedTuple):
    """How logits become a distribution. `None` (or 0 for top_k) turns a filter off."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def override(
        self, temperature: float | None, top_k: int | None, top_p: float | None, min_p: float | None
    ) -> "Filters":
        """These filters, with each argument that is not None in the place of its field."""
        return Filters(
            self.temperature if temperature is None else temperature,
            self.top_k if top_k is None else top_k,
            self.top_p if top_p is None else top_p,
            self.min_p if min_p is None else min_p,
        )

    def check(self, prefix: str = "") -> "Filters":
        """Raise ValueError for a value outside its range; returns self."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"{prefix}temperature must be a finite number >= 0, got {self.temperature}")
        if self.top_k is not None and (not isinstance(self.top_k, Integral) or self.top_k < 0):
            raise ValueError(f"{prefix}top_k must be None or an integer >= 0, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"{prefix}top_p must be None or in (0, 1], got {self.top_p}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"{prefix}min_p must be None or in [0, 1], got {self.min_p}")
        return self


def scores(logits: np.ndarray, largest: np.ndarray, temperature: float) -> np.ndarray:
    """(logits - largest) / temperature, fp32 [..., V]; finite where the logits are, however low the temperature.

    What is drawn and what is filtered out depends on these numbers, which have the same bits in every implementation. A
    row without support, or with NaN or +inf in it, gives NaN.
    """
    scaled = logits - largest
    if temperature != 1:
        scaled /= np.float32(max(temperature, LEAST_TEMPERATURE))
    if scaled.size and not scaled.min() > -math.inf:  # a number is -inf or NaN, or has overflowed
        scaled = np.where(logits == -math.inf, scaled, np.maximum(scaled, np.finfo(np.float32).min))
    return scaled


def filtered_scores(logits: np.ndarray, largest: np.ndarray, filters: Filters) -> np.ndarray:
    """`scores` of fp32 logits [..., V] with their largest [..., 1], -inf outside the support that the filters leave.

    temperature > 0.
    """
    scaled = scores(logits, largest, filters.temperature)
    vocab_size = logits.shape[-1]
    if filters.top_k and filters.top_k < vocab_size:
        place = vocab_size - int(filters.top_k)
        threshold = np.partition(logits, place)[..., place, None]
        scaled = np.where(logits < threshold, -math.inf, scaled)
    if filters.top_p is not None and filters.top_p < 1:
        order = largest_first(logits, vocab_size)
        weights = np.exp(np.take_along_axis(scaled, order, -1)).astype(np.float64)
        before = weights.cumsum(-1) - weights  # the mass before each token
        outside = np.empty(order.shape, dtype=bool)
        cut = before >= float(np.float32(filters.top_p)) * weights.sum(-1, keepdims=True)
        np.put_along_axis(outside, order, cut, -1)
        scaled = np.where(outside, -math.inf, scaled)
    if filters.min_p:
        scaled = np.where(scaled < np.float32(math.log(filters.min_p)), -math.inf, scaled)
    return scaled.astype(np.float32, copy=False)


def largest_first(logits: np.ndarray, count: int) -> np.ndarray:
    """The `count` tokens with the largest of fp32 logits [..., V], largest first, equal ones by index.

    Logit and token are packed into one 64-bit integer: NumPy sorts integers ten times as fast as it finds the order of
    a row of numbers.
    """
    bits = (logits + np.float32(0)).view(np.int32)  # adding 0 makes -0.0 equal to 0.0
    keys = (~(bits ^ ((bits >> 31) & 0x7FFFFFFF))).astype(np.int64) << 32
    keys |= np.arange(logits.shape[-1])
    if count < logits.shape[-1]:
        keys = np.partition(keys, count - 1)[..., :count]
    keys.sort(-1)
    return keys & 0xFFFFFFFF


def filtered_logprobs(logits: Tensor, filters: Filters) -> Tensor:
    """Log-probabilities [..., V] in fp64 of the filtered distribution, -inf outside its support.

    logits: [..., V] fp32, -inf for excluded tokens; temperature > 0. A row without support gives NaN.
    """
    largest = logits.amax(-1, keepdim=True)
    exact = (logits.double() - largest) / filters.temperature
    if filters.top_k or filters.top_p or filters.min_p:
        with np.errstate(all="ignore"):
            rows, most = (tensor.detach().float().cpu().numpy() for tensor in (logits, largest))
            kept = filtered_scores(rows, most, filters) > -math.inf
        exact = exact.where(torch.from_numpy(kept).to(logits.device), -math.inf)
    return exact.log_softmax(-1)


# On a GPU one program filters a row. Whatever is kept is cut off by a number and, among equal tokens, by an index:
#
#     kept  iff  key(x) > cut_key, or key(x) = cut_key and token < cut_end;  and score >= log(min_p);  and x > -inf
#
# Keys are integers in the order of the logits, with as many bits as the logits' dtype. The cut is found bit by bit, two
# bits in each pass over the row, as the largest key such that enough tokens (for top-k) or enough mass (for top-p)
# reach it. No row is sorted.


class Cut(NamedTuple):
    """Filters as kernels take them: their numbers, and which of them there are."""

    temperature: float
    top_k: int
    top_p: float
    log_min_p: float
    filtered: bool  # whether any of the three filters is on
    has_top_k: bool
    has_top_p: bool


def cut_of(filters: Filters, vocab_size: int) -> Cut:
    """The filters as kernels take them, for rows of `vocab_size` tokens."""
    top_k = min(int(filters.top_k or vocab_size), vocab_size)
    top_p = 1.0 if filters.top_p is None else float(filters.top_p)
    log_min_p = math.log(filters.min_p) if filters.min_p else -math.inf
    has_top_k, has_top_p = top_k < vocab_size, top_p < 1
    filtered = has_top_k or has_top_p or log_min_p > -math.inf
    temperature = max(float(filters.temperature), LEAST_TEMPERATURE)
    return Cut(temperature, top_k, top_p, log_min_p, filtered, has_top_k, has_top_p)


LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
LOG2E = tl.constexpr(1 / math.log(2))
BLOCK = tl.constexpr(2048)
HIDDEN_BITS = {torch.float32: 0, torch.float16: 12, torch.bfloat16: 16}  # low bits of a logit that are 0 in fp32; even


@triton.jit
def score(x, largest, temperature):
    """`scores` in a kernel, equal to the last bit."""
    scaled = tl.maximum(tl.div_rn(x - largest, temperature), LOWEST)
    return tl.where(x == float("-inf"), float("-inf"), scaled)


@triton.jit
def _key(x, HIDDEN: tl.constexpr):
    """A uint32 for each x, in the order of the numbers; -0.0 equals 0.0."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000) >> HIDDEN


@triton.jit
def _of_key(key, HIDDEN: tl.constexpr):
    """The number that has this key."""
    bits = key << HIDDEN
    bits = tl.where(bits >> 31 == 1, bits & 0x7FFFFFFF, (bits | ((1 << HIDDEN) - 1)) ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _reaching(row_ptr, V, largest, scale, a, b, c, WEIGHED: tl.constexpr, HIDDEN: tl.constexpr):
    """How many tokens (what mass, if WEIGHED) have keys of at least a, of at least b, and of at least c."""
    of_a, of_b, of_c = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
        key = _key(x, HIDDEN)
        weight = tl.exp2((x - largest) * scale) if WEIGHED else tl.where(token < V, 1.0, 0.0)
        of_a += tl.where(key >= a, weight, 0.0)
        of_b += tl.where(key >= b, weight, 0.0)
        of_c += tl.where(key >= c, weight, 0.0)
    return tl.sum(of_a), tl.sum(of_b), tl.sum(of_c)


@triton.jit
def _largest_key(row_ptr, V, largest, scale, floor, goal, WEIGHED: tl.constexpr, HIDDEN: tl.constexpr):
    """The largest key, not below `floor`, such that tokens with at least this key have the count or mass `goal`."""
    key = tl.full([], 0, tl.uint32)
    step = tl.full([], 1 << (30 - HIDDEN), tl.uint32)
    while step > 0:
        a, b, c = key + step, key + 2 * step, key + 3 * step
        of_a, of_b, of_c = _reaching(
            row_ptr, V, largest, scale,
            tl.maximum(a, floor), tl.maximum(b, floor), tl.maximum(c, floor), WEIGHED, HIDDEN,
        )  # fmt: skip
        key = tl.where(of_c >= goal, c, tl.where(of_b >= goal, b, tl.where(of_a >= goal, a, key)))
        step = step >> 2
    return tl.maximum(key, floor)


@triton.jit
def filter_cut(
    row_ptr, V, largest, temperature, top_k, top_p, log_min_p,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    """cut_key and cut_end of a row [V], and the sum of exp(score) over the tokens that these and min-p keep."""
    scale = softmax_scale(temperature)
    cut_key = tl.full([], 0, tl.uint32)
    cut_end = V + tl.full([], 0, tl.int32)
    if HAS_TOP_K:
        cut_key = _largest_key(row_ptr, V, largest, scale, cut_key, top_k.to(tl.float32), False, HIDDEN)
    if HAS_TOP_P:
        mass, _, _ = _reaching(row_ptr, V, largest, scale, cut_key, cut_key, cut_key, True, HIDDEN)
        goal = mass * top_p
        cut_key = _largest_key(row_ptr, V, largest, scale, cut_key, goal, True, HIDDEN)
        # Keep as many of the tokens at the cut as are needed to reach the goal.
        above, _, _ = _reaching(row_ptr, V, largest, scale, cut_key + 1, cut_key + 1, cut_key + 1, True, HIDDEN)
        needed = tl.ceil((goal - above) / tl.exp2((_of_key(cut_key, HIDDEN) - largest) * scale))
        needed = tl.maximum(needed, 1.0)
        ties = 0.0
        for start in range(0, V, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
            tie = tl.where((_key(x, HIDDEN) == cut_key) & (token < V), 1.0, 0.0)
            rank = ties + tl.cumsum(tie)
            cut_end = tl.minimum(cut_end, tl.min(tl.where((tie > 0) & (rank == needed), token + 1, V)))
            ties += tl.sum(tie)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
        keep = is_kept(x, token, largest, temperature, cut_key, cut_end, log_min_p, HIDDEN)
        sums += tl.where(keep, tl.exp2((x - largest) * scale), 0.0)
    return cut_key, cut_end, tl.sum(sums)


@triton.jit
def is_kept(x, token, largest, temperature, cut_key, cut_end, log_min_p, HIDDEN: tl.constexpr):
    """Whether the filters keep tokens with these logits."""
    key = _key(x, HIDDEN)
    kept = (key > cut_key) | ((key == cut_key) & (token < cut_end))
    return kept & (x > float("-inf")) & (score(x, largest, temperature) >= log_min_p)


@triton.jit
def softmax_scale(temperature):
    """The factor that makes (logit - largest) an argument of exp2; finite for the lowest temperature."""
    return tl.minimum(LOG2E / temperature, 1e20)
