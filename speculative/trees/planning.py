"""Choose the shape of a static tree from measured acceptance.

Let a[j] be the unconditional probability that child j of an accepted node is the one accepted. A path of child indices
(c_1, c_2, ...) is accepted with probability a[c_1] a[c_2] ..., and a tree yields on average

    expected tokens = 1 + sum over nodes below the root of the product of a along the node's path

(Sequoia, Chen et al. 2024, section 3.1; a[d, j] instead for nodes at depth d + 1, or a function of the path).

`greedy_tree`. If acceptance falls with the child index, adding the most probable node next is optimal at every size
and depth (ERSD, Kobus and Gündüz 2025, algorithm 3; Tunstall coding). A node is never more probable than its parent or
its earlier siblings, so all of these are added before it.

`sequoia_tree`. For other acceptance a dynamic programme finds the best tree. F_d(n) is the most that a subtree of n
nodes and at most d levels below its root can yield. G_{d,j}(m) is the most that m nodes can add to that root, as its
children of sibling indices j, j + 1, ... and their subtrees:

    F_d(n) = 1 + G_{d,0}(n - 1),    F_0(1) = 1
    G_{d,j}(m) = max_{1 <= s <= m}  a[j] F_{d-1}(s) + G_{d,j+1}(m - s),    G_{d,j}(0) = 0

The right-hand sides have fewer nodes than the left-hand sides. So m = 1, 2, ... are computed in turn, each for all d
and j together by operations on arrays. That is O(depth * children * size^2) in all. If the depth has no bound, all F_d
are equal, and the same steps take O(children * size^2).

`select_tree`. Let G(n, d) be the tokens that the best tree of n nodes and depth d yields. Let t(n) be the cost of
verifying it and c the cost of drafting a level, both in units of the target's forward pass over one token. Then
decoding gets faster by

    speed-up(n, d) = G(n, d) / (t(n) + d c)

(Sequoia's hardware-aware optimizer, section 4.1).
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.numbers import real, whole
from heavypath.speculative.trees.tree import TokenTree

Acceptance = Sequence[float] | Sequence[Sequence[float]] | np.ndarray | Tensor
PathAcceptance = Callable[[tuple[int, ...]], Sequence[float]]

ROUNDING = 1e-6  # rows may sum to 1 plus this: they may be fp32
_RISES = "greedy_tree needs acceptance that falls with the child index, got {}"
TOO_DEEP = np.int32(2**30)  # stands for the depth of a split that is not the best
TIE = 1e-13  # relative difference of yields that is taken for a rounding error


@dataclass(frozen=True)
class Plan:
    """A tree, and what decoding with it is expected to yield.

    expected_tokens: average tokens of a step: the accepted nodes and the bonus token
    speedup:         how many times as fast as plain decoding: expected_tokens / (cost of verifying + of drafting)
    """

    tree: TokenTree
    expected_tokens: float
    speedup: float


def expected_tokens(tree: TokenTree, acceptance: Acceptance | PathAcceptance) -> float:
    """The average number of tokens that a step yields: the accepted nodes and the bonus token.

    acceptance: [child]; or [depth, child], where row d is for nodes at depth d + 1; or a function that takes the path
    of child indices to a node and returns the row [child] for its children. A child beyond the end of its row has
    acceptance 0, and so has a node that is deeper than a 2-D acceptance has rows.
    """
    return float(_probabilities(tree, acceptance).sum())


def node_probabilities(tree: TokenTree, acceptance: Acceptance | PathAcceptance) -> Tensor:
    """The probability that each node is accepted, fp64 [N]; 1 for the root. acceptance: as in `expected_tokens`."""
    return torch.from_numpy(_probabilities(tree, acceptance))


def _probabilities(tree: TokenTree, acceptance: Acceptance | PathAcceptance) -> np.ndarray:
    if not isinstance(tree, TokenTree):
        raise TypeError(f"tree must be a TokenTree, got {tree!r}")
    parents, ranks, depths = tree.arrays()
    probability = np.ones(len(tree))  # first of each node given its parent, then the product along the path
    if callable(acceptance):
        paths: list[tuple[int, ...]] = [()]
        rows: dict[int, list[float]] = {}
        for node in range(1, len(tree)):
            parent = int(parents[node])
            rank = int(ranks[node])
            if parent not in rows:
                rows[parent] = _row_at(acceptance, paths[parent])
            row = rows[parent]
            probability[node] = row[rank] if rank < len(row) else 0
            paths.append((*paths[parent], rank))
    else:
        rates = Rates.of(acceptance)
        levels, children = rates.matrix.shape
        level = (depths[1:] - 1) * rates.by_depth
        rank = ranks[1:]
        known = (level < levels) & (rank < children)
        probability[1:] = np.where(known, rates.matrix[level * known, rank * known], 0)
    above = np.maximum(parents, 0)
    while above.any():  # products over paths of 1, 2, 4, ... edges
        probability = probability * probability[above]
        above = above[above]
    return probability


def greedy_tree(acceptance: Acceptance | PathAcceptance, size: int, max_depth: int | None = None) -> TokenTree:
    """The tree of `size` nodes, root included, that yields most tokens, by a priority queue in O(size log size).

    acceptance: [child] or [depth, child], entries in [0, 1] that do not rise with the child index. The number of
        columns bounds the branching, and in the 2-D form the number of rows bounds the depth. Or a function (ERSD's
        higher-order Markov form): acceptance(path) returns the row [child] for the children of the node that the child
        indices of `path` lead to; () is the root. It is called at most once for each node
    max_depth: in edges

    Of equally probable nodes the shallower is added first. The nodes are in heavy-path order.

    Raises ValueError if acceptance rises with the child index, or if no such tree has `size` nodes.
    """
    size, max_depth, _ = _checked_bounds(size, max_depth)
    grown = _grown(acceptance, size, max_depth)
    possible = len(grown.parents)
    if possible < size and callable(acceptance):
        raise ValueError(f"at most {possible} nodes fit this acceptance and depth {max_depth}, not {size}")
    if possible < size:
        raise ValueError(Rates.of(acceptance).misfit(size, max_depth))
    return TokenTree(grown.parents, grown.ranks).renumbered("heavy_path")[0]


def sequoia_tree(
    acceptance: Acceptance, size: int, max_depth: int | None = None, max_branching: int | None = None
) -> TokenTree:
    """The tree of `size` nodes, root included, that yields most tokens, by Sequoia's dynamic programme.

    acceptance: [child] or [depth, child], entries in [0, 1], which may rise with the child index. The number of columns
        and max_branching bound the branching. In the 2-D form the number of rows bounds the depth
    max_depth: in edges

    A child of sibling index j comes with its siblings 0 .. j - 1. The tree has `size` nodes even if the last of them
    are never accepted.

    Takes O(children * size^2), times the depth if acceptance is 2-D or max_depth is less than the best tree's depth. If
    nodes can be split equally well between a child and its later siblings, the split with the shallower tree is
    chosen, and among these the split with most nodes in the earlier child's subtree. The nodes are in heavy-path order.

    Raises ValueError for acceptance or bounds out of range, or if no such tree has `size` nodes.
    """
    size, max_depth, max_branching = _checked_bounds(size, max_depth, max_branching)
    rates = Rates.of(acceptance).narrowed(max_branching)
    misfit = rates.misfit(size, max_depth)
    if misfit:
        raise ValueError(misfit)
    depth = rates.depth_bound(size, max_depth)
    rates = rates.narrowed(max(1, size - 1))
    if not rates.by_depth:
        programme = _Programme(rates.matrix, size, bounded=False)
        if programme.depth[0, size] <= depth:
            return programme.tree(size)
    return _Programme(rates.rows(depth), size, bounded=True).tree(size)


def select_tree(
    acceptance: Acceptance | PathAcceptance,
    verify_cost: Mapping[int, float],
    draft_cost: float,
    max_depth: int | None = None,
) -> Plan:
    """The tree with which decoding is expected to be fastest, of the given sizes and of any depth.

    acceptance:  as in `sequoia_tree`, or a function as in `greedy_tree`
    verify_cost: number of nodes, root included -> cost of verifying a tree of this size. The tree has one of these
                 sizes. A size of 1 is plain decoding
    draft_cost:  cost of drafting one level of the tree
    max_depth:   in edges

    Costs are in units of one token's cost by the target. Every size is tried with every depth that could still win: by
    `greedy_tree` if acceptance does not rise with the child index, else by `sequoia_tree`. Of equally fast trees the
    shallower is chosen, then the smaller.

    Raises ValueError for acceptance or costs out of range, or if no tree of these sizes fits.
    """
    if not isinstance(verify_cost, Mapping):
        raise TypeError(f"verify_cost must map tree sizes to costs, got {verify_cost!r}")
    by_size = {whole("verify_cost", size): real("verify_cost", cost) for size, cost in verify_cost.items()}
    sizes = sorted(by_size)
    draft_cost = real("draft_cost", draft_cost)
    if not sizes or sizes[0] < 1:
        raise ValueError(f"verify_cost must map at least one tree size, an integer >= 1, to a cost, got {verify_cost}")
    costs = np.array([by_size[size] for size in sizes], np.float64)
    if not (np.isfinite(costs) & (costs > 0)).all():
        raise ValueError(f"verify_cost must hold finite costs above 0, got {verify_cost}")
    if not (math.isfinite(draft_cost) and draft_cost >= 0):
        raise ValueError(f"draft_cost must be finite and at least 0, got {draft_cost}")
    _, max_depth, _ = _checked_bounds(sizes[0], max_depth)

    if callable(acceptance):  # it is called with the same paths for every depth
        deepest, most_tokens, planned = _by_queue(cache(acceptance), sizes[-1], max_depth)
    elif Rates.of(acceptance).fall:
        deepest, most_tokens, planned = _by_queue(acceptance, sizes[-1], max_depth)
    else:
        deepest, most_tokens, planned = _by_programme(acceptance, sizes[-1], max_depth)
    limit = most_tokens(deepest)
    if not np.isfinite(limit[sizes]).any():
        possible = int(np.isfinite(limit).nonzero()[0].max())
        raise ValueError(f"at most {possible} nodes fit acceptance and max_depth {max_depth}, got sizes {sizes}")
    speedup = 0.0
    size = 0
    depth = 0
    for edges in range(deepest + 1):
        speedups = most_tokens(edges)[sizes] / (costs + edges * draft_cost)
        fastest = int(speedups.argmax())
        if speedups[fastest] > speedup * (1 + TIE):
            speedup = float(speedups[fastest])
            size = sizes[fastest]
            depth = edges
        best_deeper = limit[sizes] / (costs + (edges + 1) * draft_cost)  # no deeper tree yields more than the limit
        if best_deeper.max() <= speedup * (1 + TIE):
            break
    tree = planned(size, depth)
    tokens = expected_tokens(tree, acceptance)
    return Plan(tree, tokens, tokens / (verify_cost[size] + tree.depth * draft_cost))


def _checked_bounds(
    size: int, max_depth: int | None, max_branching: int | None = None
) -> tuple[int, int | None, int | None]:
    """The three bounds as Python integers, None for none. Raises TypeError or ValueError for invalid bounds."""
    size = whole("size", size)
    max_depth = None if max_depth is None else whole("max_depth", max_depth)
    max_branching = None if max_branching is None else whole("max_branching", max_branching)
    if size < 1:
        raise ValueError(f"size counts the root and must be at least 1, got {size}")
    if max_depth is not None and max_depth < 0:
        raise ValueError(f"max_depth must be at least 0, got {max_depth}")
    if max_branching is not None and max_branching < 1:
        raise ValueError(f"max_branching must be at least 1, got {max_branching}")
    return size, max_depth, max_branching


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
        values: Any = acceptance
        try:
            given = values.double().numpy(force=True) if hasattr(values, "numpy") else np.asarray(values, np.float64)
        except (TypeError, ValueError) as error:
            raise TypeError(f"acceptance must be numbers, [child] or [depth, child], got {values!r}: {error}") from None
        if given.ndim not in (1, 2) or given.size == 0:
            raise ValueError(f"acceptance must be [child] or [depth, child], not empty, got shape {[*given.shape]}")
        matrix = given.reshape(-1, given.shape[-1])
        in_range = (matrix >= 0) & (matrix <= 1)
        if not in_range.all() or (matrix.sum(-1) > 1 + ROUNDING).any():
            raise ValueError(f"acceptance must lie in [0, 1] with rows that sum to at most 1, got {matrix.tolist()}")
        return cls(matrix, given.ndim == 2)

    @property
    def fall(self) -> bool:
        """Whether acceptance never rises with the child index."""
        return bool((np.diff(self.matrix) <= 0).all())

    def narrowed(self, children: int | None) -> "Rates":
        """The same without the children after the first `children`; None for all children."""
        return Rates(self.matrix[:, :children], self.by_depth)

    def rows(self, depth: int) -> np.ndarray:
        """The acceptance of the first `depth` levels, fp64 [depth, child]; fewer rows if fewer were given by depth."""
        return self.matrix[:depth] if self.by_depth else self.matrix.repeat(depth, axis=0)

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
        nodes = level = 1
        for _ in range(depth):
            level *= children
            nodes += level
            if nodes >= size:
                break
        return "" if nodes >= size else f"at most {nodes} nodes fit {children} children and depth {depth}, not {size}"


def _row_at(acceptance: PathAcceptance, path: tuple[int, ...]) -> list[float]:
    """The acceptance [child] of the children of the node at `path`; may be empty. Raises ValueError if out of range."""
    row = [float(rate) for rate in acceptance(path)]
    if not all(0 <= rate <= 1 for rate in row) or sum(row) > 1 + ROUNDING:
        raise ValueError(f"acceptance must lie in [0, 1] and sum to at most 1, got {row} at path {path}")
    return row


class _Grown(NamedTuple):
    """Nodes in the order of falling probability, as lists of one length. The first n are a best tree of n nodes."""

    parents: list[int]
    ranks: list[int]
    depths: list[int]
    probabilities: list[float]


def _grown(acceptance: Acceptance | PathAcceptance, size: int, max_depth: int | None) -> _Grown:
    """The `size` most probable nodes, or all if there are fewer. Raises ValueError if acceptance rises with rank."""
    matrix: list[list[float]] = []
    if not callable(acceptance):
        rates = Rates.of(acceptance)
        if not rates.fall:
            raise ValueError(_RISES.format(rates.matrix.tolist()))
        matrix = rates.matrix.tolist()
        max_depth = rates.depth_bound(size, max_depth)
    parents, ranks, depths, probabilities = grown = _Grown([], [], [], [])
    rows: list[Sequence[float]] = []  # acceptance of each node's children
    # (-probability, depth, parent, rank): of equally probable nodes the shallower comes first, then the earlier parent.
    queue: list[tuple[float, int, int, int]] = [(-1.0, 0, -1, 0)]

    def row_of(node: int) -> Sequence[float]:
        if depths[node] == max_depth or len(parents) == size:
            return ()
        if not callable(acceptance):
            level = depths[node] if len(matrix) > 1 else 0
            return matrix[level]
        upwards = []
        while node:
            upwards.append(ranks[node])
            node = parents[node]
        path = tuple(reversed(upwards))
        row = _row_at(acceptance, path)
        if any(later > earlier for earlier, later in pairwise(row)):
            raise ValueError(_RISES.format(f"{row} at path {path}"))
        return row

    def offer(parent: int, rank: int) -> None:
        row = rows[parent]
        if rank < len(row):
            probability = probabilities[parent] * row[rank]
            heapq.heappush(queue, (-probability, depths[parent] + 1, parent, rank))

    while queue and len(parents) < size:
        negated, depth, parent, rank = heapq.heappop(queue)
        node = len(parents)
        parents.append(parent)
        ranks.append(rank)
        depths.append(depth)
        probabilities.append(-negated)
        rows.append(row_of(node))
        offer(node, 0)
        if node:
            offer(parent, rank + 1)
    return grown


class _Programme:
    """The recurrence of `sequoia_tree`, solved for subtrees of 1 .. size nodes.

    acceptance: [R, J]
    bounded: if True, row r is for the children of nodes r edges below the root, and the children of row R - 1 are
        leaves. If False, the only row is for all nodes

    worth: F[row, number of nodes], [R + 1, size + 1] or [1, size + 1]; -inf if no subtree has this number of nodes
    depth: of the same shape: the least depth of a subtree with this F
    """

    def __init__(self, acceptance: np.ndarray, size: int, *, bounded: bool):
        rows, children = acceptance.shape
        if bounded:
            levels = rows + 1
            self._below = np.arange(1, rows + 1)  # the row of a node's children
        else:
            levels = 1
            self._below = np.zeros(1, np.int64)
        self.worth = np.full((levels, size + 1), -np.inf)
        self.worth[:, 1] = 1
        self.depth = np.zeros(self.worth.shape, np.int32)
        # The terms of the maximum for each row and rank: a[j] F(s) is in column s, and G_{j+1}(m) in column -1 - m. So
        # the terms for all s, and those for all m - s, are slices in the same direction.
        self._child = np.full((rows, children, size), -np.inf)
        self._forest = np.full((rows, children + 1, size), -np.inf)
        self._forest[..., -1] = 0
        self._child_depth = np.zeros((rows, 1, size), np.int32)
        self._forest_depth = np.zeros(self._forest.shape, np.int32)
        every = slice(None)
        for nodes in range(1, size):
            worth = self.worth[self._below, nodes, None]  # [R, 1], F of a child's subtree
            accepted = acceptance * np.maximum(worth, 0)  # [R, J]
            self._child[..., nodes] = np.where(worth > 0, accepted, -np.inf)
            self._child_depth[:, 0, nodes] = self.depth[self._below, nodes] + 1
            most, depths = self._splits(every, every, nodes)
            least_depth = depths.min(-1)
            column = -1 - nodes
            self._forest[:, :-1, column] = most
            self._forest_depth[:, :-1, column] = least_depth
            self.worth[:rows, nodes + 1] = 1 + most[:, 0]
            self.depth[:rows, nodes + 1] = least_depth[:, 0]

    def _splits(self, row: int | slice, rank: int | slice, nodes: int) -> tuple[np.ndarray, np.ndarray]:
        """G(nodes), and for each split into s and nodes - s nodes the depth of the resulting forest, [..., s - 1].

        The depth is a huge number for splits that do not reach the maximum.
        """
        of_child = slice(1, nodes + 1)  # s = 1 .. nodes
        of_later = slice(-nodes, None)  # nodes - s, in the same order
        child_depth = np.broadcast_to(self._child_depth, self._child.shape)
        later_worth = self._forest[:, 1:]
        later_depth = self._forest_depth[:, 1:]
        worth = self._child[row, rank, of_child] + later_worth[row, rank, of_later]
        depths = np.maximum(child_depth[row, rank, of_child], later_depth[row, rank, of_later])
        most = worth.max(-1)
        is_best = worth >= most[..., None] * (1 - TIE)
        return most, np.where(is_best, depths, TOO_DEEP)

    def tree(self, size: int) -> TokenTree:
        """A best tree of `size` nodes, in heavy-path order."""
        parents = [-1]
        ranks = [0]
        waiting = [(0, 0, 0, size - 1)]  # (node, its row, rank of its next child, nodes of this child and later ones)
        while waiting:
            node, row, rank, nodes = waiting.pop()
            if nodes == 0:
                continue
            _, depths = self._splits(row, rank, nodes)
            (shallowest,) = (depths == depths.min()).nonzero()
            child_nodes = 1 + int(shallowest.max())
            child = len(parents)
            parents.append(node)
            ranks.append(rank)
            waiting.append((node, row, rank + 1, nodes - child_nodes))
            waiting.append((child, int(self._below[row]), 0, child_nodes - 1))
        return TokenTree(parents, ranks).renumbered("heavy_path")[0]


class _Planner(NamedTuple):
    """The best trees of up to `size` nodes, for `select_tree`.

    deepest:     the depth, in edges, beyond which trees yield no more
    most_tokens: most_tokens(depth) -> G(n, depth) for n = 0 .. size, [size + 1]; -inf if there is no such tree
    tree:        tree(size, depth) -> a best tree
    """

    deepest: int
    most_tokens: Callable[[int], np.ndarray]
    tree: Callable[[int, int], TokenTree]


def _by_queue(acceptance: Acceptance | PathAcceptance, size: int, max_depth: int | None) -> _Planner:
    """The best trees by `greedy_tree`, for acceptance that never rises with the child index."""

    def most_tokens(depth: int) -> np.ndarray:
        probabilities = _grown(acceptance, size, depth).probabilities
        possible = len(probabilities)
        tokens = np.full(size + 1, -np.inf)
        tokens[1 : possible + 1] = np.cumsum(probabilities)
        return tokens

    deepest = max(_grown(acceptance, size, max_depth).depths)
    return _Planner(deepest, most_tokens, lambda size, depth: greedy_tree(acceptance, size, depth))


def _by_programme(acceptance: Acceptance, size: int, max_depth: int | None) -> _Planner:
    """The best trees by `sequoia_tree`, for any acceptance but a function of the path."""
    rates = Rates.of(acceptance).narrowed(max(1, size - 1))
    deepest = rates.depth_bound(size, max_depth)
    if rates.by_depth:

        def most_tokens(depth: int) -> np.ndarray:
            return _Programme(rates.rows(depth), size, bounded=True).worth[0]
    else:
        unbounded = _Programme(rates.matrix, size, bounded=False)
        deepest = min(deepest, int(unbounded.depth.max()))
        table = _Programme(rates.rows(deepest), size, bounded=True).worth

        def most_tokens(depth: int) -> np.ndarray:
            return table[deepest - depth]

    return _Planner(deepest, most_tokens, lambda size, depth: sequoia_tree(acceptance, size, depth))
