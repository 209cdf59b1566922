"""Means over prompts with their standard errors.

The prompts are a sample of a kind of work, so that the error says how well these few prompts stand for the kind. It
also has the noise of timing. Speeds and ratios have geometric means: the ratio of two such means is the mean of the
ratios in pairs, and it makes no difference which of two ways is the reference.
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple


class Estimate(NamedTuple):
    """A mean over prompts, and its standard error, which is None for a single prompt."""

    mean: float
    error: float | None

    def __str__(self) -> str:
        """The mean with its error, such as "2.41 ± 0.08"."""
        return " ± ".join(self._digits())

    def in_short(self) -> str:
        """The mean with its error in few characters, for tables: "2.41±.08"."""
        mean, *error = self._digits()
        return "±".join([mean, *(each.removeprefix("0") for each in error)])

    def _digits(self) -> list[str]:
        digits = 2 if abs(self.mean) < 10 else 1 if abs(self.mean) < 100 else 0
        return [f"{each:.{digits}f}" for each in self if each is not None]


def mean_of(values: Sequence[float]) -> Estimate:
    """The arithmetic mean of one value for each prompt, with its standard error."""
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(fmean(values), error)


def geometric_mean_of(values: Sequence[float]) -> Estimate:
    """The geometric mean of positive values, one for each prompt. Its error is the mean logarithm's, times the mean."""
    logarithm = mean_of([math.log(value) for value in values])
    mean = math.exp(logarithm.mean)
    return Estimate(mean, None if logarithm.error is None else mean * logarithm.error)


def share_of(parts: Sequence[int], wholes: Sequence[int]) -> Estimate:
    """The sum of the parts / the sum of the wholes (not 0), such as accepted by offered tokens, one for each prompt.

    The error is that of a ratio estimator (Cochran, Sampling Techniques, section 6.4): the prompts are the independent
    units, not the single tokens.
    """
    count = len(wholes)
    whole = sum(wholes)
    share = sum(parts) / whole
    if count < 2:
        return Estimate(share, None)
    squares = sum((part - share * of) ** 2 for part, of in zip(parts, wholes, strict=True))
    return Estimate(share, math.sqrt(count / (count - 1) * squares) / whole)
