"""Limits of speculative decoding: what no draft tree and no race can exceed, and what a race always reaches.

Trees. Let R be the index of the child that carries the target's token, of law a and independent at every node. Let
P(node) be the product of a along the node's path, and H the entropy of a. A tree of n nodes, root included, yields at
most S(n), the sum of the n largest P, which `planning.greedy_tree` reaches, and

    S(n) <= log(n (m - 1) + 1) / H                          leaves     m values that R can take
    S(n) <= min over v of log(n (I + v - 1) + 1) / (H_I + r log v)      merged     I children that the best tree has
    S(n) <= (log(n H + 1 - c) + c) / H                      renewal    c = E[X^2] / E[X],  X = -log a[R],  n H >= c
    S(n) <= min over s >= 1 of n^(1 - 1/s) (1 - sum_j a[j]^s)^(-1/s)       moments;  s = 1 is 1 / (1 - sum_j a[j])

Where a sums to 1, S(n) H / log n goes to 1: growth is logarithmic, log 2 / H tokens for every doubling.

Races. With P the target's law, Q the draft's and E(v) exponential, token v arrives at time E(v) / P(v) in the target's
race and at E(v) / Q(v) in the draft's. The target's token is the first arrival of its race. With w = P / Q and
h(v) = sum_u max(w(v) Q(u) - P(u), 0),

    the first arrivals are the same with probability        sum_v P(v) / (1 + h(v))
    which is                                                sum_v 1 / sum_u max(P(u) / P(v), Q(u) / Q(v))
    at least                                                (1 - TV) / (1 + TV),   TV = sum_v max(P(v) - Q(v), 0)
    and at least                                            sum_v P(v) Q(v) / (P(v) + Q(v))
    and at most what any coupling, greedy rejection, has    1 - TV
    the target's token is arrival K of the draft's          K - 1 is geometric of mean h(v), given v; repeats count
    in bits, with D = sum_v P(v) log2 w(v)                  D <= H[K] <= D + log2(D + 2) + 2

The proofs are in the functions' docstrings; all numbers are fp64. Sources: Kobus & Gündüz 2025 (ERSD, "Speculative
Sampling via Exponential Races"), Daliri, Musco & Suresh 2024 (the coupling and its lower bound), Li & El Gamal 2018
(the entropy of K), Lorden 1970 (the excess of a renewal process).
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

    @property
    def tightest(self) -> str:
        """The name of the smallest of the bounds."""
        return self._fields[self.index(self.least)]


def tree_bounds(acceptance: Sequence[float] | Tensor, size: int) -> TreeBounds:
    """Upper bounds on expected_tokens(tree, acceptance) of every tree of `size` nodes, root included.

    acceptance: [child], in [0, 1], with a sum of at most 1. What is missing from 1 is the outcome "no child".
    `leaves` and `renewal` count it as one more child that the tree may have, which can only raise what the tree yields.

    leaves (a form of ERSD's theorem 4.1 and lemma 4.2). The indices R_1 .. R_T from the root to the first one that
    leaves the tree are a word, and the step emits T tokens. No word is the beginning of another, so the entropy of the
    word is E[T] H (as for Tunstall's code), and it is at most the logarithm of the number of words. A tree of n nodes
    has n m places for children, of which n - 1 are taken. In the paper's (log |vocabulary| + log n) / H the number is
    n m; the form here is ours.

    merged (ERSD's lemma 4.2). Of the best tree's nodes no one is a child of index above some I, so the outcomes above I
    need not be told apart: with their sum r, H_I = -sum_{i<=I} a[i] log a[i] - r log r. What the tree yields does not
    change either if they are v outcomes of r / v each, which has the entropy H_I + r log v, at n (I + v - 1) + 1 words.
    That holds for every integer v >= 1. I is counted in a tree of at most COUNTED nodes; larger ones have all children.

    renewal (ours, for the same statement, without a vocabulary). For any t, the n largest P sum to at most n e^-t plus
    the sum of max(P - e^-t, 0) over all nodes. A walk down random indices meets each node with probability P, so that
    sum is the mean over walks of sum_d max(1 - e^(S_d - t), 0), where S_d = -log P is a sum of d independent X. It is
    the integral over s in [0, t] of e^(s - t) U(s), with U(s) = E #{d: S_d <= s}, and U(s) <= (s + c) / H by Wald's
    equation and Lorden's bound on the excess. So S(n) <= n e^-t + (t - 1 + e^-t + c (1 - e^-t)) / H, which is least at
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
    orders = 1 + torch.cat([torch.zeros(1), torch.logspace(-4, 3, 281)]).double()
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
    parts = torch.logspace(0, 8, 400, dtype=torch.float64).round().unique()
    entropy = float(torch.special.entr(kept).sum()) + rest * (parts / max(rest, TINY)).log()
    bounds = (size * (used + parts - 1) + 1).log() / entropy
    return float(bounds[entropy > TINY].min()) if (entropy > TINY).any() else math.inf


def tokens_per_doubling(acceptance: Sequence[float] | Tensor) -> float:
    """log 2 / H, which is what doubling a large tree adds to its expected tokens, where acceptance sums to 1.

    Where it sums to less, no tree yields more than 1 / (1 - its sum); then "no child" counts as a child here.
    """
    law, missing = _acceptance_law(acceptance)
    entropy = float(entropy_bits(torch.cat([law, law.new_tensor([missing])])))
    return 1 / entropy if entropy > TINY else math.inf


def overlap(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """1 - TV = sum_v min(P(v), Q(v)) of laws [..., V], [...]: the most that any coupling reaches.

    Speculative sampling, which knows both laws, accepts its first child with this probability.
    """
    target, draft = _laws(target_probs, draft_probs)
    return torch.minimum(target, draft).sum(-1)


def race_acceptance(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """The probability that a race's first child is accepted, for laws [..., V]: exact, [...], in O(V log V).

    v is first in both races if E(u) > E(v) max(P(u) / P(v), Q(u) / Q(v)) for all other u. Let M be the sum of these
    maxima. The mean of exp(-E(v) M) over E(v) is 1 / (1 + M), and P(v) (1 + M) = sum_u max(P(u), w(v) Q(u)) = 1 + h(v).
    """
    target, _, excess = _race(target_probs, draft_probs)
    return (target / (1 + excess)).sum(-1)


def race_acceptance_bound(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """The larger of two lower bounds of race_acceptance, for laws [..., V]: [...].

    (1 - TV) / (1 + TV) (Daliri et al.). max(P(u) / P(v), Q(u) / Q(v)) <= max(P(u), Q(u)) / min(P(v), Q(v)); the
    numerators sum to 1 + TV over u, and the denominators to 1 - TV over v.

    sum_v P(v) Q(v) / (P(v) + Q(v)) (ERSD's lemma 3.1, Poisson matching). The maximum is at most the sum of the two, and
    over u that is 1 / P(v) + 1 / Q(v). Either may be the larger: where the laws have little in common, it is this one.
    """
    target, draft = _laws(target_probs, draft_probs)
    common = torch.minimum(target, draft).sum(-1)
    both = target + draft
    matching = torch.where(both > 0, target * draft / both, 0).sum(-1)
    return torch.maximum(common / (2 - common), matching)


def race_index_cdf(target_probs: Tensor, draft_probs: Tensor, children: int) -> Tensor:
    """P(K <= k) for k = 1 .. children, of laws [..., V]: exact, [..., children].

    K counts the draft's arrivals up to the target's token, repeats included. They are independent and of law Q, so a
    race with k children that are drawn with replacement accepts one of them with this probability. A token comes no
    later among distinct children, so a race of k distinct ones accepts at least as often (just as often if k = 1).

    The target's token is the arrival with the least time / w. This least value t is exponential of mean 1, whichever
    token v has it. Token u then has no arrival before t w(u); between there and v's time t w(v) the number of its
    arrivals is Poisson, of mean t max(w(v) - w(u), 0) Q(u). So K - 1 is Poisson of mean t h(v), and geometric of mean
    h(v) where t is not given.
    """
    target, _, excess = _race(target_probs, draft_probs)
    if children < 1:
        raise ValueError(f"children must be at least 1, got {children}")
    later = torch.where(excess.isinf(), 1, excess / (1 + excess))
    return torch.stack([1 - (target * later**count).sum(-1) for count in range(1, children + 1)], dim=-1)


def race_index_entropy(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """H[K] in bits, for one pair of laws [V].

    Terms up to k = 64 are summed one by one, and from there up to 10^15 in bins of 2%, within which P(K = k) is taken
    to be constant. This is too high by less than 1e-4 bits.
    """
    target, _, excess = _race(target_probs, draft_probs)
    if target.ndim != 1:
        raise ValueError(f"expected laws [V], got shape {tuple(target.shape)}")
    edges = [*range(64), *(math.ceil(64 * 1.02**step) for step in range(1537))]
    bins = torch.tensor(edges, dtype=torch.float64)
    decay = -torch.log1p(1 / excess.where(excess > 0, 1))  # log of h / (1 + h)
    beyond = torch.where(excess > 0, torch.exp(bins[:, None] * decay), bins[:, None] == 0) @ target  # P(K > edge)
    mass, width = -beyond.diff(), bins.diff()
    return (torch.special.entr(mass) + mass * width.log()).sum() / math.log(2)


class EntropyBounds(NamedTuple):
    """Bounds on entropies in bits, each [...].

    lower:  D, a lower bound of H[K]
    upper:  D + log2(D + 2) + 2, an upper bound of H[K] and of the entropy of the place among distinct children
    finer:  an upper bound of both from the mean of log2 K itself, never above `upper`
    """

    lower: Tensor
    upper: Tensor
    finer: Tensor


def entropy_bounds(target_probs: Tensor, draft_probs: Tensor) -> EntropyBounds:
    """How many bits a race's index carries, on which the growth of trees depends (for ERSD's equations 6 and 8).

    lower. The token's law given K = k is P_k <= Q / P(K = k), so D(P_k || Q) <= -log2 P(K = k). By convexity
    D(P || Q) is at most the mean of these over K, which is H[K]. This holds for any choice among independent draws from
    Q, greedy rejection included, but not for the place among *distinct* children: where Q(1) = 1 - e and P(2) = 1, the
    place is nearly always 2, its entropy is near 0, and D = -log2 e.

    finer. E[K | v] = 1 + h(v), so E[log2 K] <= l = sum_v P(v) log2(1 + h(v)) by Jensen's inequality. The cross-entropy
    of K with the law k^-s / zeta(s), s = 1 + 1 / l, and zeta(s) <= 1 + 1 / (s - 1) give H[K] <= l + log2(l + 1) + 1.
    The place among distinct children is at most K, so its mean logarithm and its entropy have the same bound.

    upper. h(v) <= w(v), so l <= D + sum_v P(v) log2(1 + 1 / w(v)) <= D + log2(1 + sum_v Q(v)) = D + 1. The constant in
    Li & El Gamal's I + log2(I + 1) + 4 is 4; here it is 3, since D + 2 <= 2 (D + 1).
    """
    target, draft, excess = _race(target_probs, draft_probs)
    divergence = torch.where(target > 0, target * (target.log2() - draft.log2()), 0).sum(-1).clamp_min(0)
    mean_log = torch.where(target > 0, target * torch.log1p(excess) / math.log(2), 0).sum(-1)
    upper, finer = (bits + torch.log2(bits + 1) + 1 for bits in (divergence + 1, mean_log))
    return EntropyBounds(divergence, upper, finer)


def entropy_bits(law: Tensor) -> Tensor:
    """The entropy of laws [..., V] in bits, [...]."""
    return torch.special.entr(law).sum(-1) / math.log(2)


def _race(target_probs: Tensor, draft_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """P and Q, checked, and h [..., V], which is infinite where the target has a token that the draft never draws.

    In the order of rising w, h(v) is w(v) times the sum of Q up to v, minus the sum of P up to v.
    """
    target, draft = _laws(target_probs, draft_probs)
    ratio, order = torch.where(target > 0, target / draft, 0).sort(dim=-1)
    target_mass, draft_mass = (law.gather(-1, order).cumsum(-1) for law in (target, draft))
    excess = (torch.where(ratio > 0, ratio * draft_mass, 0) - target_mass).clamp_min(0)
    return target, draft, torch.zeros_like(target).scatter(-1, order, excess)


def _laws(target_probs: Tensor, draft_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Both laws, checked, in fp64 and with a sum of exactly 1."""
    laws = torch.as_tensor(target_probs).double(), torch.as_tensor(draft_probs).double()
    if laws[0].shape != laws[1].shape or laws[0].ndim < 1:
        raise ValueError(f"expected two laws [..., V], got shapes {[tuple(law.shape) for law in laws]}")
    for name, law in zip(("target_probs", "draft_probs"), laws, strict=True):
        if not ((law >= 0).all() and ((law.sum(-1) - 1).abs() < 1e-4).all()):
            raise ValueError(f"{name} must be at least 0 and sum to 1, got sums {law.sum(-1).flatten()[:4].tolist()}")
    return laws[0] / laws[0].sum(-1, keepdim=True), laws[1] / laws[1].sum(-1, keepdim=True)


def _acceptance_law(acceptance: Sequence[float] | Tensor) -> tuple[Tensor, float]:
    """The positive entries of an acceptance vector in fp64, and what they lack to a sum of 1."""
    law = torch.as_tensor(acceptance, dtype=torch.float64)
    if law.ndim != 1 or not len(law):
        raise ValueError(f"acceptance must be [child], the same at every depth, got shape {tuple(law.shape)}")
    total = float(law.sum())
    if not ((law >= 0) & (law <= 1)).all() or total > 1 + 1e-6:
        raise ValueError(f"acceptance must lie in [0, 1] and sum to at most 1, got {law.tolist()}")
    return law[law > 0], max(0.0, 1 - total)
