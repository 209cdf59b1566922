"""`Costs`: seconds of a step for trees of several sizes, and of drafting a level, for one batch size.

If B sequences are decoded together, a step with trees of n nodes verifies B n rows, and drafting a level is one pass of
the draft for all B. With few rows a pass takes the time of reading the weights, so another row costs little; with many
rows each costs its products. So a tree's cost in steps of plain decoding depends on B, and larger batches want smaller
trees.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # batch sizes for which costs are estimated


@dataclass(frozen=True)
class Attention:
    """Estimated seconds that attention to a long prefix adds to a step of one sequence, in all layers.

    reading: of all keys and values, once
    node:    of the products of one node with all of them; of n nodes and reading the longer counts
    """

    reading: float
    node: float

    def seconds(self, nodes: int) -> float:
        """Of a tree with this many nodes."""
        return max(self.reading, nodes * self.node)


@dataclass(frozen=True)
class Costs:
    """Costs in seconds, measured (in a profile) or estimated.

    step:  nodes of a tree -> seconds of a step without drafting, never falling; 1 node is plain decoding
    level: seconds of drafting one level of a tree
    step_error, level_error: the standard errors of both in seconds; empty and 0 for estimates
    rounds: number of rounds in which the sizes were timed; 0 for estimates
    """

    step: dict[int, float]
    level: float
    step_error: dict[int, float] = field(default_factory=dict)
    level_error: float = 0.0
    rounds: int = 0

    def with_attention(self, attention: "Attention", batch: int) -> "Costs":
        """These costs for `batch` sequences whose prompts are so long that attention counts."""
        step = {}
        for size, seconds in self.step.items():
            step[size] = seconds + batch * attention.seconds(size)
        return replace(self, step=step)

    def steps_of(self, sizes: Sequence[int]) -> dict[int, float]:
        """{nodes of a tree: cost of a step without drafting, in steps of plain decoding}, interpolated linearly.

        Sizes above the largest known one are omitted.
        """
        plain = self.step[1]
        largest = max(self.step)
        steps = {}
        for size in sizes:
            if size <= largest:
                steps[size] = _interpolated(self.step, size) / plain
        return steps

    def step_seconds(self, size: int, depth: int) -> float:
        """Seconds of a step and its drafting, for a tree of this size and depth; larger sizes cost in proportion."""
        largest = max(self.step)
        verifying = _interpolated(self.step, min(size, largest))
        if size > largest:
            verifying *= size / largest
        return verifying + depth * self.level

    def relative_error(self, size: int, depth: int) -> float:
        """The standard error of `step_seconds`, divided by it, for a size within the known ones."""
        seconds = _interpolated(self.step, size) + depth * self.level
        error_of_step = _interpolated(self.step_error, size)
        error_of_levels = depth * self.level_error
        return math.hypot(error_of_step, error_of_levels) / seconds

    def between(self, other: "Costs", share: float) -> "Costs":
        """Linear interpolation between these costs (share 0) and others (share 1), for the sizes that both cover."""

        def mean(own: float, others: float) -> float:
            return (1 - share) * own + share * others

        step = {}
        step_error = {}
        most = min(max(self.step), max(other.step))
        for size in sorted({*self.step, *other.step}):
            if size > most:
                break
            step[size] = mean(_interpolated(self.step, size), _interpolated(other.step, size))
            step_error[size] = mean(_interpolated(self.step_error, size), _interpolated(other.step_error, size))
        return Costs(
            step=step,
            level=mean(self.level, other.level),
            step_error=step_error,
            level_error=mean(self.level_error, other.level_error),
            rounds=min(self.rounds, other.rounds),
        )


def _interpolated(figures: dict[int, float], size: int) -> float:
    """The figure of a size, interpolated linearly; 0 for a size outside of the known ones."""
    known = sorted(figures.items())
    for (low, at_low), (high, at_high) in pairwise(known):
        if low <= size <= high:
            rise = at_high - at_low
            return at_low + rise * (size - low) / (high - low)
    return figures.get(size, 0.0)


def standing_for(batch: int, batches: Iterable[int]) -> int:
    """The known batch size whose costs are used for `batch`: the nearest by ratio, of two equally near the larger.

    So there are few trees, and few graphs or recordings of steps, for any number of running sequences.
    """

    def distance(known: int) -> tuple[float, int]:
        ratio = abs(math.log(known / batch))
        return round(ratio, 9), -known

    return min(batches, key=distance)
