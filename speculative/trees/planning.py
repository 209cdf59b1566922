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
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.numbers import real, whole
from heavypath.speculative.trees.rates import Acceptance, PathAcceptance, Rates, row_at
from heavypath.speculative.trees.tree import TokenTree

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
    if callable(acceptance):
        probability = _given_parents(acceptance, parents.tolist(), ranks.tolist())
    else:
        rates = Rates.of(acceptance)
        levels, children = rates.matrix.shape
        level = (depths[1:] - 1) * rates.by_depth
        rank = ranks[1:]
        known = (level < levels) & (rank < children)
        rate = rates.matrix[level * known, rank * known]
        probability = np.ones(len(tree))
        probability[1:] = np.where(known, rate, 0)
    above = np.maximum(parents, 0)
    while above.any():  # products over paths of 1, 2, 4, ... edges
        probability = probability * probability[above]
        above = above[above]
    return probability


def _given_parents(acceptance: PathAcceptance, parents: list[int], ranks: list[int]) -> np.ndarray:
    """The probability that each node is accepted if its parent is, fp64 [N]; 1 for the root."""
    probability = np.ones(len(parents))
    paths: list[tuple[int, ...]] = [()]
    rows: dict[int, list[float]] = {}
    for node in range(1, len(parents)):
        parent = parents[node]
        rank = ranks[node]
        if parent not in rows:
            rows[parent] = row_at(acceptance, paths[parent])
        row = rows[parent]
        probability[node] = row[rank] if rank < len(row) else 0
        path = (*paths[parent], rank)
        paths.append(path)
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
    tree, _ = TokenTree(grown.parents, grown.ranks).renumbered("heavy_path")
    return tree


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
    most_children = max(1, size - 1)
    rates = rates.narrowed(most_children)
    if not rates.by_depth:
        programme = _Programme(rates.matrix, size, bounded=False)
        if programme.depth[0, size] <= depth:
            return programme.tree(size)
    programme = _Programme(rates.rows(depth), size, bounded=True)
    return programme.tree(size)


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
    sizes, costs = _checked_costs(verify_cost)
    draft_cost = real("draft_cost", draft_cost)
    if not (math.isfinite(draft_cost) and draft_cost >= 0):
        raise ValueError(f"draft_cost must be finite and at least 0, got {draft_cost}")
    _, max_depth, _ = _checked_bounds(sizes[0], max_depth)

    largest = sizes[-1]
    if callable(acceptance):  # it is called with the same paths for every depth
        planner = _by_queue(cache(acceptance), largest, max_depth)
    elif Rates.of(acceptance).fall:
        planner = _by_queue(acceptance, largest, max_depth)
    else:
        planner = _by_programme(acceptance, largest, max_depth)
    most_tokens = planner.most_tokens(planner.deepest)
    is_possible = np.isfinite(most_tokens)
    if not is_possible[sizes].any():
        possible = int(is_possible.nonzero()[0].max())
        raise ValueError(f"at most {possible} nodes fit acceptance and max_depth {max_depth}, got sizes {sizes}")
    limit = most_tokens[sizes]  # no tree of any depth yields more
    speedup = 0.0
    size = 0
    depth = 0
    for edges in range(planner.deepest + 1):
        tokens = planner.most_tokens(edges)[sizes]
        speedups = tokens / (costs + edges * draft_cost)
        fastest = int(speedups.argmax())
        if speedups[fastest] > speedup * (1 + TIE):
            speedup = float(speedups[fastest])
            size = sizes[fastest]
            depth = edges
        deeper_costs = costs + (edges + 1) * draft_cost
        best_deeper = (limit / deeper_costs).max()
        if best_deeper <= speedup * (1 + TIE):
            break
    tree = planner.tree(size, depth)
    tokens = expected_tokens(tree, acceptance)
    cost = verify_cost[size] + tree.depth * draft_cost
    return Plan(tree, tokens, tokens / cost)


def _checked_costs(verify_cost: Mapping[int, float]) -> tuple[list[int], np.ndarray]:
    """The sizes in `verify_cost`, in rising order, and their costs, fp64. Raises TypeError or ValueError."""
    if not isinstance(verify_cost, Mapping):
        raise TypeError(f"verify_cost must map tree sizes to costs, got {verify_cost!r}")
    by_size = {}
    for given, cost in verify_cost.items():
        size = whole("verify_cost", given)
        by_size[size] = real("verify_cost", cost)
    sizes = sorted(by_size)
    if not sizes or sizes[0] < 1:
        raise ValueError(f"verify_cost must map at least one tree size, an integer >= 1, to a cost, got {verify_cost}")
    costs = np.array([by_size[size] for size in sizes], np.float64)
    if not (np.isfinite(costs) & (costs > 0)).all():
        raise ValueError(f"verify_cost must hold finite costs above 0, got {verify_cost}")
    return sizes, costs


def _checked_bounds(
    size: int, max_depth: int | None, max_branching: int | None = None
) -> tuple[int, int | None, int | None]:
    """The three bounds as Python integers, None for none. Raises TypeError or ValueError for invalid bounds."""
    size = whole("size", size)
    if max_depth is not None:
        max_depth = whole("max_depth", max_depth)
    if max_branching is not None:
        max_branching = whole("max_branching", max_branching)
    if size < 1:
        raise ValueError(f"size counts the root and must be at least 1, got {size}")
    if max_depth is not None and max_depth < 0:
        raise ValueError(f"max_depth must be at least 0, got {max_depth}")
    if max_branching is not None and max_branching < 1:
        raise ValueError(f"max_branching must be at least 1, got {max_branching}")
    return size, max_depth, max_branching


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
        matrix = rates.matrix.tolist()
        if not rates.fall:
            raise ValueError(_RISES.format(matrix))
        max_depth = rates.depth_bound(size, max_depth)
    grown = _Grown([], [], [], [])
    parents, ranks, depths, probabilities = grown
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
        row = row_at(acceptance, path)
        if any(later > earlier for earlier, later in pairwise(row)):
            raise ValueError(_RISES.format(f"{row} at path {path}"))
        return row

    def offer(parent: int, rank: int) -> None:
        row = rows[parent]
        if rank < len(row):
            probability = probabilities[parent] * row[rank]
            depth = depths[parent] + 1
            heapq.heappush(queue, (-probability, depth, parent, rank))

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
            depth_below = self.depth[self._below, nodes]
            self._child_depth[:, 0, nodes] = depth_below + 1
            most, depths = self._splits(every, every, nodes)  # [R, J], [R, J, nodes]
            least_depth = depths.min(-1)  # [R, J]
            column = -1 - nodes
            self._forest[:, :-1, column] = most
            self._forest_depth[:, :-1, column] = least_depth
            self.worth[:rows, nodes + 1] = 1 + most[:, 0]
            self.depth[:rows, nodes + 1] = least_depth[:, 0]

    def _splits(self, row: int | slice, rank: int | slice, nodes: int) -> tuple[np.ndarray, np.ndarray]:
        """G(nodes), and for each split into s and nodes - s nodes the depth of the resulting forest, [..., s - 1].

        The depth is a huge number for splits that do not reach the maximum.
        """
        of_child = (row, rank, slice(1, nodes + 1))  # s = 1 .. nodes
        of_later = (row, rank, slice(-nodes, None))  # nodes - s, in the same order
        child_worth = self._child[of_child]
        later_worth = self._forest[:, 1:][of_later]
        worth = child_worth + later_worth
        child_depth = np.broadcast_to(self._child_depth, self._child.shape)
        later_depth = self._forest_depth[:, 1:]
        depths = np.maximum(child_depth[of_child], later_depth[of_later])
        most = worth.max(-1)
        least = most * (1 - TIE)
        is_best = worth >= least[..., None]
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
            is_shallowest = depths == depths.min()
            last = is_shallowest.nonzero()[0].max()
            child_nodes = 1 + int(last)
            child = len(parents)
            parents.append(node)
            ranks.append(rank)
            row_below = int(self._below[row])
            waiting.append((node, row, rank + 1, nodes - child_nodes))
            waiting.append((child, row_below, 0, child_nodes - 1))
        tree, _ = TokenTree(parents, ranks).renumbered("heavy_path")
        return tree


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

    grown = _grown(acceptance, size, max_depth)
    deepest = max(grown.depths)
    return _Planner(deepest, most_tokens, partial(greedy_tree, acceptance))


def _by_programme(acceptance: Acceptance, size: int, max_depth: int | None) -> _Planner:
    """The best trees by `sequoia_tree`, for any acceptance but a function of the path."""
    most_children = max(1, size - 1)
    rates = Rates.of(acceptance).narrowed(most_children)
    deepest = rates.depth_bound(size, max_depth)
    if rates.by_depth:

        def most_tokens(depth: int) -> np.ndarray:
            programme = _Programme(rates.rows(depth), size, bounded=True)
            return programme.worth[0]
    else:
        unbounded = _Programme(rates.matrix, size, bounded=False)
        deepest = min(deepest, int(unbounded.depth.max()))
        programme = _Programme(rates.rows(deepest), size, bounded=True)

        def most_tokens(depth: int) -> np.ndarray:
            return programme.worth[deepest - depth]

    return _Planner(deepest, most_tokens, partial(sequoia_tree, acceptance))
