"""Limits of speculative decoding: what no draft tree can exceed.

Let R be the index of the child that carries the target's token, of law a and independent at every node. Let
P(node) be the product of a along the node's path, and H the entropy of a. A tree of n nodes, root included, yields at
most S(n), the sum of the n largest P, which `planning.greedy_tree` reaches, and

    S(n) <= log(n (m - 1) + 1) / H                          leaves     m values that R can take
    S(n) <= min over v of log(n (I + v - 1) + 1) / (H_I + r log v)      merged     I children that the best tree has
    S(n) <= (log(n H + 1 - c) + c) / H                      renewal    c = E[X^2] / E[X],  X = -log a[R],  n H >= c
    S(n) <= min over s >= 1 of n^(1 - 1/s) (1 - sum_j a[j]^s)^(-1/s)       moments;  s = 1 is 1 / (1 - sum_j a[j])

Where a sums to 1, S(n) H / log n goes to 1: growth is logarithmic, log 2 / H tokens for every doubling.

The proofs are in the functions' docstrings; all numbers are fp64. Sources: Kobus & Gündüz 2025 (ERSD, "Speculative
Sampling via Exponential Races"), Lorden 1970 (the excess of a renewal process).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from heavypath.speculative.trees.planning import greedy_tree

TINY = 1e-12  # what a sum of fp64 probabilities may differ from 1
COUNTED = 2**12  # nodes of the largest tree that is built to see which children the best one has


class TreeBounds(NamedTuple):
    """Upper bounds on the expected tokens of any tree of one size; a bound that says nothing is infinite."""

    leaves: float
    merged: float
    renewal: float
    moments: float

    @property
    def least(self) -> float:
        """The smallest of the bounds."""
        return min(self)


def tree_bounds(acceptance: Sequence[float] | Tensor, size: int) -> TreeBounds:
    """Upper bounds on expected_tokens(tree, acceptance) of every tree of `size` nodes, root included.

    acceptance: [child], in [0, 1], with a sum of at most 1. The rest to 1 is the outcome "no child". `leaves` and
    `renewal` count it as one more child that the tree may have, which can only raise the yield of the tree.

    leaves (a form of ERSD's theorem 4.1 and lemma 4.2). The indices R_1 .. R_T from the root to the first one that
    leaves the tree are a word, and the step emits T tokens. No word is the beginning of another, so the entropy of the
    word is E[T] H (as for Tunstall's code). It is at most the logarithm of the number of words. A tree of n nodes has
    n m places for children, of which n - 1 are taken. In the paper's (log |vocabulary| + log n) / H the number is n m;
    the form here is ours.

    merged (ERSD's lemma 4.2). Of the best tree's nodes no one is a child of index above some I. So the outcomes above I
    need not be told apart: with their sum r, H_I = -sum_{i<=I} a[i] log a[i] - r log r. The yield does not change
    either if they are v outcomes of r / v each. These have the entropy H_I + r log v, at n (I + v - 1) + 1 words. That
    holds for every integer v >= 1. I is counted in a tree of at most COUNTED nodes; larger ones have all children.

    renewal (ours, for the same statement, without a vocabulary). For any t, the n largest P sum to at most n e^-t plus
    the sum of max(P - e^-t, 0) over all nodes. A walk down random indices meets each node with probability P. So that
    sum is the mean over walks of sum_d max(1 - e^(S_d - t), 0), where S_d = -log P is a sum of d independent X. It is
    the integral over s in [0, t] of e^(s - t) U(s), with U(s) = E #{d: S_d <= s}. By Wald's equation and Lorden's bound
    on the excess, U(s) <= (s + c) / H. So S(n) <= n e^-t + (t - 1 + e^-t + c (1 - e^-t)) / H. This is least at
    e^t = n H + 1 - c.

    moments (ours; good for few nodes, and where acceptance sums to less than 1). By Hölder's inequality n numbers sum
    to at most n^(1 - 1/s) (sum P^s)^(1/s), and over all nodes sum P^s = sum_d (sum_j a[j]^s)^d.
    """
    law, missing = _acceptance_law(acceptance)
    if size < 1:
        raise ValueError(f"size counts the root and must be at least 1, got {size}")
    outcomes = law if missing <= TINY else torch.cat([law, law.new_tensor([missing])])
    surprise = -outcomes.log()
    entropy = float((outcomes * surprise).sum())
    leaves = merged = renewal = moments = math.inf
    if entropy > TINY:
        leaves = math.log(size * (len(outcomes) - 1) + 1) / entropy
        merged = _merged_bound(law, size)
        excess = float((outcomes * surprise**2).sum()) / entropy
        if size * entropy >= excess:
            renewal = (math.log(size * entropy + 1 - excess) + excess) / entropy
    orders = 1 + torch.cat([torch.zeros(1, device="cpu"), torch.logspace(-4, 3, 281, device="cpu")]).double()
    sums = 1 - (law[:, None] ** orders).sum(0)
    orders, sums = orders[sums > TINY], sums[sums > TINY]
    if len(orders):
        moments = float((size ** (1 - 1 / orders) * sums ** (-1 / orders)).min())
    return TreeBounds(leaves, merged, renewal, min(moments, float(size)))


def _merged_bound(law: Tensor, size: int) -> float:
    """`merged` of tree_bounds, for the positive entries of an acceptance vector."""
    law = law.sort(descending=True).values  # the order of children does not matter to the n largest P
    used = len(law)
    if 1 < size <= COUNTED and used > 1:
        used = 1 + int(greedy_tree(law, size).ranks.max())
    kept = law[:used]
    rest = max(0.0, 1 - float(kept.sum()))
    parts = torch.logspace(0, 8, 400, dtype=torch.float64, device="cpu").round().unique()
    entropy = float(torch.special.entr(kept).sum()) + rest * (parts / max(rest, TINY)).log()
    bounds = (size * (used + parts - 1) + 1).log() / entropy
    return float(bounds[entropy > TINY].min()) if (entropy > TINY).any() else math.inf


def _acceptance_law(acceptance: Sequence[float] | Tensor) -> tuple[Tensor, float]:
    """The positive entries of an acceptance vector in fp64, and what they lack to a sum of 1."""
    law = torch.as_tensor(acceptance, dtype=torch.float64, device="cpu")
    if law.ndim != 1 or not len(law):
        raise ValueError(f"acceptance must be [child], the same at every depth, got shape {tuple(law.shape)}")
    total = float(law.sum())
    if not ((law >= 0) & (law <= 1)).all() or total > 1 + 1e-6:
        raise ValueError(f"acceptance must lie in [0, 1] and sum to at most 1, got {law.tolist()}")
    return law[law > 0], max(0.0, 1 - total)
