"""How a tree is to grow: the settings of DySpec, EAGLE-2's tree policy, RSD-S, and chains that end early."""

from dataclasses import dataclass
from typing import Literal

from heavypath.speculative.decoding.noise_rows import ROWS_PER_ROOT
from heavypath.speculative.decoding.slot_values import Confidence

VALUE_TEMPERATURE = 0.6  # of the draft's probabilities as values, where its tokens are drawn at temperature 0 (DySpec)


@dataclass(frozen=True)
class Growth:
    """How trees grow.

    by:         what decides which nodes are kept: the value of their "slot", the worth of the "node" itself, or their
                key in a stochastic "beam"
    size:       nodes of a tree, root included, at most
    width:      nodes drafted on a level, at most
    depth:      levels
    threshold:  slots of less value stay empty; with one node a level this is a chain that ends early
    confidence: what values are made of, by "slot" and where the text is sampled; None for DySpec's own
    """

    by: Literal["slot", "node", "beam"]
    size: int
    width: int
    depth: int
    threshold: float = 0.0
    confidence: Confidence | None = None

    def __post_init__(self) -> None:
        for name in ("width", "depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be in [0, 1], got {self.threshold}")
        if self.slots > ROWS_PER_ROOT:
            raise ValueError(
                f"depth levels of width nodes may be at most {ROWS_PER_ROOT} with the root, got {self.slots}"
            )
        if self.size < 2:
            raise ValueError(f"size counts the root and must be at least 2, got {self.size}")

    def __len__(self) -> int:
        return self.size

    @property
    def branching(self) -> int:
        """The most children that a node may have."""
        return self.width

    @property
    def slots(self) -> int:
        """Rows of the draft's cache that a tree takes while it grows, root included."""
        return 1 + self.depth * self.width
