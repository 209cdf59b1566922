"""Limits of races: how often the first child is accepted, what the place of the target's token is, and its entropy.

With P the target's law, Q the draft's and E(v) exponential, token v arrives at time E(v) / P(v) in the target's
race and at E(v) / Q(v) in the draft's. The target's token is the first arrival of its race. With w = P / Q and
h(v) = sum_u max(w(v) Q(u) - P(u), 0),

    the first arrivals are the same with probability        sum_v P(v) / (1 + h(v))
    which is                                                sum_v 1 / sum_u max(P(u) / P(v), Q(u) / Q(v))
    at least                                                sum_v P(v) Q(v) / (P(v) + Q(v))
    and at most what any coupling, greedy rejection, has    1 - TV,   TV = sum_v max(P(v) - Q(v), 0)
    the target's token is arrival K of the draft's          K - 1 is geometric of mean h(v), given v; repeats count
    in bits, with D = sum_v P(v) log2 w(v)                  D <= H[K] <= D + log2(D + 2) + 2

The proofs are in the functions' docstrings; all numbers are fp64. Sources: Kobus & Gündüz 2025 (ERSD, "Speculative
Sampling via Exponential Races"), Daliri, Musco & Suresh 2024 (the coupling), Li & El Gamal 2018 (the entropy of K).
What bounds trees is in `bounds.py`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


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


def matching(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """ERSD's lemma 3.1 (Poisson matching), a lower bound of race_acceptance, for laws [..., V]: [...].

    max(P(u) / P(v), Q(u) / Q(v)) is at most the sum of the two, and over u that is 1 / P(v) + 1 / Q(v).
    """
    target, draft = _laws(target_probs, draft_probs)
    both = target + draft
    return torch.where(both > 0, target * draft / both, 0).sum(-1)


def race_index_beyond(target_probs: Tensor, draft_probs: Tensor, counts: Tensor) -> Tensor:
    """P(K > k) for each k of `counts` [N], for one pair of laws [V]: exact, [N].

    K counts the draft's arrivals up to the target's token, repeats included. They are independent and of law Q, so a
    race with k children that are drawn with replacement accepts none of them with this probability. A token comes no
    later among distinct children, so a race of k distinct ones accepts at least as often (just as often if k = 1).

    The target's token is the arrival with the least time / w. This least value t is exponential of mean 1, whichever
    token v has it. Token u then has no arrival before t w(u); between there and v's time t w(v) the number of its
    arrivals is Poisson, of mean t max(w(v) - w(u), 0) Q(u). So K - 1 is Poisson of mean t h(v), and geometric of mean
    h(v) where t is not given.
    """
    target, _, excess = _race(target_probs, draft_probs)
    if target.ndim != 1:
        raise ValueError(f"expected laws [V], got shape {tuple(target.shape)}")
    decay = -torch.log1p(1 / excess.where(excess > 0, 1))  # log of h / (1 + h)
    return torch.where(excess > 0, torch.exp(counts[:, None] * decay), counts[:, None] == 0) @ target


def race_index_entropy(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """H[K] in bits, for one pair of laws [V].

    Terms up to k = 64 are summed one by one, and from there up to 10^15 in bins of 2%, within which P(K = k) is taken
    to be constant. This is too high by less than 1e-4 bits.
    """
    edges = [*range(64), *(math.ceil(64 * 1.02**step) for step in range(1537))]
    bins = torch.tensor(edges, dtype=torch.float64)
    mass, width = -race_index_beyond(target_probs, draft_probs, bins).diff(), bins.diff()
    return (torch.special.entr(mass) + mass * width.log()).sum() / math.log(2)


class EntropyBounds(NamedTuple):
    """Bounds in bits, each [...]: D, of H[K] from below, and D + log2(D + 2) + 2, of it from above."""

    lower: Tensor
    upper: Tensor


def entropy_bounds(target_probs: Tensor, draft_probs: Tensor) -> EntropyBounds:
    """How many bits a race's index carries, on which the growth of trees depends (for ERSD's equations 6 and 8).

    lower. The token's law given K = k is P_k <= Q / P(K = k), so D(P_k || Q) <= -log2 P(K = k). By convexity
    D(P || Q) is at most the mean of these over K, which is H[K]. This holds for any choice among independent draws from
    Q, greedy rejection included, but not for the place among *distinct* children: where Q(1) = 1 - e and P(2) = 1, the
    place is nearly always 2, its entropy is near 0, and D = -log2 e.

    upper. E[K | v] = 1 + h(v), so E[log2 K] <= l = sum_v P(v) log2(1 + h(v)) by Jensen's inequality. The cross-entropy
    of K with the law k^-s / zeta(s), s = 1 + 1 / l, and zeta(s) <= 1 + 1 / (s - 1) give H[K] <= l + log2(l + 1) + 1.
    The place among distinct children is at most K, so its mean logarithm and its entropy have the same bound. h(v) <=
    w(v), so l <= D + sum_v P(v) log2(1 + 1 / w(v)) <= D + log2(1 + sum_v Q(v)) = D + 1. The constant in Li & El Gamal's
    I + log2(I + 1) + 4 is 4; here it is 3, since D + 2 <= 2 (D + 1).
    """
    target, draft = _laws(target_probs, draft_probs)
    divergence = torch.where(target > 0, target * (target.log2() - draft.log2()), 0).sum(-1).clamp_min(0)
    return EntropyBounds(divergence, divergence + torch.log2(divergence + 2) + 2)


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
