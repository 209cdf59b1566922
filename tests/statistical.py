"""Chi-square goodness of fit, without scipy."""

import torch
from torch import Tensor

SIGNIFICANCE = 1e-6  # a right program fails less often than once in a million seeds


def chi_square_p_value(counts: Tensor, law: Tensor) -> float:
    """Probability of a fit as bad as counts [n] to law [n]; cells that expect fewer than 5 are pooled."""
    counts, expected = counts.double(), law.double() * counts.sum()
    assert float(counts[law == 0].sum()) == 0, "an impossible outcome was seen"
    small = expected < 5
    counts = torch.cat([counts[~small], counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))


def joint_counts(tokens: Tensor, vocab_size: int) -> Tensor:
    """How often each of the vocab_size ** T texts occurs among tokens LongTensor[B, T]."""
    index = torch.zeros_like(tokens[:, 0])
    for column in tokens.unbind(1):
        index = index * vocab_size + column
    return index.bincount(minlength=vocab_size ** tokens.shape[1])
