"""Accept the first node of a tree, in post-order, whose own coin is below the chance that the walk ends there.

Recursive rejection (`residual`) decides about a node before it looks below it, and forgets what is accepted there.
Traversal verification (Weng et al. 2025, arXiv 2505.12398) goes the other way: leaves first, and what a subtree does
not take is left to what comes behind it. On a chain it is block verification (Sun et al. 2024, arXiv 2403.10444).

A node has a weight w, the probability that the walk ends in its subtree; the root has 1. Let P and Q be the target's
and the draft's distribution at the node, x_1, x_2, ... its children in draw order, R_j the mass of Q outside the
children before x_j (1 for independent draws), and F(l) = sum_v max(P(v) - l Q(v), 0). From l = 0, c = n = w:

    w(x_j) = min(1, c max(P(x_j) - l Q(x_j), 0) R_j / Q(x_j))   and the walk goes through the subtree of x_j
    if it did not end there:
        l += 1 / (c R_j);  S = c F(l);  r = (1 - n) + S;  c <- c / r;  n <- S / r
    behind the last child:
        it ends at the node itself  iff  coin < n               n = w at a leaf
        the recovered token ~ max(P - l Q, 0)                   P itself where no child was passed over

So c max(P - l Q, 0), of mass n, is what may still be emitted here, and 1 - n is the chance to leave the subtree. At the
root n is 1. "Held traversal" has the rule of held siblings (`held`) at each node: first all children are offered,

    t_j as w(x_j) above;  l += 1 / (c R_j);  S = c F(l);  s = (1 - t_j) / ((1 - n) + S);  c <- c s;  n <- S s
    W_i <- s W_i  for i < j,  W_j = t_j,  and 1 - n is the W together with what leaves the subtree

and then the walk goes through the subtrees, and ends at the node iff its coin is below what n is of all that is left:

    w(x_j) = W_j / (1 - W_1 - ... - W_{j-1})                    coin < n / (1 - W_1 - W_2 - ...)

*Why the law is the target's.* The claim is: whatever hangs below a node that has weight w, the walk ends in its subtree
with probability w, and then the text goes on by P. Of a leaf the formulas say so. Above leaves, average over x_j: of
c max(P - l Q, 0), which is to be emitted before x_j is drawn, min(Q / R_j, c max(P - l Q, 0)) passes to x_j and, by the
claim, is emitted in its subtree. What is left is c max(P - (l + 1 / (c R_j)) Q, 0), of mass S, beside the 1 - n that
leaves; both are divided by r, the chance that the subtree did not take it. So no child, drawn or not, changes the law
on average. This asks that a child's presence depends on nothing that was drawn after it: any growth by one node after
the other will do. Held traversal asks that all children of a node are drawn before any node below them.

Children of equal tokens, which independent draws may give, have equal contexts: the first of them has the children of
all, the others stay in the chain with weight 0. Where the draft's support is used up, the next child was drawn
uniformly from the tokens left: P and Q are restricted to these, l = 0, R = 1, and c and n stay. A child at draft
temperature 0 is the same case, with its own token as the only one left. A child that the draft could not have drawn is
skipped like an absent one, and nodes below the deepest level that counts are not there at all.

A node's coin is named as for the other methods, by its parent's noise row and its rank: one for each node but the root.
The reference takes sequences one by one, for most of its numbers are single ones, on which Python is faster than NumPy.
It visits the nodes before the accepted one alone, and reads rows of a leaf only if the leaf is accepted.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.kernels.nodes import Nodes, Verified
from heavypath.kernels.noise import Noise, Stream, coins, gumbels
from heavypath.kernels.ordering import sibling_order
from heavypath.kernels.verifying.distributions import best_token, log_weights, readable, used_row
from heavypath.kernels.verifying.rule import Rule

_LITTLE = 2.0**-60  # of a row's largest weight: what is left of the row is computed anew before fp32 loses digits of it
_LEAST = -126  # log2 of the least weight that is not taken for 0, as in kernels
_END = -1, 0.0  # behind the last child


@np.errstate(all="ignore")
def traverse(
    nodes: Nodes,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    *,
    rule: Rule,
    max_depth: int,
    target_filters: Filters,
    draft_filters: Filters,
    noise: Noise,
) -> Verified:
    """Verify trees by method "traversal" or "held_traversal" of `rule`, as above.

    Parents and ranks of nodes are [B, N], logits [B, N, V]; draft_logits is None for trees of a root alone. The rest is
    as in `verify_tree`.
    """
    tokens, parents, ranks = nodes
    batch, count = tokens.shape
    device, vocab_size = tokens.device, target_logits.shape[-1]
    checked = device.type == "cpu"
    ranks = sibling_order(parents) if ranks is None else ranks
    seed = int(noise.seed)
    token, parent, rank = (field.cpu().numpy() for field in (tokens, parents, ranks))
    row = np.arange(batch * count).reshape(batch, count) if noise.rows is None else noise.rows.cpu().numpy()
    sequence = np.arange(batch)
    coin = coins(seed, row[sequence[:, None], np.maximum(parent, 0)], rank)
    order = (rank * count + np.arange(count)).argsort(1)
    target, draft = readable(target_logits), None if draft_logits is None else readable(draft_logits)

    path = np.full((batch, max_depth + 1), -1)
    length = np.zeros(batch, dtype=np.int64)
    weights = np.empty((batch, vocab_size), dtype=np.float32)
    for b in range(batch):

        def log_target(node: int, b: int = b) -> np.ndarray:
            return log_weights(*used_row(target, "target", b, node, checked), target_filters)[0]

        def log_draft(node: int, b: int = b) -> np.ndarray | None:
            if draft_filters.temperature == 0:
                return None
            assert draft is not None
            return log_weights(*used_row(draft, "draft", b, node, checked), draft_filters)[0]

        tree, tossed = PlainTree(token[b].tolist(), parent[b].tolist(), order[b].tolist()), coin[b].tolist()
        visits = in_post_order(tree, log_target, log_draft, rule, max_depth)
        node, _, left = next(visit for visit in visits if visit.node == 0 or tossed[visit.node] < visit.ending)
        weights[b] = np.exp2(log_target(node)) if left is None or not left.any() else left
        above = [node]
        while above[-1] > 0:
            above.append(tree.parents[above[-1]])
        length[b] = len(above) - 1
        path[b, : len(above)] = above[::-1]

    keys = np.log(weights.astype(np.float64))
    keys += gumbels(seed, Stream.TARGET, row[sequence, path[sequence, length]], vocab_size)
    return Verified(*(torch.from_numpy(field).to(device) for field in (path, length, best_token(keys))))


class PlainTree(NamedTuple):
    """One sequence's nodes: their tokens, their parents, and all nodes by rank."""

    tokens: list[int]
    parents: list[int]
    order: list[int]

    def children(self) -> list[list[int]]:
        """The children of each node in draw order, without absent ones."""
        children: list[list[int]] = [[] for _ in self.tokens]
        for node in self.order:
            if self.parents[node] >= 0 and self.tokens[node] >= 0:
                children[self.parents[node]].append(node)
        return children


class Visit(NamedTuple):
    """A node behind all that is below it.

    ending: the chance that the walk ends here if it has come so far, which the node's coin must be below
    left:   fp32 [V], what the token behind the node is drawn by; None for the target's own distribution
    """

    node: int
    ending: float
    left: np.ndarray | None


class _Entered:
    """A node whose subtree the walk is in. shares: the children that are left, with their weights."""

    def __init__(self, node: int, weight: float):
        self.node, self.weight = node, weight
        self.children: list[int] = []
        self.chain: _Chain | None = None
        self.shares: Iterator[tuple[int, float]] = iter(())


def in_post_order(
    tree: PlainTree,
    log_target: Callable[[int], np.ndarray],
    log_draft: Callable[[int], np.ndarray | None],
    rule: Rule,
    max_depth: int,
) -> Iterator[Visit]:
    """All nodes that a walk meets which ends at none before the root. It computes as far as it is asked.

    log_target, log_draft: log2 of a node's distribution up to a constant; None for point masses.
    """
    below, shares = tree.children(), _held_shares if rule.method == "held_traversal" else _shares

    def enter(equal: list[int], weight: float, deeper: bool) -> _Entered:
        """Enter the first of siblings of equal context, with the children of all."""
        entered = _Entered(equal[0], weight)
        children = below[equal[0]]
        if len(equal) > 1:
            places = {node: place for place, node in enumerate(tree.order)}
            children = sorted((child for node in equal for child in below[node]), key=places.__getitem__)
        if children and deeper and weight > 0:
            source = tree.parents[children[0]]  # of equal siblings, one that has children
            entered.chain = _Chain(log_target(equal[0]), log_draft(source), weight, rule.independent)
            entered.children, entered.shares = children, shares(entered.chain, children, tree.tokens)
        return entered

    way = [enter([0], 1.0, max_depth > 0)]
    while way:
        here = way[-1]
        child, weight = next(here.shares, _END)
        if child >= 0:
            equal = [child]
            if rule.independent:
                equal = [other for other in here.children if tree.tokens[other] == tree.tokens[child]]
            if child == equal[0]:
                way.append(enter(equal, weight, len(way) < max_depth))
        else:
            chain = here.chain
            yield Visit(
                here.node, here.weight if chain is None else chain.ending, None if chain is None else chain.left
            )
            way.pop()


class _Chain:
    """What is still to be emitted at one node, while its children are offered one after the other.

    left:    c max(P - l Q, 0) up to a factor, fp32 [V]
    ending:  n, its sum
    leaving: the chance to leave the subtree, 1 - n for traversal
    held:    the weights W of held siblings so far; always empty for traversal
    """

    def __init__(self, log_target: np.ndarray, log_draft: np.ndarray | None, weight: float, replacement: bool):
        """log_target, log_draft: log2 P and log2 Q up to constants, fp32 [V]; without log_draft, Q is a point mass on
        each child in turn. replacement: whether the children are independent draws."""
        self.left = np.exp2(log_target)
        self.factor = weight / float(self.left.sum())  # c, for the weights in `left`
        self.ending, self.leaving = weight, 1 - weight
        self.held: list[float] = []
        self.undrawn = None if replacement and log_draft is not None else np.ones(len(log_target), dtype=bool)
        self.log_draft = log_draft
        if log_draft is not None:
            self.draft, self.largest = np.exp2(log_draft), 0.0  # Q up to a factor, and log2 of that factor
            self.mass = float(self.draft.sum())  # R

    def offer(self, token: int) -> float | None:
        """The probability to take the next child, t_j above; None if the draft could not have drawn it."""
        if self.undrawn is not None and not self.undrawn[token]:
            return None
        log_ratio = math.log2(self.factor)
        if self.log_draft is not None:
            if self.mass < _LITTLE:
                self._renew()
            log_q = float(self.log_draft[token])
            if log_q == -math.inf:
                return None
            log_ratio += math.log2(self.mass) - (log_q - self.largest)
        p = float(self.left[token])
        if p == 0:
            return 0.0
        log_ratio += math.log2(p)
        if log_ratio < _LEAST:
            return 0.0
        return 1.0 if log_ratio >= 0 else 2.0**log_ratio

    def pass_over(self, token: int, share: float) -> None:
        """Leave the child that was offered last; share: 1, or 1 - t_j if it is held."""
        if self.log_draft is not None:
            covered = np.float32(min(1 / (self.factor * self.mass), 2.0**120))
            np.maximum(self.left - covered * self.draft, 0, out=self.left)
            if self.undrawn is not None:
                self.draft[token] = 0
                self.mass = float(self.draft.sum())
        if self.undrawn is not None:
            self.undrawn[token] = False
        self.left[token] = 0
        emitted = self.factor * float(self.left.sum())  # S
        total = self.leaving + sum(self.held) + emitted
        if total > 0:  # else rounding has left nothing where something must be emitted: the node ends it
            self.ending = emitted / total * share  # exactly 1 where nothing is leaving or held
            share /= total
            self.factor *= share
            self.leaving *= share
            self.held = [weight * share for weight in self.held]

    def _renew(self) -> None:
        """Compute what is left of the draft's distribution anew; uniform where its support is used up."""
        assert self.log_draft is not None
        assert self.undrawn is not None
        logs = np.where(self.undrawn, self.log_draft, -np.inf)
        if logs.max() == -np.inf:
            logs = np.where(self.undrawn, np.float32(0), -np.inf)
        self.largest = float(logs.max())
        self.log_draft, self.draft = logs, np.exp2(logs - np.float32(self.largest))
        self.mass = float(self.draft.sum())


def _shares(chain: _Chain, children: list[int], tokens: list[int]) -> Iterator[tuple[int, float]]:
    """Each child with its weight; the next one is asked for when the walk did not end in the child's subtree."""
    for child in children:
        weight = chain.offer(tokens[child])
        if weight is not None:
            yield child, weight
            chain.pass_over(tokens[child], 1.0)


def _held_shares(chain: _Chain, children: list[int], tokens: list[int]) -> Iterator[tuple[int, float]]:
    """The same by the rule of held siblings: all children are offered before the first is given out."""
    offered = []
    for child in children:
        taken = chain.offer(tokens[child])
        if taken is not None:
            offered.append(child)
            if taken == 1:  # nothing is left for the others
                chain.ending, chain.leaving, chain.held = 0.0, 0.0, [*(0.0 for _ in chain.held), 1.0]
                break
            chain.pass_over(tokens[child], 1 - taken)
            chain.held.append(taken)
    rest = chain.ending + chain.leaving
    if rest > 0:
        chain.ending /= rest
    given = []
    for child, held in zip(reversed(offered), reversed(chain.held), strict=True):
        rest += held  # its own weight, those of the younger ones, and what is left
        given.append((child, held / rest if held > 0 else 0.0))
    yield from reversed(given)
