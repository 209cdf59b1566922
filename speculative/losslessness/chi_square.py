"""Pearson's chi-square of counts and a distribution, its power, and the total variation that sampling alone gives.

Of N independent outcomes x came O(x) times, and E(x) = N law(x) times were expected. law(x) is its probability.

    statistic = sum_x (O(x) - E(x))^2 / E(x),     p = P(chi-square with (cells - 1) degrees of freedom >= statistic).

Outcomes of which fewer than 5 are expected share one cell. If fewer than 5 of all of them together are expected, they
count in the least likely other cell. Otherwise one outcome of which 0.001 are expected would be an alarm once in a
thousand runs. An outcome of probability 0 has p = 0. Chi-square is an approximation: if few cells expect little more
than 5, a p of 1e-6 means up to 7e-5.

Power. The total variation d between two distributions is the largest difference in the probability of any event. A
distribution at d from this one moves the statistic by 4 N d^2 or more. By the bounds of Birge 2001 (lemma 8.1) it is
found with probability 1 - b if

    4 N d^2 >= A + 4 y + sqrt(8 A y + 16 y^2 + 4 y k),     A = 2 sqrt(k x) + 2 x,     y = ln(1 / b),

with k degrees of freedom and x = ln(2 / significance), because `goodness_of_fit` makes two tests. So four times the
outcomes find half of it, and fewer cells find more. A difference between outcomes that share a cell is not found.
"""

import math

import torch
from torch import Tensor

SIGNIFICANCE = 1e-6  # a right program fails less often than once in a million seeds
LEAST_EXPECTED = 5  # outcomes of a cell


def described(value: object) -> str:
    """What an argument is, for messages: dtype and shape of a tensor, or the class of anything else."""
    return f"{value.dtype} {[*value.shape]}" if isinstance(value, Tensor) else type(value).__name__


def joint_counts(tokens: Tensor, vocab_size: int) -> Tensor:
    """How often each of the vocab_size ** T outputs occurs in tokens LongTensor[B, T]: LongTensor[vocab_size ** T]."""
    index = torch.zeros_like(tokens[:, 0])
    for column in tokens.unbind(1):
        index = index * vocab_size + column
    return index.bincount(minlength=vocab_size ** tokens.shape[1])


def chi_square_p_value(counts: Tensor, law: Tensor) -> float:
    """The p-value of Pearson's chi-square: how likely counts drawn from `law` fit it as badly as these, or worse.

    counts: [n], how often each outcome came; law: [n], the probability of each

    It is 0 if an outcome of probability 0 came, and 1 if all outcomes share one cell.
    """
    counts = counts.flatten().double()
    law = law.flatten().double()
    if counts[law == 0].any():
        return 0.0
    cells = cells_of(law, float(counts.sum()))
    if not cells.any():
        return 1.0  # there is one cell
    counts, expected = (cells.bincount(weights) for weights in (counts, law * counts.sum()))
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(statistic.new_tensor((len(counts) - 1) / 2), statistic / 2))


def detectable_total_variation(
    law: Tensor, sequences: int, *, significance: float = SIGNIFICANCE, power: float = 0.99
) -> float:
    """The least total variation from `law` that a test of `sequences` outputs finds with probability `power`.

    Four times the sequences find half of it. 1.0 if there are too few sequences to distinguish two outputs.

    law:          [V, ..., V], the distribution that outputs should have
    significance: the probability with which the test fails for outputs that have it
    """
    freedom = int(cells_of(law.flatten().double(), sequences).max())
    x = math.log(2 / significance)
    y = -math.log1p(-power)
    if not freedom:  # one output is certain: any other one is found
        return 1.0 if law.max() < 1 else -math.expm1(-y / sequences)
    least = 2 * math.sqrt(freedom * x) + 2 * x
    moved = least + 4 * y + math.sqrt(8 * least * y + 16 * y**2 + 4 * y * freedom)
    return min(1.0, math.sqrt(moved / (4 * sequences)))


def cells_of(law: Tensor, sequences: float) -> Tensor:
    """The number of each outcome's cell, LongTensor[n]; outcomes that are expected less than 5 times share one.

    law: [n], the probabilities of the outcomes; sequences: how many outcomes are drawn
    """
    expected = law * sequences
    rare = expected < LEAST_EXPECTED
    cells = (~rare).cumsum(0) - 1
    pool = int(cells[-1]) + 1
    if pool and expected[rare].sum() < LEAST_EXPECTED:
        pool = int(cells[expected.where(~rare, math.inf).argmin()])
    return cells.where(~rare, pool)


def expected_total_variation(law: Tensor, sequences: int) -> float:
    """The mean total variation between a distribution and the shares of `sequences` outputs drawn from it.

    Half the sum over x of E|O(x) / N - law(x)|, O(x) being binomial: the mean deviation of de Moivre 1730.
    """
    law = law[(law > 0) & (law < 1)]
    above = (law * sequences).floor() + 1  # E|O - N p| = 2 above (1 - p) P(O = above)
    log_ways = math.lgamma(sequences + 1) - torch.lgamma(above + 1) - torch.lgamma(sequences - above + 1)
    log_odds = above * law.log() + (sequences - above) * torch.log1p(-law)
    return float((above * (1 - law) * (log_ways + log_odds).exp()).sum() / sequences)
