"""Acceptance that nobody measured: of more children than were counted, and of drafts by their kind.

More children: a power law, fitted to the last of those that were counted.

Let r[k] = 1 - a[0] - ... - a[k-1] be the chance that k children are all rejected. Sequoia (Chen et al. 2024, definition
3.5) finds that it falls as a power of k. Shifted by one, so that r[0] = 1 is on the curve, the law through K children
and half of them, h = K // 2, is

    r[k] = r[K] ((K + 1) / (k + 1))^b        b = log(r[h] / r[K]) / log((K + 1) / (h + 1))        k > K
    a[k] = r[k] - r[k+1]

Where the last children are never accepted, as those beyond the tokens that filters leave, b is 0 and so are the rest.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from heavypath.speculative.trees.growth import DEFAULT_ACCEPTANCE

CHILDREN = 64  # of a node of a planned tree, at most: of 768 nodes the best trees have up to 60
DEPTH = 64  # levels of a planned tree, at most
HARDER = 0.95  # of the misses at a depth, those at the next one: text that drafts reach is easier, see `of_any_pair`


def with_tail(acceptance: Sequence[float] | np.ndarray, children: int = CHILDREN) -> np.ndarray:
    """Acceptance fp64 [max(children, K)] whose first K entries are the given ones and the rest the power law.

    acceptance: [K], of sum at most 1. No entry of the rest is above the last given one.
    """
    given = np.asarray(acceptance, np.float64)
    counted = len(given)
    rejected = np.maximum(1 - np.concatenate([[0], given.cumsum()]), 0)  # r[0 .. K]
    if children <= counted or rejected[-1] <= 0:
        return np.concatenate([given, np.zeros(max(0, children - counted))])
    half = counted // 2
    power = np.log(rejected[half] / rejected[-1]) / np.log((counted + 1) / (half + 1))
    law = rejected[-1] * ((counted + 1) / np.arange(counted + 1, children + 2)) ** power  # r[K .. children]
    return np.concatenate([given, np.minimum(law[:-1] - law[1:], given[-1])])


def of_any_pair(children: int = CHILDREN, depth: int = DEPTH) -> np.ndarray:
    """Acceptance fp64 [depth, child] for models that nobody measured: that of the shipped pair, with its tail.

    Where tokens were accepted, the next ones are accepted more often. With the shipped pair and its head each depth
    misses about a twentieth less than the one above it.
    """
    vector = with_tail(DEFAULT_ACCEPTANCE, children)
    rows = vector * HARDER ** np.arange(depth)[:, None]
    rows[:, 0] = 1 - HARDER ** np.arange(depth) * (1 - vector[0])
    return rows


BY_A_SAMPLE = 0.65  # the share of what rejection accepts


class Usual(NamedTuple):
    """How often the tokens of a kind of draft are accepted, before anybody measured it: what default trees assume.

    first:  the chance that the root's first child is accepted
    harder: the share of a depth's misses that the next depth has: text that drafts reach is easier
    later:  how often later children are accepted where the first is not, in parts of how often the shipped pair's are
    """

    first: float
    harder: float
    later: float = 1.0

    def by_a_sample(self) -> "Usual":
        """Where a sample of the target accepts a child that has its token: rejection accepts half as many more."""
        return self._replace(first=BY_A_SAMPLE * self.first)

    def rates(self, children: int = CHILDREN, depth: int = DEPTH) -> np.ndarray:
        """Acceptance fp64 [depth, child]; later children share the misses of the first as those of the shipped pair."""
        later = self.later * with_tail(DEFAULT_ACCEPTANCE, children)[1:] / (1 - DEFAULT_ACCEPTANCE[0])
        misses = (1 - self.first) * self.harder ** np.arange(depth)[:, None]
        return np.concatenate([1 - misses, misses * later], axis=1)


# Fitted to the tokens a step of the chains of `bench/decoding.py --sweep defaults`: the shipped models, at temperatures
# 0, 0.6 and 1 together.
SMALL_MODEL = Usual(0.63, 0.94)
TRAINED_HEAD = Usual(0.72, 0.93)
# A lookup proposes nothing where nothing is found. Its token is certain, and a sampled text follows it less. Texts that
# were written before, which `Retrieval` and `Recall` look in, are followed longer than a prompt.
LOOKUP, SAMPLED_LOOKUP = Usual(0.45, 0.8, 0.1), Usual(0.25, 0.9, 0.1)
RETRIEVAL = Usual(0.7, 1.0, 0.1)


def falling(acceptance: np.ndarray) -> np.ndarray:
    """The sequence nearest to acceptance [child] that never rises: chance alone has a later child accepted more."""
    blocks: list[tuple[float, int]] = []  # mean, entries
    for rate in acceptance.tolist():
        mean, count = rate, 1
        while blocks and blocks[-1][0] < mean:
            before, entries = blocks.pop()
            mean, count = (before * entries + mean * count) / (entries + count), entries + count
        blocks.append((mean, count))
    return np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])
