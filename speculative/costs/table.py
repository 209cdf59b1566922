"""Costs of steps of decoding, by the nodes of their trees and by the number of sequences decoded together.

A step over trees of n nodes verifies B n rows where B sequences are decoded together, and drafting a level is a pass of
the draft for all B. While a pass only reads weights, further rows cost little; later each row costs its products. So
the cost of a tree, in steps of plain decoding, depends on B, and the tree that pays most is smaller in a larger batch.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # numbers of sequences for which costs are estimated


@dataclass(frozen=True)
class Costs:
    """Seconds on the machine of the profile.

    step:  {nodes of a tree: seconds of a step without its drafting}, which never fall; 1 node is plain decoding
    level: seconds of drafting one level of a tree
    step_error, level_error: how far these may be off, in seconds: the standard error, and what contradictions add.
        Where nothing is said they are exact
    rounds: in which sizes were timed
    """

    step: dict[int, float]
    level: float
    step_error: dict[int, float] = field(default_factory=dict)
    level_error: float = 0.0
    rounds: int = 0

    def steps_of(self, sizes: Sequence[int]) -> dict[int, float]:
        """{size: cost} in steps of plain decoding; on straight lines between the sizes that were measured."""
        return {size: self._between(self.step, size) / self.step[1] for size in sizes if size <= max(self.step)}

    def step_seconds(self, size: int, depth: int) -> float:
        """A step with a tree of so many nodes and levels; beyond the largest that was timed, in proportion to nodes."""
        most = max(self.step)
        return self._between(self.step, min(size, most)) * max(1.0, size / most) + depth * self.level

    def relative_error(self, size: int, depth: int) -> float:
        """The error of the cost of a step with a tree of so many nodes and levels, as a share of that cost, at most."""
        error = math.hypot(self._between(self.step_error, size), depth * self.level_error)
        return error / (self._between(self.step, size) + depth * self.level)

    @staticmethod
    def _between(figures: dict[int, float], size: int) -> float:
        known = sorted(figures.items())
        for (low, at_low), (high, at_high) in pairwise(known):
            if low <= size <= high:
                return at_low + (at_high - at_low) * (size - low) / (high - low)
        return figures.get(size, 0.0)

    def between(self, other: "Costs", share: float) -> "Costs":
        """The costs at `share` of the way to others, of the sizes that both reach; for a batch between two others."""

        def at(figures: dict[int, float], others: dict[int, float], size: int) -> float:
            return (1 - share) * self._between(figures, size) + share * self._between(others, size)

        most = min(max(self.step), max(other.step))
        sizes = sorted(size for size in {*self.step, *other.step} if size <= most)
        return Costs(
            {size: at(self.step, other.step, size) for size in sizes},
            (1 - share) * self.level + share * other.level,
            {size: at(self.step_error, other.step_error, size) for size in sizes},
            (1 - share) * self.level_error + share * other.level_error,
            min(self.rounds, other.rounds),
        )


def standing_for(batch: int, batches: Iterable[int]) -> int:
    """The one of some numbers of sequences that stands for another one: the nearest by ratio, of two the larger.

    So there are few trees, and few graphs or recordings of steps, however many sequences are running.
    """
    return min(batches, key=lambda known: (round(abs(math.log(known / batch)), 9), -known))
