"""Settings of trees that grow during a step (`decoding.growing`): for DySpec, EAGLE-2's expansion and RSD-S's beam
search.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from heavypath.speculative.trees.tree import NODE_BITS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_SLOTS = 1 << NODE_BITS


@dataclass(frozen=True)
class Confidence:
    """A linear model by which acceptance is predicted from the draft's probability: c_k = base[k] + slope[k] q.

    c_k is the probability that child k is accepted if its earlier siblings are rejected. q is the draft's probability
    of the child among the tokens not yet drawn. The last entries hold for all further children.

    base, slope: of the root's children, by rank; 0 <= base[k] <= base[k] + slope[k] <= 1
    deeper: models of the children at depths 1, 2, ...; the last of them holds for all further depths. If it is empty,
        the root's holds for all depths
    """

    base: tuple[float, ...]
    slope: tuple[float, ...]
    deeper: "tuple[Confidence, ...]" = ()

    def __post_init__(self) -> None:
        lines = list(zip(self.base, self.slope, strict=False))
        if len(self.base) != len(self.slope) or not lines or not all(0 <= b <= b + s <= 1 for b, s in lines):
            raise ValueError(f"confidence must rise within [0, 1] for each child, got {self.base} and {self.slope}")

        object.__setattr__(self, "_lines", {})  # a cache, not a field: not compared, and not written to profiles

    def lines(self, children: int, device: "torch.device") -> "Tensor":
        """Base and slope of the first `children` children at each depth, fp64 [depths, 2, children].

        They are copied to a device once and kept as long as this object, because CUDA graphs read them there.
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
# For models that were not measured: the mean of DySpec's own q and of 1 / (k + 1), which depends only on the rank.
DEFAULT_CONFIDENCE = Confidence(tuple(0.5 / (child + 1) for child in range(16)), (0.5,) * 16)


@dataclass(frozen=True)
class Growth:
    """The rule by which trees grow during a step, level by level, by the draft's probabilities.

    by: what decides which nodes are drafted and kept: "slot": the tokens that a place for one more child is expected to
        add, known before its token is drawn (DySpec); "node": the same of the child itself (EAGLE-2, for draw "top_k"
        alone); "beam": the node's key in a stochastic beam search (RSD-S)
    size: most nodes of a tree, root included
    width: most nodes drafted on a level
    depth: number of levels
    threshold: slots with a lower value stay empty; with one node a level this is a chain that ends early
    confidence: predicts the values of slots if the target samples; None for DySpec's own, the draft's probability
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
        """The most children that a node can have."""
        return self.width

    @property
    def slots(self) -> int:
        """Rows of the draft's cache that a tree needs while it grows, root included."""
        return 1 + self.depth * self.width

    cache_rows = slots  # the name that `TokenTree` has for it
    grows = True  # its nodes depend on what is drafted
