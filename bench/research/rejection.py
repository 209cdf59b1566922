"""Rejection rate against the number of children, for every way to verify: Sequoia's figure 3 on the shipped pair.

    python bench/research/rejection.py [--temperatures 0.2 0.6 1.0] [--children 32] [--json FILE] [--plot FILE]

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

The first row, the race and naive-distinct share --draws draws of the children at each position; the others are exact.
Rates are means over positions, and standard errors take prompts as the independent units. "lowest" names the lowest
rate, and those that paired differences over prompts cannot tell from it (two standard errors). The power law is
rate = a k^-b, by least squares of log rate on log k for all k from 1 to --children; the error of b is a jackknife
over the prompts.
"""

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import beside  # noqa: F401
import torch
from common import argument_parser, environment, figure_of, made, options_of, quiet_demo_pair, show, write_results
from torch import Tensor

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.kernels.noise import Stream, gumbel_noise
from heavypath.kernels.sampling import gumbel_topk
from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.demo import DemoPair, demo_prompts
from heavypath.speculative.trees.acceptance import chain_acceptance

SEQUOIA, BOUND = "without replacement", "least for i.i.d."
LABELS = {
    SEQUOIA: "without replacement (Sequoia, RSD, DySpec)",
    "with replacement": "with replacement (SpecInfer)",
    "k-seq": "k-seq (SpecTr)",
    "race": "race (ERSD)",
    "naive-distinct": "naive-distinct",
    "top-k": "top-k",
    BOUND: "least for i.i.d. children",
}
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


@torch.no_grad()
def positions(
    pair: DemoPair, prompts: Sequence[str], *, new_tokens: int, temperature: float, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Target's and draft's logits [new_tokens, V] before each token that the target samples after each prompt."""
    inputs = pair.tokenizer(list(prompts), return_tensors="pt", padding=True)
    decoder = SpeculativeDecoder(pair.target, pair.draft, "autoregressive")
    texts = decoder.generate(
        **inputs, max_new_tokens=new_tokens, temperature=temperature, seed=seed, eos_token_id=None
    ).sequences
    for text, padding in zip(texts, (inputs.attention_mask == 0).sum(1).tolist(), strict=True):
        target_logits, draft_logits = (
            model(text[None, padding:-1], logits_to_keep=new_tokens).logits[0].float()
            for model in (pair.target, pair.draft)
        )
        yield target_logits, draft_logits


def print_table(temperature: str, result: dict) -> None:
    """Rates at powers of two, a row for each method."""
    shown, rows = [2**power for power in range(len(result["lowest"]).bit_length())], []
    for name, method in result["methods"].items():
        cells = {f"k = {count}": f"{method['rejection'][count - 1]:.3f}" for count in shown}
        rows.append({"method": name} | cells | method["power_law"])
    show(rows, title=f"rejection rate at temperature {temperature}")


def draw_plot(results: dict[str, dict], path: Path) -> None:
    """One panel for each temperature, both axes logarithmic."""
    figure = figure_of(3.9 * len(results), 4.6)
    panels = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for axes, (temperature, result) in zip(panels, results.items(), strict=True):
        for place, (name, method) in enumerate(result["methods"].items()):
            rate = method["rejection"]
            look = {"color": f"C{place}", "linewidth": 2.4 if name == SEQUOIA else 1.5}
            if name == BOUND:
                look = {"color": "0.45", "linestyle": (0, (4, 2)), "linewidth": 1.2}
            axes.plot(range(1, len(rate) + 1), rate, label=LABELS[name], **look)
        law = result["methods"][SEQUOIA]["power_law"]
        if law["exponent"] is not None:
            fitted = [law["factor"] * count ** -law["exponent"] for count in range(1, len(rate) + 1)]
            axes.plot(range(1, len(rate) + 1), fitted, "k:", label="power law of Sequoia's")
            text = f"{law['factor']:.2f} $k^{{-{law['exponent']:.2f}}}$,  $r^2$ = {law['r_squared']:.3f}"
            axes.text(0.04, 0.04, text, transform=axes.transAxes)
        axes.set(xscale="log", yscale="log", title=f"temperature {temperature}", xlabel="children k")
        axes.set_xticks(ticks := [2**power for power in range(len(rate).bit_length())], [str(tick) for tick in ticks])
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("rejection rate: none of k accepted")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle("How often all k children are rejected, on the shipped demo pair")
    figure.savefig(made(path), dpi=100)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser(
        __doc__, threads=False, plot="draw a picture to this file, a .png or .svg (needs matplotlib)"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.2, 0.6, 1.0])
    parser.add_argument("--children", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=24, help="at least 2")
    parser.add_argument("--new-tokens", type=int, default=64, help="positions after each prompt")
    parser.add_argument("--draws", type=int, default=32, help="of the children, at each position")
    parser.add_argument("--seed", type=int, default=0)
    arguments = options_of(parser, argv, temperatures=[1.0], children=4, prompts=2, new_tokens=3, draws=2)
    pair = quiet_demo_pair()
    prompts = demo_prompts()[: arguments.prompts]
    if len(prompts) < 2 or min(arguments.new_tokens, arguments.draws) < 1 or min(arguments.temperatures) <= 0:
        parser.error("expected at least 2 prompts, 1 new token and 1 draw, and temperatures above 0")
    if not 1 <= arguments.children <= pair.target.config.vocab_size:
        parser.error(f"--children must be in 1 .. {pair.target.config.vocab_size}, got {arguments.children}")

    results = {}
    for temperature in arguments.temperatures:
        contexts = positions(
            pair, prompts, new_tokens=arguments.new_tokens, temperature=temperature, seed=arguments.seed
        )
        rates = [
            rejection_rates(
                *logits,
                arguments.children,
                temperature=temperature,
                draws=arguments.draws,
                seed=arguments.seed + 1,  # the texts were drawn with the noise of --seed
                row=index * arguments.new_tokens * arguments.draws,
            )
            for index, logits in enumerate(contexts)
        ]
        result = summary({name: torch.stack([rate[name] for rate in rates]) for name in LABELS})
        results[str(temperature)] = result
        print_table(str(temperature), result)
    facts = environment("cpu", arguments, "new_tokens", "draws", "seed")
    facts |= {"prompts": len(prompts), "seconds": round(time.process_time(), 1)}
    write_results(arguments.json, facts, temperature=results)
    if arguments.plot is not None:
        draw_plot(results, arguments.plot)


if __name__ == "__main__":
    main()
