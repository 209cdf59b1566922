"""The part of papers.py for Sequoia's figure 3: the rejection rate by the number of children, for every way to verify.

The rate is the probability that none of k children is accepted, so that the step ends at this position. Positions are
those that decoding meets: held-out prompts continued by samples of the target at the same temperature. With target P,
draft Q and F(l) = sum_v max(P(v) - l Q(v), 0), the mass of P that l Q leaves uncovered:

    without replacement   Sequoia, RSD, DySpec   chain_acceptance of children drawn by gumbel_topk
    with replacement      SpecInfer              F(l_{k+1}), where l_1 = 0 and l_{k+1} = l_k + F(l_k)
    k-seq                 SpecTr                 F(g), where 1 - (1 - beta)^k = g beta and beta = (1 - F(g)) / g
    race                  ERSD                   argmax log P + G is none of the k largest log Q + G
    naive-distinct                               P outside children drawn without replacement
    top-k                                        P outside the k most likely children
    least for i.i.d.                             max over sets H of tokens of Q(H)^k - P(H)

In SpecInfer's rounds a child is rejected with probability F(l + F(l)) / F(l), whatever was drawn before, and the
product telescopes. The last row is no method but what optimal transport leaves to any lossless verifier of independent
children: all k fall into H with probability Q(H)^k, and the token that is chosen with P(H). The maximum is at a set of
the largest Q / P, because Q(H)^k - P(H) is convex in (Q(H), P(H)).

The first row, the race and naive-distinct share draws of the children at each position; the others are exact.
Rates are means over positions, and standard errors take prompts as the independent units. "lowest" names the lowest
rate, and those that paired differences over prompts cannot tell from it (two standard errors). The power law is
rate = a k^-b, by least squares of log rate on log k for all k; the error of b is a jackknife over the prompts.
"""

import math
from typing import NamedTuple

import torch
from papers_setting import Row, Setting
from torch import Tensor

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.kernels.noise import Stream, gumbel_noise
from heavypath.kernels.sampling import gumbel_topk
from heavypath.speculative.trees.acceptance import chain_acceptance

SEQUOIA, BOUND = "without replacement", "least for i.i.d."
METHODS = (SEQUOIA, "with replacement", "k-seq", "race", "naive-distinct", "top-k", BOUND)
BISECTIONS = 40  # of an interval whose length is k - 1


class PowerLaw(NamedTuple):
    """rate = factor * k ** -exponent."""

    factor: Tensor
    exponent: Tensor
    r_squared: Tensor


def rejection_rates(
    target_logits: Tensor, draft_logits: Tensor, children: int, *, temperature: float, draws: int, seed: int, row: int
) -> dict[str, Tensor]:
    """The mean rejection rate over positions with 1 .. children children: fp64 [children] by method.

    target_logits, draft_logits [R, V]: the positions. row: the first of the R * draws rows that name the noise.
    """
    filters = Filters(temperature)
    target_logprobs = filtered_logprobs(target_logits, filters)
    target_probs, draft_probs = target_logprobs.exp(), filtered_logprobs(draft_logits, filters).exp()
    likeliest = gumbel_topk(draft_logits, children, temperature=0.0).tokens  # [R, K]

    rows = row + torch.arange(len(target_logits) * draws)
    target_draws, draft_draws = (probs.repeat_interleave(draws, 0) for probs in (target_probs, draft_probs))
    drawn = gumbel_topk(
        draft_logits.repeat_interleave(draws, 0), children, temperature=temperature, seed=seed, rows=rows
    ).tokens  # [R * draws, K]
    gumbels = gumbel_noise(seed, Stream.DRAFT, rows, target_logits.shape[1])
    winner = (target_logprobs.repeat_interleave(draws, 0) + gumbels).argmax(-1, keepdim=True)

    rates = {
        SEQUOIA: 1 - chain_acceptance(target_draws, draft_draws, drawn).cumsum(1),
        "with replacement": rounds_rejection(target_probs, draft_probs, children),
        "k-seq": uncovered(target_probs, draft_probs, kseq_multiplier(target_probs, draft_probs, children)),
        "race": 1 - (drawn == winner).double().cumsum(1),
        "naive-distinct": 1 - target_draws.gather(1, drawn).cumsum(1),
        "top-k": 1 - target_probs.gather(1, likeliest).cumsum(1),
        BOUND: least_rejection(target_probs, draft_probs, children),
    }
    return {name: rate.mean(0).clamp_min(0) for name, rate in rates.items()}


def uncovered(target_probs: Tensor, draft_probs: Tensor, multiplier: Tensor) -> Tensor:
    """F(l) of rows [R, V] at l [R, K]: [R, K]. It is a rejection rate where l solves the equation of a method."""
    columns = [
        (target_probs - column * draft_probs).clamp_min(0).sum(1, keepdim=True) for column in multiplier.split(1, 1)
    ]
    return torch.cat(columns, dim=1)


def rounds_rejection(target_probs: Tensor, draft_probs: Tensor, children: int) -> Tensor:
    """SpecInfer's multi-step speculative sampling of 1 .. children independent children: [R, children]."""
    multiplier, rate = 0.0, target_probs.new_ones(len(target_probs), 1)
    rates = []
    for _ in range(children):
        multiplier = multiplier + rate
        rate = uncovered(target_probs, draft_probs, multiplier)
        rates.append(rate)
    return torch.cat(rates, dim=1)


def kseq_multiplier(target_probs: Tensor, draft_probs: Tensor, children: int) -> Tensor:
    """SpecTr's gamma for 1 .. children independent children, [R, children], by bisection of [1, k].

    Each child in turn is accepted with probability min(1, P / (g Q)), on average beta(g) = sum_v min(Q, P / g).
    1 - (1 - beta)^k falls with g and g beta rises.
    """
    count = torch.arange(1.0, children + 1, dtype=torch.float64)
    low, high = torch.ones(len(target_probs), children, dtype=torch.float64), count.expand(len(target_probs), -1)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        covered = 1 - uncovered(target_probs, draft_probs, middle)  # g beta
        below = 1 - (1 - covered / middle) ** count > covered
        low, high = middle.where(below, low), high.where(below, middle)
    return (low + high) / 2


def least_rejection(target_probs: Tensor, draft_probs: Tensor, children: int) -> Tensor:
    """Least rejection rate of any lossless verifier of 1 .. children independent children: [R, children]."""
    order = (target_probs / draft_probs).argsort(1)
    target_mass, draft_mass = (probs.gather(1, order).cumsum(1) for probs in (target_probs, draft_probs))
    gaps = [(draft_mass**count - target_mass).amax(1).clamp_min(0) for count in range(1, children + 1)]
    return torch.stack(gaps, dim=1)


def power_law(rates: Tensor) -> PowerLaw:
    """Least squares of log rates [..., K] on log k, k = 1 .. K. Not a number where a rate is 0."""
    x = torch.arange(1.0, rates.shape[-1] + 1, dtype=torch.float64).log()
    y = rates.log()
    x_offset, y_offset = x - x.mean(), y - y.mean(-1, keepdim=True)
    slope = (x_offset * y_offset).sum(-1) / (x_offset**2).sum()
    explained = slope**2 * (x_offset**2).sum() / (y_offset**2).sum(-1)
    return PowerLaw((y.mean(-1) - slope * x.mean()).exp(), -slope, explained)


def summary(rates: dict[str, Tensor]) -> dict:
    """What is written about one temperature, from the rates [prompts, children] of each method."""
    methods = {name: _described(rate) for name, rate in rates.items()}
    means = {name: rate.mean(0) for name, rate in rates.items() if name != BOUND}
    lowest = {}
    for place in range(len(means[SEQUOIA])):
        here = {name: float(mean[place]) for name, mean in means.items()}
        best = min(here, key=here.__getitem__)
        gaps = {name: rates[name][:, place] - rates[best][:, place] for name in means}
        lowest[str(place + 1)] = [name for name, gap in gaps.items() if gap.mean() <= 2 * _standard_error(gap)]
    return {"methods": methods, "lowest": lowest}


def _described(rate: Tensor) -> dict:
    prompts = len(rate)
    law = power_law(rate.mean(0))
    exponents = power_law((rate.sum(0) - rate) / (prompts - 1)).exponent  # each without one prompt: the jackknife
    fit = law._asdict() | {"exponent_standard_error": (prompts - 1) / math.sqrt(prompts) * exponents.std()}
    fit = {key: float(value) for key, value in fit.items()}
    return {
        "rejection": [round(value, 6) for value in rate.mean(0).tolist()],
        "standard_error": [round(value, 6) for value in _standard_error(rate).tolist()],
        "power_law": {key: round(value, 4) if math.isfinite(value) else None for key, value in fit.items()},
    }


def _standard_error(rate: Tensor) -> Tensor:
    return rate.std(0) / math.sqrt(len(rate))


def figure_3(setting: Setting) -> Row:
    """Figure 3: rates with 1 .. 32 children at three temperatures, by all ways to verify."""
    children, draws, temperatures = (4, 2, (1.0,)) if setting.small else (32, 32, (0.2, 0.6, 1.0))
    found, rows = {}, []
    for temperature in temperatures:
        rates = [
            rejection_rates(
                target, draft, children, temperature=temperature, draws=draws,
                seed=setting.seed + 1,  # the texts were drawn with the noise of the seed itself
                row=index * len(target) * draws,
            )
            for index, (target, draft) in enumerate(setting.contexts(temperature))
        ]  # fmt: skip
        result = summary({name: torch.stack([rate[name] for rate in rates]) for name in METHODS})
        found[str(temperature)] = result
        for name, method in result["methods"].items():
            cells = {f"k = {2**power}": method["rejection"][2**power - 1] for power in range(children.bit_length())}
            rows.append({"temperature": temperature, "method": name, **cells, **method["power_law"]})
    return {"rows": rows, "temperature": found}


PARTS = {"rejection": figure_3}
