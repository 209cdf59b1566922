"""Measured costs of steps for several batch sizes, as a profile stores them."""

from dataclasses import dataclass
from itertools import pairwise

from heavypath.speculative.costs.table import Costs


@dataclass(frozen=True)
class CostsByBatch:
    """Measured costs of steps for some batch sizes.

    by_batch: number of sequences -> costs. Raises ValueError if there are none for 1 sequence
    """

    by_batch: dict[int, Costs]

    def __post_init__(self) -> None:
        if 1 not in self.by_batch or min(self.by_batch) < 1:
            raise ValueError(f"costs by batch must include batch size 1, and none below, got {sorted(self.by_batch)}")

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes whose costs are known, in rising order."""
        return tuple(sorted(self.by_batch))

    def at(self, batch: int) -> Costs:
        """The costs for `batch` sequences, interpolated linearly; above the largest known batch they stay the same."""
        if batch in self.by_batch:
            return self.by_batch[batch]
        for low, high in pairwise(self.batches):
            if low < batch < high:
                return self.by_batch[low].between(self.by_batch[high], (batch - low) / (high - low))
        return self.by_batch[self.batches[-1]]
