"""Prompts decoded as one batch, by any verifier, and how sure the tokens per forward pass of the target are.

A batch gives tokens per forward far sooner than one prompt after the other, and the same: each sequence counts its own
steps. The standard errors are a jackknife over the prompts, the independent units: of the m values that a statistic has
without one of m prompts, sqrt((m - 1) / m) times the root of the sum of their squared distances from their mean.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.speculative.decoding.statistics import Statistics


class Texts(NamedTuple):
    """The prompts as one left-padded batch, each one `seeds` times, one after the other."""

    prompts: list[Tensor]  # LongTensors [1, T]
    tokens: Tensor  # [B, T]
    mask: Tensor  # [B, T]
    seeds: int

    @property
    def options(self) -> dict:
        """Options of `generate` that belong to `tokens`."""
        return {"attention_mask": self.mask, "pad_token_id": 0, "eos_token_id": None}


def batch_of(prompts: list[Tensor], seeds: int = 1) -> Texts:
    rows = [prompt[0] for prompt in prompts for _ in range(seeds)]
    longest = max(map(len, rows))
    padded = torch.stack([torch.cat([row.new_zeros(longest - len(row)), row]) for row in rows])
    mask = torch.stack([torch.arange(longest, device=row.device) >= longest - len(row) for row in rows])
    return Texts(prompts, padded, mask.long(), seeds)


def by_transformers(target: PreTrainedModel, texts: Texts, new_tokens: int, temperature: float) -> Tensor:
    """transformers' own texts, each of exactly so many new tokens."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    options: dict = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "pad_token_id": 0}
    options |= sampling if temperature > 0 else {"do_sample": False}
    return target.generate(texts.tokens, attention_mask=texts.mask, **options)


class Estimate(NamedTuple):
    """A statistic of all prompts, and its standard error; not a number for a single prompt."""

    value: float
    standard_error: float


def jackknife(statistic: Callable[[Tensor], float], prompts: int) -> Estimate:
    """statistic: of the prompts whose numbers it is given, LongTensor[any]."""
    every = torch.arange(prompts)
    if prompts == 1:
        return Estimate(statistic(every), math.nan)
    without = [statistic(every[every != left]) for left in range(prompts)]
    middle = sum(without) / prompts
    return Estimate(
        statistic(every), math.sqrt((prompts - 1) / prompts * sum((each - middle) ** 2 for each in without))
    )


class Counts(NamedTuple):
    """Tokens and steps of each prompt, fp64 [prompts]."""

    tokens: Tensor
    steps: Tensor

    @classmethod
    def of(cls, stats: Statistics, seeds: int = 1) -> "Counts":
        """Of a batch of `Texts`."""
        return cls(*(each.view(-1, seeds).sum(1).double() for each in (stats.tokens_of, stats.steps_of)))

    def per_forward(self, kept: Tensor) -> float:
        """Tokens per forward of some prompts together: block efficiency."""
        return float(self.tokens[kept].sum() / self.steps[kept].sum())


def tokens_per_forward(stats: Statistics, seeds: int = 1) -> Estimate:
    """Of all prompts of a batch of `Texts`."""
    own = Counts.of(stats, seeds)
    return jackknife(own.per_forward, len(own.tokens))


def gain(stats: Statistics, reference: Statistics, seeds: int = 1) -> Estimate:
    """How many times the reference's tokens per forward, less 1: texts may differ between the two, prompts do not."""
    own, other = Counts.of(stats, seeds), Counts.of(reference, seeds)
    return jackknife(lambda kept: own.per_forward(kept) / other.per_forward(kept) - 1, len(own.tokens))


def more_per_forward(stats: Statistics, other: Statistics) -> Estimate:
    """How many more tokens per forward than another batch of the same prompts has."""
    own, others = Counts.of(stats), Counts.of(other)
    return jackknife(lambda kept: own.per_forward(kept) - others.per_forward(kept), len(own.tokens))
