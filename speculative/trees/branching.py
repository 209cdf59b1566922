"""Trees whose nodes of one level all have the same number of children, as RSD-C drafts them: find the best of n nodes.

In a branching vector b, each node at depth d has b[d] children. With a[d, j] the probability that child j of an
accepted node at depth d is the accepted one, the tree has

    nodes              1 + sum_l prod_{d<l} b[d]
    expected tokens    1 + sum_l prod_{d<l} P[d, b[d]],        P[d, b] = sum_{j<b} a[d, j],        l = 1 .. len(b)

so no tree has to be built to compare vectors. Only non-increasing vectors are compared: a tree that branches late has
most of its nodes where few sequences get. There are few of them: 171 with at most 64 nodes, 8 levels and 8 children.

Source: Jeon et al. 2024, "Recursive Speculative Decoding" (arXiv 2402.14160), algorithm 2, experiments 1 and 2.
"""

from collections.abc import Iterator, Mapping

from heavypath.speculative.trees.planning import Plan
from heavypath.speculative.trees.rates import Acceptance, Rates
from heavypath.speculative.trees.tree import TokenTree


def branching_tree(acceptance: Acceptance, size: int, max_depth: int) -> TokenTree:
    """The best tree of at most `size` nodes and `max_depth` levels with a non-increasing branching vector.

    acceptance: [child] or [depth, child], as for `sequoia_tree`. The number of children limits the branching; the
        number of rows, if there are any, limits the depth

    Of trees with equally many expected tokens, it is one with the fewest nodes. It is in heavy-path order.

    Raises ValueError for acceptance out of range, and for a size below 2 or a depth below 1.
    """
    if size < 2 or max_depth < 1:
        raise ValueError(f"a tree has at least 2 nodes and 1 level, got size {size} and max_depth {max_depth}")
    shapes = _shapes(acceptance, size, max_depth)
    vector, _, _ = max(shapes, key=lambda shape: (round(shape[2], 12), -shape[1]))
    return TokenTree.from_branching(vector).reordered("heavy_path")[0]


def select_branching(acceptance: Acceptance, verify_cost: Mapping[int, float], draft_cost: float) -> Plan:
    """The fastest tree with a non-increasing branching vector, or the root alone if no tree makes decoding faster.

    acceptance: [child] or [depth, child], as for `branching_tree`
    verify_cost: number of nodes, 1, 2, ... -> cost of a step with a tree of this size
    draft_cost: cost of drafting a level

    Both costs are in steps of plain decoding.
    """
    best = ()
    tokens = 1.0
    speedup = 1 / verify_cost[1]
    for vector, nodes, expected in _shapes(acceptance, max(verify_cost), None):
        faster = expected / (verify_cost[nodes] + len(vector) * draft_cost)
        if faster > speedup:
            best = vector
            tokens = float(expected)
            speedup = float(faster)
    return Plan(TokenTree.from_branching(best).reordered("heavy_path")[0], tokens, speedup)


def _shapes(acceptance: Acceptance, size: int, max_depth: int | None) -> Iterator[tuple[tuple[int, ...], int, float]]:
    """Each non-increasing branching vector whose tree has 2 .. size nodes, with its nodes and its expected tokens."""
    rates = Rates.of(acceptance)
    depth = rates.depth_bound(size, max_depth)
    accepted = rates.rows(depth).cumsum(1)  # P[d, b] in column b - 1
    # (vector, nodes, nodes of its last level, expected tokens, expected tokens of its last level)
    waiting: list[tuple[tuple[int, ...], int, int, float, float]] = [((), 1, 1, 1.0, 1.0)]
    while waiting:
        vector, nodes, level, tokens, reached = waiting.pop()
        if vector:
            yield vector, nodes, tokens
        if len(vector) == depth:
            continue
        most = min(vector[-1] if vector else accepted.shape[1], (size - nodes) // level)
        for children in range(1, most + 1):
            added = level * children
            further = reached * float(accepted[len(vector), children - 1])
            waiting.append(((*vector, children), nodes + added, added, tokens + further, further))
