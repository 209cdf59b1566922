"""Costs of steps that were measured for some batch sizes, which a profile keeps."""

from dataclasses import dataclass
from itertools import pairwise

from heavypath.speculative.costs.table import Costs


@dataclass(frozen=True)
class CostsByBatch:
    """The costs of steps for some numbers of sequences that are decoded together.

    by_batch: {sequences: their costs}, 1 among them. Raises ValueError without that
    """

    by_batch: dict[int, Costs]

    def __post_init__(self) -> None:
        if 1 not in self.by_batch or min(self.by_batch) < 1:
            raise ValueError(f"costs by batch must have those of 1 sequence, got {sorted(self.by_batch)}")

    @property
    def batches(self) -> tuple[int, ...]:
        """The numbers of sequences whose costs are known, rising."""
        return tuple(sorted(self.by_batch))

    def at(self, batch: int) -> Costs:
        """The costs for so many sequences: on straight lines between known ones, and beyond the last as there."""
        if batch in self.by_batch:
            return self.by_batch[batch]
        for low, high in pairwise(self.batches):
            if low < batch < high:
                return self.by_batch[low].between(self.by_batch[high], (batch - low) / (high - low))
        return self.by_batch[self.batches[-1]]
