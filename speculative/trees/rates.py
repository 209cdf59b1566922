"""`Rates`: measured acceptance, checked, as an array by depth and child; planning reads it.

Let a[j] be the unconditional probability that child j of an accepted node is the one accepted. It is given as a row
[child] for all nodes, as rows [depth, child], or as a function of the path of child indices to a node.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

Acceptance = Sequence[float] | Sequence[Sequence[float]] | np.ndarray | Tensor
PathAcceptance = Callable[[tuple[int, ...]], Sequence[float]]

ROUNDING = 1e-6  # rows may sum to 1 plus this: they may be fp32


@dataclass(frozen=True)
class Rates:
    """Checked acceptance: fp64 [depth, child] if by_depth, row d for nodes at depth d + 1; else [1, child] for all."""

    matrix: np.ndarray
    by_depth: bool

    @classmethod
    def of(cls, acceptance: Acceptance | PathAcceptance) -> "Rates":
        """Make it from acceptance [child] or [depth, child]. Raises TypeError or ValueError if that is invalid."""
        if callable(acceptance):
            raise ValueError("sequoia_tree takes acceptance [child] or [depth, child], not a function of the path")
        given = _as_array(acceptance)
        if given.ndim not in (1, 2) or given.size == 0:
            raise ValueError(f"acceptance must be [child] or [depth, child], not empty, got shape {[*given.shape]}")
        children = given.shape[-1]
        matrix = given.reshape(-1, children)  # [depth, child]
        in_range = (matrix >= 0) & (matrix <= 1)
        too_much = matrix.sum(-1) > 1 + ROUNDING
        if too_much.any() or not in_range.all():
            raise ValueError(f"acceptance must lie in [0, 1] with rows that sum to at most 1, got {matrix.tolist()}")
        return cls(matrix, given.ndim == 2)

    @property
    def fall(self) -> bool:
        """Whether acceptance never rises with the child index."""
        rises = np.diff(self.matrix) > 0
        return not rises.any()

    def narrowed(self, children: int | None) -> "Rates":
        """The same without the children after the first `children`; None for all children."""
        return Rates(self.matrix[:, :children], self.by_depth)

    def rows(self, depth: int) -> np.ndarray:
        """The acceptance of the first `depth` levels, fp64 [depth, child]; fewer rows if fewer were given by depth."""
        if self.by_depth:
            return self.matrix[:depth]
        return self.matrix.repeat(depth, axis=0)

    def depth_bound(self, size: int, max_depth: int | None) -> int:
        """The largest depth that a tree of `size` nodes can have, in edges."""
        bound = size - 1
        if max_depth is not None:
            bound = min(bound, max_depth)
        if self.by_depth:
            bound = min(bound, len(self.matrix))
        return bound

    def misfit(self, size: int, max_depth: int | None) -> str:
        """An error message if no tree of `size` nodes is possible, else ""."""
        children = self.matrix.shape[1]
        depth = self.depth_bound(size, max_depth)
        nodes = 1
        level = 1
        for _ in range(depth):
            level *= children
            nodes += level
            if nodes >= size:
                break
        if nodes >= size:
            return ""
        return f"at most {nodes} nodes fit {children} children and depth {depth}, not {size}"


def _as_array(acceptance: Any) -> np.ndarray:
    """Numbers in a tensor, an array or sequences as fp64. Raises TypeError for anything else."""
    try:
        if hasattr(acceptance, "numpy"):
            return acceptance.double().numpy(force=True)
        return np.asarray(acceptance, np.float64)
    except (TypeError, ValueError) as error:
        message = f"acceptance must be numbers, [child] or [depth, child], got {acceptance!r}: {error}"
        raise TypeError(message) from None


def row_at(acceptance: PathAcceptance, path: tuple[int, ...]) -> list[float]:
    """The acceptance [child] of the children of the node at `path`; may be empty. Raises ValueError if out of range."""
    row = [float(rate) for rate in acceptance(path)]
    in_range = all(0 <= rate <= 1 for rate in row)
    if not in_range or sum(row) > 1 + ROUNDING:
        raise ValueError(f"acceptance must lie in [0, 1] and sum to at most 1, got {row} at path {path}")
    return row
