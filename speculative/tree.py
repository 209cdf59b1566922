"""The shape of a token tree: which node hangs below which, in which order siblings are drawn."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from heavypath.kernels.tree_attention import interval_mask

Order = Literal["breadth_first", "depth_first", "heavy_path"]


class TokenTree:
    """An immutable tree of N nodes; node 0 is the root, the last committed token, and parents come before children.

    parents: N integers, parents[0] = -1 and 0 <= parents[i] < i.
    ranks:   N integers, each node's place among its siblings in the order they are drawn: 0, 1, 2, ... below every
             node, and 0 for the root. Default: in index order.

    Sequences and tensors are taken; properties are CPU LongTensors. Raises ValueError for anything else.
    """

    def __init__(self, parents: Sequence[int] | Tensor, ranks: Sequence[int] | Tensor | None = None):
        self._parents = _integers("parents", parents)
        if not self._parents or self._parents[0] != -1:
            raise ValueError(f"parents must begin with -1 for the root, got {self._parents[:8]}")
        for node, parent in enumerate(self._parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(f"parents[{node}] must be in 0 .. {node - 1}, got {parent}")
        self._children: list[list[int]] = [[] for _ in self._parents]
        for node, parent in enumerate(self._parents[1:], start=1):
            self._children[parent].append(node)
        if ranks is None:
            self._ranks = [0] * len(self._parents)
            for siblings in self._children:
                for rank, node in enumerate(siblings):
                    self._ranks[node] = rank
        else:
            self._ranks = _integers("ranks", ranks)
            if len(self._ranks) != len(self._parents) or self._ranks[0] != 0:
                raise ValueError(f"ranks must hold {len(self._parents)} values, 0 for the root, got {self._ranks[:8]}")
            for node, siblings in enumerate(self._children):
                siblings.sort(key=self._ranks.__getitem__)
                given = [self._ranks[child] for child in siblings]
                if given != list(range(len(siblings))):
                    raise ValueError(f"the children of node {node} must have ranks 0, 1, 2, ..., got {given}")

    @classmethod
    def chain(cls, length: int) -> "TokenTree":
        """`length` nodes below the root, one below the other."""
        return cls.independent(1, length)

    @classmethod
    def independent(cls, sequences: int, length: int) -> "TokenTree":
        """`sequences` separate chains of `length` nodes below the root (SpecInfer, SpecTr)."""
        if length < 0:
            raise ValueError(f"length must be at least 0, got {length}")
        return cls.from_branching([sequences, *[1] * (length - 1)] if length else [])

    @classmethod
    def k_ary(cls, branching: int, depth: int) -> "TokenTree":
        """Every node above depth `depth` has `branching` children."""
        if depth < 0:
            raise ValueError(f"depth must be at least 0, got {depth}")
        return cls.from_branching([branching] * depth)

    @classmethod
    def from_branching(cls, branching: Iterable[int]) -> "TokenTree":
        """Every node at depth d has branching[d] children (RSD-C); nodes in depth-first order."""
        widths = _integers("branching", list(branching))
        if any(width < 1 for width in widths):
            raise ValueError(f"branching factors must be at least 1, got {widths}")
        parents: list[int] = []
        stack = [(-1, 0)]  # (parent, depth) of nodes to come
        while stack:
            parent, depth = stack.pop()
            parents.append(parent)
            if depth < len(widths):
                stack.extend([(len(parents) - 1, depth + 1)] * widths[depth])
        return cls(parents)

    @property
    def parents(self) -> Tensor:
        """LongTensor[N], -1 for the root."""
        return torch.tensor(self._parents)

    @property
    def ranks(self) -> Tensor:
        """LongTensor[N], a node's place among its siblings in draw order."""
        return torch.tensor(self._ranks)

    @property
    def depths(self) -> Tensor:
        """LongTensor[N], edges from the root."""
        return torch.tensor(self._depths)

    @property
    def depth(self) -> int:
        """Edges from the root to the deepest node."""
        return max(self._depths)

    @property
    def subtree_size(self) -> Tensor:
        """LongTensor[N], nodes in the subtree of each node, itself included."""
        return torch.tensor(self._sizes)

    @property
    def is_depth_first(self) -> bool:
        """Whether every subtree is an interval of node numbers."""
        return self._preorder_gap is None

    @property
    def subtree_end(self) -> Tensor:
        """LongTensor[N]: the subtree of j is the nodes j .. subtree_end[j] - 1. Needs depth-first order."""
        gap = self._preorder_gap
        if gap is not None:
            raise ValueError(
                f"subtree_end needs depth-first order, but node {gap} breaks it; call reordered('depth_first')"
            )
        return torch.arange(len(self)) + self.subtree_size

    @cached_property
    def _depths(self) -> list[int]:
        depths = [0] * len(self)
        for node, parent in enumerate(self._parents[1:], start=1):
            depths[node] = depths[parent] + 1
        return depths

    @cached_property
    def _sizes(self) -> list[int]:
        sizes = [1] * len(self)
        for node in range(len(self) - 1, 0, -1):
            sizes[self._parents[node]] += sizes[node]
        return sizes

    @cached_property
    def _preorder_gap(self) -> int | None:
        """The first node that is not numbered in preorder."""
        open_path: list[int] = []  # the path from the root to the node before
        for node, parent in enumerate(self._parents):
            while open_path and open_path[-1] != parent:
                open_path.pop()
            if node and not open_path:
                return node
            open_path.append(node)
        return None

    def mask(self) -> Tensor:
        """bool [N, N]: [i, j] is true where j is i or an ancestor of i."""
        if self.is_depth_first:
            return interval_mask(self.subtree_end)
        mask = torch.eye(len(self), dtype=torch.bool)
        for node, parent in enumerate(self._parents[1:], start=1):
            mask[node] |= mask[parent]
        return mask

    def reordered(self, order: Order) -> "tuple[TokenTree, Tensor]":
        """The same tree renumbered, and permutation[new] = old, LongTensor[N]. Ranks travel with their nodes.

        breadth_first: level by level, siblings by rank. depth_first: preorder, siblings by rank.
        heavy_path: preorder, the child with the largest subtree first (then by rank).
        """
        if order == "breadth_first":
            permutation = [0]
            for node in permutation:  # grows while it is read
                permutation.extend(self._children[node])
        elif order in ("depth_first", "heavy_path"):
            sizes = self._sizes
            permutation, stack = [], [0]
            while stack:
                permutation.append(node := stack.pop())
                children = self._children[node]
                if order == "heavy_path":
                    children = sorted(children, key=lambda child: -sizes[child])
                stack.extend(reversed(children))
        else:
            raise ValueError(f"order must be 'breadth_first', 'depth_first' or 'heavy_path', got {order!r}")
        new = [0] * len(self)
        for position, node in enumerate(permutation):
            new[node] = position
        parents = [-1, *(new[self._parents[node]] for node in permutation[1:])]
        return TokenTree(parents, [self._ranks[node] for node in permutation]), torch.tensor(permutation)

    def occupied_blocks(self, block_size: int) -> int:
        """Blocks of block_size x block_size in mask() with a true entry: the work of block-sparse attention."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        blocks = set()
        for node in range(len(self)):
            ancestor = node
            while ancestor >= 0:
                blocks.add((node // block_size, ancestor // block_size))
                ancestor = self._parents[ancestor]
        return len(blocks)

    def truncated(self, depth: int) -> "tuple[TokenTree, Tensor]":
        """The nodes at most `depth` edges below the root, and kept[new] = old, LongTensor."""
        kept = (self.depths <= depth).nonzero()[:, 0]
        new = torch.full((len(self),), -1)
        new[kept] = torch.arange(len(kept))
        return TokenTree(torch.cat([torch.tensor([-1]), new[self.parents[kept[1:]]]]), self.ranks[kept]), kept

    def __len__(self) -> int:
        return len(self._parents)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenTree) and (self._parents, self._ranks) == (other._parents, other._ranks)

    def __hash__(self) -> int:
        return hash((*self._parents, *self._ranks))

    def __repr__(self) -> str:
        return f"TokenTree(parents={self._parents}, ranks={self._ranks})"

    def __str__(self) -> str:
        """A drawing, a line per node, siblings in draw order."""
        lines = [f"{len(self)} nodes, depth {self.depth}", "0"]
        stack = [(child, "") for child in reversed(self._children[0])]
        while stack:
            node, indent = stack.pop()
            last = node == self._children[self._parents[node]][-1]
            lines.append(f"{indent}{'└─' if last else '├─'} {node}")
            below = indent + ("   " if last else "│  ")
            stack.extend((child, below) for child in reversed(self._children[node]))
        return "\n".join(lines)


def _integers(name: str, values: Sequence[int] | Tensor) -> list[int]:
    listed = values.tolist() if isinstance(values, Tensor) else list(values)
    if any(isinstance(value, (bool, float, list)) or int(value) != value for value in listed):
        raise ValueError(f"{name} must be a flat sequence of integers, got {listed[:8]}")
    return [int(value) for value in listed]
