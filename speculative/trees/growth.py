"""Settings of trees that `decoding.growing` grows: DySpec's, those of EAGLE-2's expansion and of RSD-S's beam."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from heavypath.speculative.trees.tree import NODE_BITS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_SLOTS = 1 << NODE_BITS


@dataclass(frozen=True)
class Confidence:
    """The relation of the draft's probabilities to acceptance: c_k = base[k] + slope[k] q.

    c_k is the chance that child k is accepted once its elder siblings are rejected, where q is the draft's probability
    of the child among the tokens not yet drawn. The last entries serve all further children too. `deeper` has the lines
    below depth 1, 2, ..., of which the last serve all further depths; without any those of the root serve all.
    """

    base: tuple[float, ...]
    slope: tuple[float, ...]
    deeper: "tuple[Confidence, ...]" = ()

    def __post_init__(self) -> None:
        lines = list(zip(self.base, self.slope, strict=False))
        if len(self.base) != len(self.slope) or not lines or not all(0 <= b <= b + s <= 1 for b, s in lines):
            raise ValueError(f"confidence must rise within [0, 1] for each child, got {self.base} and {self.slope}")

        object.__setattr__(self, "_lines", {})  # beside the fields, which alone are compared and written to profiles

    def lines(self, children: int, device: "torch.device") -> "Tensor":
        """Base and slope of the first `children` children below each depth, fp64 [depths, 2, children].

        They are copied to a device once, and kept as long as this object: a CUDA graph reads them there.
        """
        import torch

        kept: dict[tuple[int, torch.device], Tensor] = self.__dict__["_lines"]
        if (children, device) not in kept:
            pairs = [(each.base, each.slope) for each in (self, *self.deeper)]
            lines = [[[line[min(k, len(line) - 1)] for k in range(children)] for line in pair] for pair in pairs]
            kept[children, device] = torch.tensor(lines, dtype=torch.float64, device=device)
        return kept[children, device]


# Unconditional acceptance of children 0, 1, ... of the demo pair at temperature 0.6, drawn without replacement.
DEFAULT_ACCEPTANCE = (0.5688, 0.1168, 0.0582, 0.0373, 0.026, 0.0199, 0.0157, 0.0127)
# For pairs that nobody measured: half DySpec's own, q, and half 1 / (k + 1), which knows the child's rank alone.
DEFAULT_CONFIDENCE = Confidence(tuple(0.5 / (child + 1) for child in range(16)), (0.5,) * 16)


@dataclass(frozen=True)
class Growth:
    """The way in which trees grow.

    by:         the measure by which nodes are kept: the value of their "slot", the worth of the "node" itself, or their
                key in a stochastic "beam"
    size:       nodes of a tree, root included, at most
    width:      nodes drafted on a level, at most
    depth:      levels
    threshold:  slots of less value stay empty; with one node a level this is a chain that ends early
    confidence: the line for values by "slot" where the text is sampled; None for DySpec's own
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
        if self.slots > MAX_SLOTS:
            raise ValueError(f"depth levels of width nodes may be at most {MAX_SLOTS} with the root, got {self.slots}")
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

    cache_rows = slots  # by the name that a static tree has for it
    grows = True  # its nodes depend on what is drafted
