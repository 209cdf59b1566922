"""Trees whose nodes of one level have equally many children, as RSD-C draws them: the best one of at most n nodes.

A branching vector b says that each node at depth d has b[d] children. With a[d, j] the chance that child j of an
accepted node at depth d is the accepted one, the tree has

    nodes              1 + sum_l prod_{d<l} b[d]
    expected tokens    1 + sum_l prod_{d<l} P[d, b[d]],        P[d, b] = sum_{j<b} a[d, j],        l = 1 .. len(b)

so no tree has to be built to compare vectors. Those that do not rise are compared, since a tree that branches late has
most of its nodes where few texts get. There are few of them: 171 of at most 64 nodes, 8 levels and 8 children.

Source: Jeon et al. 2024, "Recursive Speculative Decoding" (arXiv 2402.14160), algorithm 2, experiments 1 and 2.
"""

from collections.abc import Iterator, Mapping

from heavypath.speculative.trees.planning import Acceptance, Plan, Rates
from heavypath.speculative.trees.tree import TokenTree


def branching_tree(acceptance: Acceptance, size: int, max_depth: int) -> TokenTree:
    """The tree of at most `size` nodes and `max_depth` levels, by a vector that does not rise, that yields most tokens.

    acceptance: [child] or [depth, child], as of `sequoia_tree`; the number of children bounds the branching, and the
    number of rows, if there are any, the depth. Of trees that yield equally many it is one of fewest nodes. It is in
    heavy-path order.

    Raises ValueError for acceptance out of range, and for a size below 2 or a depth below 1.
    """
    if size < 2 or max_depth < 1:
        raise ValueError(f"a tree has at least 2 nodes and 1 level, got size {size} and max_depth {max_depth}")
    shapes = _shapes(acceptance, size, max_depth)
    vector, _, _ = max(shapes, key=lambda shape: (round(shape[2], 12), -shape[1]))
    return TokenTree.from_branching(vector).reordered("heavy_path")[0]


def select_branching(acceptance: Acceptance, verify_cost: Mapping[int, float], draft_cost: float) -> Plan:
    """The tree by a vector that does not rise, or the root alone, with which decoding is expected to be fastest.

    acceptance: as of `branching_tree`; verify_cost: of a step by nodes, for 1, 2, ... nodes; draft_cost: of drafting a
    level; both in steps of plain decoding, see `select_tree`.
    """
    best, tokens, speedup = (), 1.0, 1 / verify_cost[1]
    for vector, nodes, expected in _shapes(acceptance, max(verify_cost), None):
        faster = expected / (verify_cost[nodes] + len(vector) * draft_cost)
        if faster > speedup:
            best, tokens, speedup = vector, float(expected), float(faster)
    return Plan(TokenTree.from_branching(best).reordered("heavy_path")[0], tokens, speedup)


def _shapes(acceptance: Acceptance, size: int, max_depth: int | None) -> Iterator[tuple[tuple[int, ...], int, float]]:
    """All vectors of trees of 2 .. size nodes that do not rise, each with its nodes and its expected tokens."""
    rates = Rates.of(acceptance)
    depth = rates.depth_bound(size, max_depth)
    accepted = rates.rows(depth).cumsum(1)  # P[d, b] in column b - 1
    # A vector, its nodes and the nodes of its last level, its tokens and those that the last level adds.
    waiting: list[tuple[tuple[int, ...], int, int, float, float]] = [((), 1, 1, 1.0, 1.0)]
    while waiting:
        vector, nodes, level, tokens, reached = waiting.pop()
        if vector:
            yield vector, nodes, tokens
        if len(vector) == depth:
            continue
        most = min(vector[-1] if vector else accepted.shape[1], (size - nodes) // level)
        for children in range(1, most + 1):
            added, further = level * children, reached * float(accepted[len(vector), children - 1])
            waiting.append(((*vector, children), nodes + added, added, tokens + further, further))
