"""Whether sampled outputs have a distribution, and which tokens depart from it.

Outputs of T tokens are counted whole, and Pearson's chi-square (`chi_square.py`) compares the counts with the joint
distribution. Noise that is used twice, or that two steps share, may leave the distribution of each single token right.

A second test looks at each token after each prefix that came. Of n outputs with that prefix, k go on with a token whose
probability there is a. With q = k / n

    P(a deviation of this size, or larger) <= 2 exp(-n (q ln(q / a) + (1 - q) ln((1 - q) / (1 - a))))   (Chernoff 1952)

for all n and a, so nothing has to be pooled. Times the number of such tokens, this bounds the probability that any of
them deviates so much. A departure is named after the prefix at which it arises: tokens that follow a wrong token with
the right distribution are right.

The p-value is that of both tests: twice the lesser one.

A good fit does not show a total variation below the detectable one, nor other prompts, settings and models. It does not
show tokens after the first T, as those of deeper trees and of caches that wrap around, nor draws that are too even, and
so not independent. It does not show that a seed gives the same output again. If logits are equal, or nearly, two right
programs may cut top-p or top-k at different tokens.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from heavypath.speculative.losslessness.chi_square import (
    LEAST_EXPECTED,
    SIGNIFICANCE,
    cells_of,
    chi_square_p_value,
    described,
    detectable_total_variation,
    expected_total_variation,
    joint_counts,
)

MOST_NAMED = 5  # departures of tokens, and of outputs
NAMED_BELOW = 0.01  # p-values of departures that are printed


class Departure(NamedTuple):
    """How often a token came after a prefix of new tokens, or a whole output came, and how often that was expected."""

    prefix: tuple[int, ...]  # empty for the first token and for whole outputs
    tokens: tuple[int, ...]  # one, or a whole output
    observed: int
    expected: float
    deviation: float  # the standard deviation of a right sampler
    p_value: float  # at most this, that any of all tokens, or outputs, deviates so much

    @property
    def residual(self) -> float:
        """By how many standard deviations the count is above the expected one; negative below it."""
        away = self.observed - self.expected
        return away / self.deviation if self.deviation else math.copysign(math.inf, away) if away else 0.0

    def __str__(self) -> str:
        what = f"text {self.tokens}"
        if len(self.tokens) == 1:
            after = f", after {self.prefix}" if self.prefix else ""
            what = f"position {len(self.prefix) + 1}{after}: token {self.tokens[0]}"
        expected = f"{self.expected:.1f} +- {self.deviation:.1f}"
        return f"{what} came {self.observed} times, expected {expected} ({self.residual:+.1f} deviations)"


class GoodnessOfFit(NamedTuple):
    """The fit of sampled outputs to a distribution, and where they depart from it. Printed, it says so in words."""

    p_value: float
    sequences: int
    total_variation: float  # between the outputs' shares and the distribution
    expected_total_variation: float  # of a right sampler, on average; it varies by less than 1 / (2 sqrt(sequences))
    detectable_total_variation: float  # which such a run finds with probability 0.99
    tokens: list[Departure]  # those that depart most, given the tokens before them; the first is the most surprising
    texts: list[Departure]  # the same of whole outputs

    def is_lossless(self, significance: float = SIGNIFICANCE) -> bool:
        """Whether no departure was found. A right sampler gets False with probability `significance`, or nearly so."""
        return self.p_value >= significance

    def __str__(self) -> str:
        fits = self.is_lossless()
        verdict = "no departure from the distribution" if fits else "departs from the distribution"
        lines = [
            f"{verdict}: p = {self.p_value:.3g}, {self.sequences} sequences",
            f"total variation {self.total_variation:.4f}, by sampling alone {self.expected_total_variation:.4f}; "
            f"{self.detectable_total_variation:.4f} is found with probability 0.99",
        ]
        if not fits:
            named = self.tokens + [text for text in self.texts if len(text.tokens) > 1]
            lines += [f"  {departure}" for departure in named if departure.p_value < NAMED_BELOW]
        return "\n".join(lines)


def check_losslessness(
    sample: Callable[[Tensor, int], Tensor],
    law: Tensor,
    prompt: Tensor,
    *,
    sequences: int = 20_000,
    seed: int = 0,
    batch_size: int | None = None,
) -> GoodnessOfFit:
    """Sample outputs, and test if they have the distribution `law`.

    sample(prompt LongTensor[P], seed) -> the T new tokens LongTensor[T], without the prompt. It is called once for each
    sequence, with seed, seed + 1, ... With a batch_size it is called as sample(prompts LongTensor[B, P], seed) and
    gives LongTensor[B, T]; the last batch may be smaller. Rows of a batch must be independent of each other.

    law: probabilities [V, ..., V] with T dimensions, as `joint_law` gives them; sequences: how many are sampled

    Raises TypeError and ValueError for a law that is no distribution, a prompt or number out of range, and if sample
    returns no LongTensor, another shape, or tokens outside the vocabulary.
    """
    law = _checked_law(law, sequences)
    if not isinstance(prompt, Tensor) or prompt.dtype != torch.long or prompt.ndim != 1:
        raise TypeError(f"prompt must be a LongTensor [P], got {described(prompt)}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be None or at least 1, got {batch_size}")
    texts = []
    for call, start in enumerate(range(0, sequences, batch_size or 1)):
        lead = [] if batch_size is None else [min(batch_size, sequences - start)]
        text = sample(prompt.repeat([*lead, 1]), seed + call)
        shape = [*lead, law.ndim]
        if not isinstance(text, Tensor) or text.dtype != torch.long:
            raise TypeError(f"sample must return a LongTensor {shape}, got {described(text)}: wrap it in torch.tensor")
        if [*text.shape] != shape:
            raise ValueError(
                f"sample must return the {law.ndim} new tokens {shape}, without the prompt and padded where a text "
                f"ends early, got {[*text.shape]}"
            )
        texts.append(text.reshape(-1, law.ndim).cpu())
    return goodness_of_fit(torch.cat(texts), law)


def goodness_of_fit(texts: Tensor, law: Tensor) -> GoodnessOfFit:
    """Test if outputs have a distribution; the result names the tokens that depart from it most.

    texts: LongTensor[N, T], N independent outputs of T tokens
    law:   [V, ..., V] with T dimensions, the probability of each output

    Raises TypeError and ValueError for texts and laws of other types and shapes, for tokens outside the vocabulary, for
    a law that is no distribution, and for too few texts to be compared with it.
    """
    if not isinstance(texts, Tensor) or texts.dtype != torch.long or texts.ndim != 2:
        raise TypeError(f"texts must be a LongTensor [N, T], got {described(texts)}")
    law = _checked_law(law, len(texts))
    if texts.shape[1] != law.ndim:
        raise ValueError(f"texts must have the law's {law.ndim} tokens, got {texts.shape[1]}")
    texts, vocab_size, sequences = texts.cpu(), law.shape[0], len(texts)
    if not 0 <= int(texts.min()) <= int(texts.max()) < vocab_size:
        raise ValueError(f"tokens must be in 0 .. {vocab_size - 1}, got {int(texts.min())} .. {int(texts.max())}")

    counts = joint_counts(texts, vocab_size).view(law.shape)
    tokens = _departing_tokens(counts, law)
    by_token = tokens[0].p_value if tokens else 1.0
    return GoodnessOfFit(
        p_value=min(1.0, 2 * min(chi_square_p_value(counts, law), by_token)),
        sequences=sequences,
        total_variation=float((counts / sequences - law).abs().sum() / 2),
        expected_total_variation=expected_total_variation(law, sequences),
        detectable_total_variation=detectable_total_variation(law, sequences),
        tokens=tokens,
        texts=_departures(counts, counts.sum(), law, 0, law.numel()),
    )


def _departing_tokens(counts: Tensor, law: Tensor) -> list[Departure]:
    """The most surprising counts of a token after a prefix, at any position. counts, law: [V, ..., V], of outputs."""
    found = []
    asked = sum(len(law) ** (place + 1) for place in range(law.ndim))
    for position in range(law.ndim):
        later = [*range(position + 1, law.ndim)]
        seen, mass = (each.sum(later) if later else each for each in (counts, law))
        given = (mass / mass.sum(-1, keepdim=True)).clamp(max=1)  # NaN after a prefix of probability 0
        found += _departures(seen, seen.sum(-1, keepdim=True), given, position, asked)
    return sorted(found, key=lambda one: (one.p_value, -abs(one.residual)))[:MOST_NAMED]


def _departures(seen: Tensor, came: Tensor, law: Tensor, prefix: int, asked: int) -> list[Departure]:
    """The most surprising of the counts seen [V, ..., V], how often each prefix and the tokens after it came.

    came:   how often the prefix came; law: the distribution after it. Both broadcast to [V, ..., V]
    prefix: the number of tokens of a prefix; asked: the number of all tests, for the p-values
    """
    expected = came * law
    surprise = torch.zeros_like(expected)  # the exponent of Chernoff's bound
    for some, due in ((seen.double(), expected), ((came - seen).double(), came - expected)):
        surprise += torch.xlogy(some, some) - torch.xlogy(some, due)
    surprise = surprise.where(~law.isnan(), 0.0).flatten()
    found = []
    for value, index in zip(*surprise.topk(min(MOST_NAMED, len(surprise))), strict=True):
        if value > 0:
            text = tuple(int(token) for token in torch.unravel_index(index, seen.shape))
            deviation = float((expected * (1 - law)).flatten()[index].sqrt())
            p_value = min(1.0, 2 * asked * math.exp(-value))
            observed = int(seen.flatten()[index])
            due = float(expected.flatten()[index])
            found.append(Departure(text[:prefix], text[prefix:], observed, due, deviation, p_value))
    return found


def _checked_law(law: Tensor, sequences: int) -> Tensor:
    """The distribution `law` in fp64 on the CPU. Raises an error if it is none, or with too few sequences for it."""
    if not isinstance(law, Tensor) or not law.is_floating_point() or len({*law.shape}) != 1:
        raise TypeError(f"law must be probabilities [V, ..., V] with a dimension for each token, got {described(law)}")
    law = law.detach().double().cpu()
    if not (bool((law >= 0).all()) and abs(float(law.sum()) - 1) < 1e-4):
        raise ValueError(f"law must be at least 0 everywhere and sum to 1, got a sum of {float(law.sum()):.6g}")
    if sequences < 1 or (not int(cells_of(law.flatten(), sequences).max()) and law.max() < 1):
        raise ValueError(
            f"{sequences} sequences are too few, as no two kinds of texts are expected {LEAST_EXPECTED} times each: "
            f"take more, or a law of fewer tokens"
        )
    return law / law.sum()
