"""Temperature, top-k, top-p and min-p: from logits to the log-probabilities that are sampled.

Applied in Hugging Face's order, each to the renormalised result of the one before:

    temperature   logits / T
    top-k         keep logits >= the k-th largest (ties stay)
    top-p         keep the smallest set of largest probabilities whose sum reaches p (at least one token)
    min-p         keep probabilities >= min_p * the largest

"Support" means a finite filtered logit, never probability > 0: a probability can underflow and still be drawn.
"""

import math
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor


class Filters(NamedTuple):
    """How logits become a distribution. `None` (or 0 for top_k) turns a filter off."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def override(
        self, temperature: float | None, top_k: int | None, top_p: float | None, min_p: float | None
    ) -> "Filters":
        """These filters, but for what is given other than None."""
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


def filtered_logprobs(logits: Tensor, filters: Filters) -> Tensor:
    """Log-probabilities [..., V] in fp64 of the filtered distribution, -inf outside its support.

    logits: [..., V] fp32, -inf for excluded tokens; temperature > 0. A row without support gives NaN.
    What is kept is decided in fp32, so that whoever draws and whoever verifies agree on the support.
    """
    exact = (logits.double() - logits.amax(-1, keepdim=True)) / filters.temperature  # a tiny one cannot overflow
    if not (filters.top_k or filters.top_p or filters.min_p):
        return exact.log_softmax(-1)
    scores = exact.float()
    if filters.top_k and filters.top_k < scores.shape[-1]:
        threshold = scores.topk(int(filters.top_k), sorted=True).values[..., -1:]
        scores = scores.masked_fill(scores < threshold, -math.inf)
    if filters.top_p is not None and filters.top_p < 1:
        descending, order = scores.sort(descending=True, stable=True)
        probs = descending.softmax(-1)
        outside = probs.cumsum(-1) - probs >= filters.top_p  # the mass before this token already reaches p
        outside[..., 0] = False
        scores = scores.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -math.inf)
    if filters.min_p:
        scores = scores.masked_fill(scores < scores.amax(-1, keepdim=True) + math.log(filters.min_p), -math.inf)
    return exact.masked_fill(scores == -math.inf, -math.inf).log_softmax(-1)
