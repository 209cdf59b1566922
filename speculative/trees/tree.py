"""`TokenTree`, the shape of a token tree: the parent of each node, and the order in which siblings are drawn.

    above_k[v]   the ancestor 2^k edges above v, or the root if v is less deep:  above_{k+1} = above_k[above_k]
    size[v]      = 1 + the sizes of v's children: the number of nodes in the subtree of v
    position[v]  = position[parent] + 1 + the sizes of the siblings visited before v         (preorder)

Sums over subtrees and along paths take one pass over all nodes for each k: O(N log depth), without a Python loop over
nodes. In preorder the subtree of v is the interval position[v] .. position[v] + size[v] - 1. In heavy-path order, a
preorder, the child with the largest subtree is visited first.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Union

import numpy as np

from heavypath.kernels.numbers import whole

if TYPE_CHECKING:  # trees are stored as arrays; PyTorch is only imported when a tensor is needed
    from torch import Tensor

Order = Literal["breadth_first", "depth_first", "heavy_path"]
Integers = Union[Sequence[int], np.ndarray, "Tensor"]

NODE_BITS = 12  # bits for the node's number in a noise row, see `decoding.sequences`


class TokenTree:
    """An immutable tree of N nodes. Node 0 is the root, the last committed token; parents come before their children.

    parents: N integers, with parents[0] = -1 and 0 <= parents[i] < i
    ranks: N integers, each node's index among its siblings in draw order. The children of a node have 0, 1, 2, ..., and
        the root has 0. Default: the order of node numbers

    Both may be sequences, arrays or tensors. The tree's properties are LongTensors on the CPU. Raises ValueError for
    invalid parents or ranks.
    """

    def __init__(self, parents: Integers, ranks: Integers | None = None):
        self._parents = _integers("parents", parents)
        nodes = len(self._parents)
        if not nodes or self._parents[0] != -1:
            raise ValueError(f"parents must begin with -1 for the root, got {self._parents[:8].tolist()}")
        drafted = np.arange(1, nodes)
        above = self._parents[1:]
        astray = (above < 0) | (above >= drafted)
        if astray.any():
            node = 1 + int(astray.argmax())
            raise ValueError(f"parents[{node}] must be in 0 .. {node - 1}, got {self._parents[node]}")

        # The children of v in draw order are _children[_first[v] : _first[v + 1]].
        self._first = np.zeros(nodes + 1, np.int64)
        self._first[1:] = np.bincount(above, minlength=nodes).cumsum()
        if ranks is None:
            self._children = above.argsort(kind="stable") + 1
            parent = self._parents[self._children]
            self._ranks = np.zeros(nodes, np.int64)
            self._ranks[self._children] = drafted - 1 - self._first[parent]
        else:
            self._ranks = _integers("ranks", ranks)
            if len(self._ranks) != nodes or self._ranks[0] != 0:
                raise ValueError(f"ranks must hold {nodes} values, 0 for the root, got {self._ranks[:8].tolist()}")
            rank = self._ranks[1:]
            begin = self._first[above]
            end = self._first[above + 1]
            fits = (rank >= 0) & (rank < end - begin)
            index = begin + rank
            self._children = np.zeros(nodes - 1, np.int64)
            self._children[index[fits]] = drafted[fits]
            if not self._children.all():  # a rank is missing, so another occurs twice or is out of range
                missing = (self._children == 0).argmax()
                node = int(self._first.searchsorted(missing, side="right")) - 1
                given = sorted(rank[above == node].tolist())
                raise ValueError(f"the children of node {node} must have ranks 0, 1, 2, ..., got {given}")

    @classmethod
    def chain(cls, length: int) -> "TokenTree":
        """A chain of `length` nodes below the root."""
        return cls.independent(1, length)

    @classmethod
    def independent(cls, sequences: int, length: int) -> "TokenTree":
        """A tree of `sequences` chains of `length` nodes each, all starting at the root (SpecInfer, SpecTr)."""
        sequences = whole("sequences", sequences)
        length = whole("length", length)
        if length < 0:
            raise ValueError(f"length must be at least 0, got {length}")
        if length == 0:
            return cls.from_branching([])
        one_child = [1] * (length - 1)
        return cls.from_branching([sequences, *one_child])

    @classmethod
    def k_ary(cls, branching: int, depth: int) -> "TokenTree":
        """A tree in which every node at a depth below `depth` has `branching` children, and those at `depth` none."""
        branching = whole("branching", branching)
        depth = whole("depth", depth)
        if depth < 0:
            raise ValueError(f"depth must be at least 0, got {depth}")
        return cls.from_branching([branching] * depth)

    @classmethod
    def from_branching(cls, branching: Iterable[int]) -> "TokenTree":
        """A tree in which every node at depth d has branching[d] children (RSD-C), in depth-first order."""
        widths = _integers("branching", branching).tolist()
        if any(width < 1 for width in widths):
            raise ValueError(f"branching factors must be at least 1, got {widths}")
        parents: list[int] = []
        stack = [(-1, 0)]  # parent and depth of nodes that have not been added yet
        while stack:
            parent, depth = stack.pop()
            node = len(parents)
            parents.append(parent)
            if depth < len(widths):
                child = (node, depth + 1)
                stack.extend([child] * widths[depth])
        return cls(parents)

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> "TokenTree":
        """The tree of the nodes at these paths of ranks from the root, given in any order; in breadth-first order.

        [0, 2] is child 2 of child 0 of the root. Medusa's trees are published in this form, as `medusa_choices` (Cai et
        al. 2024, sec. 2.1.2 and 2.3.3). Raises ValueError for a path that is given twice, for one whose parent or
        earlier sibling is missing, and for ranks that are not integers of at least 0.
        """
        listed = sorted(map(_path, paths), key=lambda path: (len(path), path))
        for path, following in pairwise(listed):
            if path == following:
                raise ValueError(f"every path must be given once, got {[*path]} twice")
        numbers: dict[tuple[int, ...], int] = {(): 0}
        parents = [-1]
        ranks = [0]
        for node, path in enumerate(listed, 1):  # parents and earlier siblings come first
            above = path[:-1]
            rank = path[-1]
            earlier = (*above, rank - 1)
            if above not in numbers:
                raise ValueError(f"the node at path {[*path]} has no parent: {[*above]} is missing")
            if rank > 0 and earlier not in numbers:
                raise ValueError(f"the node at path {[*path]} is drawn after the one at {[*earlier]}, which is missing")
            numbers[path] = node
            parents.append(numbers[above])
            ranks.append(rank)
        return cls(parents, ranks)

    @property
    def parents(self) -> "Tensor":
        """LongTensor[N], the parent of each node; -1 for the root."""
        return _tensor(self._parents.copy())

    @property
    def ranks(self) -> "Tensor":
        """LongTensor[N], each node's index among its siblings in draw order."""
        return _tensor(self._ranks.copy())

    @property
    def depths(self) -> "Tensor":
        """LongTensor[N], the number of edges between the root and each node."""
        return _tensor(self._depths.copy())

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Parents, ranks and depths as int64 arrays [N]; do not write to them."""
        return self._parents, self._ranks, self._depths

    @property
    def depth(self) -> int:
        """The number of levels below the root: edges from the root to the deepest node."""
        return int(self._depths.max())

    @property
    def branching(self) -> int:
        """The largest number of children that a node has."""
        if len(self) == 1:
            return 0
        return int(self._ranks.max()) + 1

    @property
    def subtree_size(self) -> "Tensor":
        """LongTensor[N], the number of nodes in the subtree of each node, itself included."""
        return _tensor(self._sizes.copy())

    @property
    def is_depth_first(self) -> bool:
        """Whether nodes are numbered in depth-first order, in which every subtree is an interval of node numbers."""
        return not self._strays.any()

    @property
    def subtree_end(self) -> "Tensor":
        """LongTensor[N], the number after the last node of each subtree: node j's has nodes j .. subtree_end[j] - 1.

        Raises ValueError if the nodes are not in depth-first order.
        """
        if not self.is_depth_first:
            raise ValueError(
                f"subtree_end needs depth-first order, but node {1 + self._strays.argmax()} breaks it; "
                "take tree.reordered('heavy_path')[0]"
            )
        ends = np.arange(len(self)) + self._sizes
        return _tensor(ends)

    @cached_property
    def _above(self) -> list[np.ndarray]:
        """above_0, above_1, ... of the formula, without those that are the root everywhere."""
        doubled = []
        above = np.maximum(self._parents, 0)
        while above.any():
            doubled.append(above)
            above = above[above]
        return doubled

    @cached_property
    def _depths(self) -> np.ndarray:
        edges = np.ones(len(self), np.int64)  # from each node to its parent
        edges[0] = 0
        return self._path_sums(edges)

    @cached_property
    def _sizes(self) -> np.ndarray:
        sizes = np.ones(len(self))  # fp64, exact up to 2^53
        for above in self._above:
            sizes += np.bincount(above, sizes, len(self))
        sizes[0] = len(self)
        return sizes.astype(np.int64)

    @cached_property
    def _positions(self) -> np.ndarray:
        """Each node's position in preorder, siblings by rank, [N]."""
        return self._preorder(self._children)

    @cached_property
    def _strays(self) -> np.ndarray:
        """bool [N - 1]: which of nodes 1, 2, ... have a parent that is neither the node before them nor one of its
        ancestors.
        """
        before = self._positions[:-1]
        parent = self._parents[1:]
        begin = self._positions[parent]
        end = begin + self._sizes[parent]
        return (before < begin) | (before >= end)

    def _path_sums(self, values: np.ndarray) -> np.ndarray:
        """The sum of values [N] over each node and all its ancestors, [N]; values[0] must be 0."""
        for above in self._above:
            values = values + values[above]
        return values

    def _preorder(self, children: np.ndarray) -> np.ndarray:
        """Each node's position in preorder, [N]. children [N - 1]: nodes by parent, siblings in the order visited."""
        sizes = self._sizes[children]
        before = sizes.cumsum() - sizes
        first_sibling = self._first[self._parents[children]]
        offsets = np.zeros(len(self), np.int64)
        offsets[children] = 1 + before - before[first_sibling]
        return self._path_sums(offsets)

    def mask(self) -> "Tensor":
        """The attention mask of the tree, bool [N, N]: [i, j] is True if node i sees node j: itself or an ancestor."""
        begin = self._positions.astype(np.int32)  # takes half the time of int64
        end = begin + self._sizes.astype(np.int32)
        own = begin[:, None]
        return _tensor((begin <= own) & (own < end))

    def reordered(self, order: Order) -> "tuple[TokenTree, Tensor]":
        """The same tree with other node numbers, and permutation[new] = old, LongTensor[N]. Nodes keep their ranks.

        order: "breadth_first": level by level, siblings by rank. "depth_first": preorder, siblings by rank.
            "heavy_path": preorder, the child with the largest subtree first, then by rank
        """
        tree, permutation = self.renumbered(order)
        return tree, _tensor(permutation)

    def renumbered(self, order: Order) -> "tuple[TokenTree, np.ndarray]":
        """The same tree with other node numbers, and permutation[new] = old, int64 [N]. order: as for `reordered`."""
        if order == "breadth_first":
            preorder = _inverse(self._positions)
            by_depth = self._depths[preorder].argsort(kind="stable")
            permutation = preorder[by_depth]
        elif order == "depth_first":
            permutation = _inverse(self._positions)
        elif order == "heavy_path":
            parents = self._parents[self._children]
            sizes = self._sizes[self._children]
            heavy_first = (parents * len(self) - sizes).argsort(kind="stable")
            positions = self._preorder(self._children[heavy_first])
            permutation = _inverse(positions)
        else:
            raise ValueError(f"order must be 'breadth_first', 'depth_first' or 'heavy_path', got {order!r}")
        new = _inverse(permutation)
        parents = new[self._parents[permutation]]
        parents[0] = -1
        return TokenTree(parents, self._ranks[permutation]), permutation

    def occupied_blocks(self, block_size: int) -> int:
        """The number of block_size x block_size blocks of `mask()` with a True entry: block-sparse attention's work."""
        from heavypath.speculative.trees.looks import occupied_blocks

        block_size = whole("block_size", block_size)
        return occupied_blocks(self._above, len(self), block_size)

    def truncated(self, depth: int) -> "tuple[TokenTree, Tensor]":
        """The tree of the nodes at most `depth` edges below the root, and their old numbers, LongTensor[new nodes]."""
        depth = whole("depth", depth)
        if depth < 0:
            raise ValueError(f"depth must be at least 0, got {depth}")
        stays = self._depths <= depth
        kept = np.flatnonzero(stays)
        new = stays.cumsum() - 1
        parents = new[self._parents[kept]]
        parents[0] = -1
        return TokenTree(parents, self._ranks[kept]), _tensor(kept)

    def __len__(self) -> int:
        return len(self._parents)

    @property
    def cache_rows(self) -> int:
        """How many rows of each cache a step needs for this tree: one for each node."""
        return len(self)

    grows = False  # its nodes do not depend on what is drafted

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, TokenTree):
            return False
        same_parents = np.array_equal(self._parents, other._parents)
        return same_parents and np.array_equal(self._ranks, other._ranks)

    def __hash__(self) -> int:
        return hash((self._parents.tobytes(), self._ranks.tobytes()))

    def __repr__(self) -> str:
        return f"TokenTree(parents={self._parents.tolist()}, ranks={self._ranks.tolist()})"

    def __str__(self) -> str:
        from heavypath.speculative.trees.looks import as_text

        return as_text(self._parents, self._children, self._first)


def _tensor(values: np.ndarray) -> "Tensor":
    """A tensor that shares the array's memory."""
    import torch

    return torch.from_numpy(values)


def _inverse(permutation: np.ndarray) -> np.ndarray:
    inverse = np.empty_like(permutation)
    inverse[permutation] = np.arange(len(permutation))
    return inverse


def _path(given: Sequence[int]) -> tuple[int, ...]:
    """A path of ranks as a tuple of integers. Raises ValueError if it is empty or has anything but ranks."""
    if not isinstance(given, Iterable):
        raise ValueError(f"a path must be a sequence of ranks, got {given!r}")
    path = tuple(_integers("a path", given).tolist())
    if not path or min(path) < 0:
        raise ValueError(f"a path must hold ranks of at least 0, and at least one of them, got {[*path]}")
    return path


def _integers(name: str, values: Any) -> np.ndarray:
    """A copy as a flat int64 array. Raises TypeError or ValueError for anything but integers."""
    if hasattr(values, "numpy"):  # a tensor
        is_integer = str(values.dtype) in ("torch.int32", "torch.int64")
        values = values.numpy(force=True) if is_integer else values.tolist()
    if isinstance(values, np.ndarray):
        if values.ndim == 1 and values.dtype.kind == "i":
            return values.astype(np.int64)
        values = values.tolist()
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a flat sequence of integers, got {values!r}")
    listed = list(values)
    if not set(map(type, listed)) <= {int}:
        try:
            listed = [whole(name, value) for value in listed]
        except TypeError:
            raise ValueError(f"{name} must be a flat sequence of integers, got {listed[:8]}") from None
    try:
        return np.array(listed, np.int64)
    except OverflowError:
        raise ValueError(f"{name} must be integers of 64 bits, got {listed[:8]}") from None


ROOT = TokenTree([-1])  # the tree of plain decoding, which drafts nothing
