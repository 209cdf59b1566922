"""What no draft tree and no race can exceed, and what a race is sure to reach: the limits of speculative decoding.

Trees. R is the child index at which the target's token stands, of law a, drawn anew at every node; P(node) is the
product of a along its path and H the entropy of a. A tree of n nodes, root included, yields at most S(n), the sum of
the n largest P (planning's greedy_tree reaches it), and

    S(n) <= log(n (m - 1) + 1) / H                          leaves     m values that R can take
    S(n) <= (log(n H + 1 - c) + c) / H                      renewal    c = E[X^2] / E[X],  X = -log a[R],  n H >= c
    S(n) <= min over s >= 1 of n^(1 - 1/s) (1 - sum_j a[j]^s)^(-1/s)       moments;  s = 1 is 1 / (1 - sum_j a[j])

Where a sums to 1, S(n) H / log n goes to 1: growth is logarithmic, log 2 / H tokens for every doubling.

Races. Token v of the target's law P and the draft's law Q arrives at E(v) / P(v) and at E(v) / Q(v), E(v) exponential
and shared; the target's token is its first arrival. With w = P / Q and h(v) = sum_u max(w(v) Q(u) - P(u), 0),

    both first arrivals are one token with probability      sum_v P(v) / (1 + h(v))
    which is                                                sum_v 1 / sum_u max(P(u) / P(v), Q(u) / Q(v))
    at least                                                (1 - TV) / (1 + TV),   TV = sum_v max(P(v) - Q(v), 0)
    and at most what any coupling, greedy rejection, has    1 - TV
    the target's token is the draft's arrival K             K - 1 is geometric of mean h(v), given v; repeats count
    in bits, with D = sum_v P(v) log2 w(v)                  D <= H[K] <= D + log2(D + 2) + 2

The proofs stand below; everything is fp64. Sources: Kobus & Gunduz 2025 (ERSD, "Speculative Sampling via Exponential
Races"), Daliri, Musco & Suresh 2024 (the coupling and its least), Li & El Gamal 2018 (the entropy of K), Lorden 1970
(the excess of a renewal process).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TINY = 1e-12  # of probability: what a sum of fp64 numbers may lack


class TreeBounds(NamedTuple):
    """Upper bounds on the expected tokens of any tree of one size. Each holds alone; infinite where it says nothing."""

    leaves: float
    renewal: float
    moments: float

    @property
    def least(self) -> float:
        """The bound that all three make together."""
        return min(self)


def tree_bounds(acceptance: Sequence[float] | Tensor, size: int) -> TreeBounds:
    """Upper bounds on expected_tokens(tree, acceptance) of every tree of `size` nodes, root included.

    acceptance: [child], in [0, 1], of sum at most 1. What it lacks of 1 is the outcome "no child", which the first two
    bounds count as one more child that the tree may have: more can only be expected of it.

    leaves (for ERSD's theorem 4.1 and lemma 4.2). The indices R_1 .. R_T from the root to the first that leaves the
    tree make a word, and T tokens are the step's. No word begins another, so the word has the entropy E[T] H (as in
    Tunstall's code), and at most log of the number of words: a tree of n nodes has n m places for children, n - 1 of
    them taken. The paper's (log |vocabulary| + log n) / H has n m for this number; this form is ours.

    renewal (ours, for the same statement; no vocabulary in it). For any t, the n largest P sum to at most n e^-t plus
    the sum of max(P - e^-t, 0) over all nodes. A walk down random indices meets each node with probability P, so that
    sum is the mean over walks of sum_d max(1 - e^(S_d - t), 0), where S_d = -log P is a sum of d independent X. It is
    the integral over s in [0, t] of e^(s - t) U(s), U(s) = E #{d: S_d <= s}, and U(s) <= (s + c) / H by Wald's equation
    and Lorden's bound on the excess. So S(n) <= n e^-t + (t - 1 + e^-t + c (1 - e^-t)) / H, least at e^t = n H + 1 - c.

    moments (ours; for few nodes, and for an acceptance below 1). By Hölder's inequality n numbers sum to at most
    n^(1 - 1/s) (sum P^s)^(1/s), and over all nodes sum P^s = sum_d (sum_j a[j]^s)^d.
    """
    law, missing = _acceptance_law(acceptance)
    if size < 1:
        raise ValueError(f"size counts the root and must be at least 1, got {size}")
    outcomes = law if missing <= TINY else torch.cat([law, law.new_tensor([missing])])
    surprise = -outcomes.log()
    entropy = float((outcomes * surprise).sum())
    leaves = renewal = moments = math.inf
    if entropy > TINY:
        leaves = math.log(size * (len(outcomes) - 1) + 1) / entropy
        excess = float((outcomes * surprise**2).sum()) / entropy
        if size * entropy >= excess:
            renewal = (math.log(size * entropy + 1 - excess) + excess) / entropy
    orders = 1 + torch.cat([torch.zeros(1), torch.logspace(-4, 3, 281)]).double()
    sums = 1 - (law[:, None] ** orders).sum(0)
    orders, sums = orders[sums > TINY], sums[sums > TINY]
    if len(orders):
        moments = float((size ** (1 - 1 / orders) * sums ** (-1 / orders)).min())
    return TreeBounds(leaves, renewal, min(moments, float(size)))


def tokens_per_doubling(acceptance: Sequence[float] | Tensor) -> float:
    """log 2 / H: what doubling a large tree adds to its expected tokens, where acceptance sums to 1.

    Where it does not, no tree yields more than 1 / (1 - its sum), and this is the slope with "no child" as a child.
    """
    law, missing = _acceptance_law(acceptance)
    entropy = float(entropy_bits(torch.cat([law, law.new_tensor([missing])])))
    return 1 / entropy if entropy > TINY else math.inf


def overlap(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """1 - TV = sum_v min(P(v), Q(v)) of laws [..., V]: the most that any coupling reaches, [...].

    It is what speculative sampling, which knows both laws, accepts of its first child.
    """
    target, draft = _laws(target_probs, draft_probs)
    return torch.minimum(target, draft).sum(-1)


def race_acceptance(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Probability that a race's first child is accepted, for laws [..., V]: exact, [...], in O(V log V).

    v is first in both races where E(u) > E(v) max(P(u) / P(v), Q(u) / Q(v)) for all other u; the mean over E(v) of
    exp(-E(v) sum of these) is 1 over 1 + the sum, and P(v) times the whole sum is 1 + h(v).
    """
    target, _, excess = _race(target_probs, draft_probs)
    return (target / (1 + excess)).sum(-1)


def race_acceptance_bound(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """(1 - TV) / (1 + TV), which race_acceptance reaches at least, [...]. Daliri et al.'s, for ERSD's lemma 3.1.

    max(P(u) / P(v), Q(u) / Q(v)) <= max(P(u), Q(u)) / min(P(v), Q(v)), and these sum to 1 + TV and 1 - TV.
    """
    common = overlap(target_probs, draft_probs)
    return common / (2 - common)


def race_index_cdf(target_probs: Tensor, draft_probs: Tensor, children: int) -> Tensor:
    """P(K <= k) for k = 1 .. children, of laws [..., V]: [..., children], exact.

    K counts the draft's arrivals up to the target's token, repeats included, each of law Q and independent: a race
    whose children are drawn with replacement accepts one of k with this probability. Children without repeats stand no
    later, so a race of k distinct ones accepts at least as often, and as often at k = 1.

    The target's token is the arrival of least time / w; this least value t is exponential of mean 1, whatever token v
    has it. Token u then has no arrival before t w(u), and from there up to v's time t w(v) it has Poisson many, of mean
    t max(w(v) - w(u), 0) Q(u). So K - 1 is Poisson of mean t h(v): over t, geometric of mean h(v).
    """
    target, _, excess = _race(target_probs, draft_probs)
    if children < 1:
        raise ValueError(f"children must be at least 1, got {children}")
    later = torch.where(excess.isinf(), 1, excess / (1 + excess))
    return torch.stack([1 - (target * later**count).sum(-1) for count in range(1, children + 1)], dim=-1)


def race_index_entropy(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """H[K] in bits, of one pair of laws [V]. Every term up to 64, and from there in bins of 2% up to 10^15.

    Within a bin P(K = k) is taken as constant, which is too high by less than 1e-4 bits.
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
    """Bits, each [...].

    lower:  D, for H[K]
    upper:  D + log2(D + 2) + 2, for H[K] and for the entropy of the place among distinct children
    finer:  the same from the mean of log2 K itself, never above `upper`
    """

    lower: Tensor
    upper: Tensor
    finer: Tensor


def entropy_bounds(target_probs: Tensor, draft_probs: Tensor) -> EntropyBounds:
    """How many bits a race's index carries, which is what the growth of trees goes by (for ERSD's equations 6 to 8).

    lower. The token's law given K = k is P_k <= Q / P(K = k), so D(P_k || Q) <= -log2 P(K = k), and D(P || Q) is at
    most their mean, which is H[K], by convexity. It holds for any choice among independent draws from Q, greedy
    rejection included; but not for the place among *distinct* children: where Q(1) = 1 - e and P(2) = 1, the place is
    nearly always 2, its entropy near 0, and D = -log2 e.

    finer. E[K | v] = 1 + h(v), so E[log2 K] <= l = sum_v P(v) log2(1 + h(v)) by Jensen. Against the law
    k^-s / zeta(s), s = 1 + 1 / l, and with zeta(s) <= 1 + 1 / (s - 1): H[K] <= l + log2(l + 1) + 1. The place among
    distinct children is at most K, so its mean logarithm and its entropy have the same bound.

    upper. h(v) <= w(v), and l <= D + sum_v P(v) log2(1 + 1 / w(v)) <= D + log2(1 + sum_v Q(v)) = D + 1. Li & El Gamal's
    constant in I + log2(I + 1) + 4 is 4; here it is 3, as D + 2 <= 2 (D + 1).
    """
    target, draft, excess = _race(target_probs, draft_probs)
    divergence = torch.where(target > 0, target * (target.log2() - draft.log2()), 0).sum(-1).clamp_min(0)
    mean_log = torch.where(target > 0, target * torch.log1p(excess) / math.log(2), 0).sum(-1)
    upper, finer = (bits + torch.log2(bits + 1) + 1 for bits in (divergence + 1, mean_log))
    return EntropyBounds(divergence, upper, finer)


def entropy_bits(law: Tensor) -> Tensor:
    """Entropy of laws [..., V] in bits, [...]."""
    return torch.special.entr(law).sum(-1) / math.log(2)


def _race(target_probs: Tensor, draft_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Checked P and Q, and h [..., V]: infinite where the target has a token that the draft never draws.

    In the order of rising w, h(v) is w(v) times the sum of Q up to v, less the sum of P up to v.
    """
    target, draft = _laws(target_probs, draft_probs)
    ratio, order = torch.where(target > 0, target / draft, 0).sort(dim=-1)
    target_mass, draft_mass = (law.gather(-1, order).cumsum(-1) for law in (target, draft))
    excess = (torch.where(ratio > 0, ratio * draft_mass, 0) - target_mass).clamp_min(0)
    return target, draft, torch.zeros_like(target).scatter(-1, order, excess)


def _laws(target_probs: Tensor, draft_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Checked, in fp64, of sum 1."""
    laws = torch.as_tensor(target_probs).double(), torch.as_tensor(draft_probs).double()
    if laws[0].shape != laws[1].shape or laws[0].ndim < 1:
        raise ValueError(f"expected two laws [..., V], got shapes {[tuple(law.shape) for law in laws]}")
    for name, law in zip(("target_probs", "draft_probs"), laws, strict=True):
        if not ((law >= 0).all() and ((law.sum(-1) - 1).abs() < 1e-4).all()):
            raise ValueError(f"{name} must be at least 0 and sum to 1, got sums {law.sum(-1).flatten()[:4].tolist()}")
    return laws[0] / laws[0].sum(-1, keepdim=True), laws[1] / laws[1].sum(-1, keepdim=True)


def _acceptance_law(acceptance: Sequence[float] | Tensor) -> tuple[Tensor, float]:
    """The positive entries in fp64, and what they lack of 1."""
    law = torch.as_tensor(acceptance, dtype=torch.float64)
    if law.ndim != 1 or not len(law):
        raise ValueError(f"acceptance must be [child], the same at every depth, got shape {tuple(law.shape)}")
    total = float(law.sum())
    if not ((law >= 0) & (law <= 1)).all() or total > 1 + 1e-6:
        raise ValueError(f"acceptance must lie in [0, 1] and sum to at most 1, got {law.tolist()}")
    return law[law > 0], max(0.0, 1 - total)
