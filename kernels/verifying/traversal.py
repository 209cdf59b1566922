"""Traversal verification: accept the first node in post-order whose coin is below the chance that the walk ends there.

Recursive rejection (`residual`) decides about a node before it considers the nodes below it. Traversal verification
(Weng et al. 2025, arXiv 2505.12398) goes the other way: leaves first, and mass that a subtree does not use is left to
the nodes after it. On a chain it is block verification (Sun et al. 2024, arXiv 2403.10444).

A node has a weight w, the probability that the walk ends in its subtree; the root has 1. Let P and Q be the target's
and the draft's distribution at the node, x_1, x_2, ... its children in draw order, R_j the mass of Q outside the
children before x_j (1 for independent draws), and F(l) = sum_v max(P(v) - l Q(v), 0). From l = 0, c = n = w:

    w(x_j) = min(1, c max(P(x_j) - l Q(x_j), 0) R_j / Q(x_j))   and the walk goes through the subtree of x_j
    if it did not end there:
        l += 1 / (c R_j);  S = c F(l);  r = (1 - n) + S;  c <- c / r;  n <- S / r
    after the last child:
        it ends at the node itself  iff  coin < n               n = w at a leaf
        the recovered token ~ max(P - l Q, 0)                   P itself if no child was passed over

So c max(P - l Q, 0), of mass n, is the mass still to be emitted here, and 1 - n is the chance to leave the subtree. At
the root n is 1. "Held traversal" uses the rule of held siblings (`held`) at each node: first all children are offered,

    t_j as w(x_j) above;  l += 1 / (c R_j);  S = c F(l);  s = (1 - t_j) / ((1 - n) + S);  c <- c s;  n <- S s
    W_i <- s W_i  for i < j,  W_j = t_j,  and 1 - n is the W together with what leaves the subtree

and then the walk goes through the subtrees. It ends at the node iff its coin is below n as a share of the rest:

    w(x_j) = W_j / (1 - W_1 - ... - W_{j-1})                    coin < n / (1 - W_1 - W_2 - ...)

*It is lossless.* The claim for the subtree of a node with weight w: the walk ends in it with probability w, and then
the output continues by P. For a leaf the formulas say so. Above leaves, average over x_j. The mass to be emitted before
x_j is drawn is c max(P - l Q, 0). Of it min(Q / R_j, c max(P - l Q, 0)) goes to x_j and, by the claim, is emitted in
its subtree. The rest is c max(P - (l + 1 / (c R_j)) Q, 0), of mass S, in addition to the 1 - n that leaves. Both are
divided by r, the chance that the walk did not end in the subtree of x_j. So no child, drawn or not, changes the
distribution on average. This requires that a child's presence depends on nothing drawn after it, which holds if nodes
are drawn one after the other. Held traversal requires that all children of a node are drawn before any node below them.

Children of equal tokens, which independent draws may give, have equal contexts: the first of them gets the children of
all, the others stay in the chain with weight 0. If the draft's support is used up, the next child was drawn uniformly
from the tokens left. P and Q are restricted to these, l = 0, R = 1, and c and n stay. A child at draft temperature 0 is
the same case, with its own token as the only one left. A child that the draft could not have drawn is skipped like an
absent one, and nodes below max_depth are ignored.

A node's coin comes, as in the other methods, from its parent's noise row and its sibling index: one for each node
except the root. The reference, with the formulas in `residual.Offers`, visits only the nodes before the accepted one,
and reads rows of a leaf only if the leaf is accepted.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from heavypath.kernels.nodes import PlainTree
from heavypath.kernels.verifying.residual import Offers


class Visit(NamedTuple):
    """A visit of a node, after all nodes below it.

    ending: the chance that the walk ends here, given that it did not end before; the node's coin is compared with it
    left:   [V], weights by which the token after the node is drawn; None for the target's distribution
    """

    node: int
    ending: float
    left: np.ndarray | None


def in_post_order(
    tree: PlainTree,
    log_target: Callable[[int], np.ndarray],
    log_draft: Callable[[int], np.ndarray | None],
    max_depth: int,
    *,
    held: bool,
    independent: bool,
) -> Iterator[Visit]:
    """Yield the nodes in post-order, up to the root. It is lazy: nodes after the accepted one are not computed.

    log_target, log_draft: return log2 of a node's distribution up to a constant; None for point masses
    held: whether siblings are held; independent: whether they are independent draws
    """
    shares = _held_shares if held else _shares

    def visit(equal: list[int], weight: float, depth: int) -> Iterator[Visit | Iterator]:
        """Yield visits of the subtrees below siblings of equal context, then the first of these siblings."""
        children = tree.below(equal) if depth < max_depth and weight > 0 else []
        if not children:
            yield Visit(equal[0], weight, None)
            return
        source = tree.parents[children[0]]  # one of the equal siblings that has children
        offers = Offers(log_target(equal[0]), log_draft(source), weight, independent)
        for child, share in shares(offers, children, tree.tokens):
            alike = tree.alike(children, tree.tokens[child]) if independent else [child]
            if child == alike[0]:
                yield visit(alike, share, depth + 1)
        yield Visit(equal[0], offers.ending, offers.left)

    way = [visit([0], 1.0, 0)]  # an explicit stack, since a tree may be deeper than Python's recursion limit
    while way:
        found = next(way[-1], None)
        if found is None:
            way.pop()
        elif isinstance(found, Visit):
            yield found
        else:
            way.append(found)


def _shares(offers: Offers, children: list[int], tokens: list[int]) -> Iterator[tuple[int, float]]:
    """Yield each child with its weight. Resumed only if the walk did not end in the child's subtree."""
    for child in children:
        weight = offers.offer(tokens[child])
        if weight is not None:
            yield child, weight
            offers.pass_over(tokens[child])


def _held_shares(offers: Offers, children: list[int], tokens: list[int]) -> Iterator[tuple[int, float]]:
    """Yield each child with its weight by the rule of held siblings; offers all children before the first yield."""
    held = offers.hold(children, tokens)
    rest = offers.ending + offers.leaving
    if rest > 0:
        offers.ending /= rest
    given = []
    for child, weight in reversed(held):
        rest += weight  # of this child and the later ones, and the mass left
        given.append((child, weight / rest if weight > 0 else 0.0))
    yield from reversed(given)
