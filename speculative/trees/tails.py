"""Acceptance that was not measured: of further children, by a fitted power law; and of drafts, by their kind.

Let r[k] = 1 - a[0] - ... - a[k-1] be the probability that k children are all rejected. Sequoia (Chen et al. 2024,
definition 3.5) finds that it falls as a power of k. Shifted by one, so that r[0] = 1 is on the curve, the power law
through k = K, the number of measured children, and k = h = K // 2 is

    r[k] = r[K] ((K + 1) / (k + 1))^b        b = log(r[h] / r[K]) / log((K + 1) / (h + 1))        k > K
    a[k] = r[k] - r[k+1]

If the last measured children are never accepted, for example because filters leave fewer tokens, b is 0, and so are all
further a[k].
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from heavypath.speculative.trees.growth import DEFAULT_ACCEPTANCE

CHILDREN = 64  # most children of a node of a planned tree: the best trees of 768 nodes have up to 60
DEPTH = 64  # most levels of a planned tree
HARDER = 0.95  # the rate of misses at a depth relative to the depth above, see `of_any_pair`


def with_tail(acceptance: Sequence[float] | np.ndarray, children: int = CHILDREN) -> np.ndarray:
    """Extend measured acceptance of K children by the fitted power law, to fp64 [max(children, K)].

    acceptance: [K], with a sum of at most 1

    No entry of the power law is above the last given one.
    """
    given = np.asarray(acceptance, np.float64)
    counted = len(given)  # K
    if children <= counted:
        return given.copy()
    accepted = np.concatenate([[0], given.cumsum()])
    rejected = np.maximum(1 - accepted, 0)  # r[0 .. K]
    last = rejected[-1]
    if last <= 0:
        none = np.zeros(children - counted)
        return np.concatenate([given, none])
    half = counted // 2  # h
    fall = np.log(rejected[half] / last)
    power = fall / np.log((counted + 1) / (half + 1))  # b
    further = np.arange(counted + 1, children + 2)  # k + 1 for k = K .. children
    shrinking = (counted + 1) / further
    curve = last * shrinking**power  # r[K .. children]
    tail = curve[:-1] - curve[1:]
    tail = np.minimum(tail, given[-1])
    return np.concatenate([given, tail])


def of_any_pair(children: int = CHILDREN, depth: int = DEPTH) -> np.ndarray:
    """Acceptance, fp64 [depth, child], to assume for models that were not measured: that of the shipped pair.

    Acceptance rises with depth, because tokens after accepted ones are easier. With the shipped pair and its head, each
    depth has about a twentieth fewer misses than the one above it.
    """
    vector = with_tail(DEFAULT_ACCEPTANCE, children)  # [child]
    factors = HARDER ** np.arange(depth)  # of the rate of misses, [depth]
    rows = vector * factors[:, None]
    rows[:, 0] = 1 - factors * (1 - vector[0])
    return rows


BY_A_SAMPLE = 0.65  # acceptance by a sample of the target, relative to that by rejection


class Usual(NamedTuple):
    """How often the target usually accepts the tokens of a kind of draft. Default trees are planned with it.

    first: probability that the root's first child is accepted
    harder: the rate of misses at a depth relative to the depth above; below 1, because tokens after accepted ones are
        easier
    later: how often later children are accepted if the first is not, relative to the shipped pair's
    """

    first: float
    harder: float
    later: float = 1.0

    def by_a_sample(self) -> "Usual":
        """This acceptance, lowered for methods that accept a child only if it equals a sample of the target.

        Rejection accepts about 1.5 times as many.
        """
        return self._replace(first=BY_A_SAMPLE * self.first)

    def rates(self, children: int = CHILDREN, depth: int = DEPTH) -> np.ndarray:
        """Acceptance by depth and child, fp64 [depth, child], as tree planning takes it.

        Later children share the first child's misses in the same proportions as those of the shipped pair.
        """
        shipped = with_tail(DEFAULT_ACCEPTANCE, children)
        misses_of_shipped = 1 - DEFAULT_ACCEPTANCE[0]
        later = self.later * shipped[1:] / misses_of_shipped  # [child - 1], as shares of the misses
        level = np.arange(depth)[:, None]
        misses = (1 - self.first) * self.harder**level  # [depth, 1]
        return np.concatenate([1 - misses, misses * later], axis=1)


# Fitted to the tokens per step of chains in `bench/decoding.py --sweep defaults`: shipped models, temperatures 0, 0.6
# and 1 together.
SMALL_MODEL = Usual(0.63, 0.94)
TRAINED_HEAD = Usual(0.72, 0.93)
# A lookup proposes a token with certainty, or nothing if it finds nothing. Sampled output follows it less often, above
# all at high temperatures. Texts that were written before, in which `Retrieval` and `Recall` look, are followed longer
# than a prompt.
COOL = 0.8  # temperatures below it are as 0.6, others as 1
LOOKUP = Usual(0.45, 0.8, 0.1)
COOL_LOOKUP = Usual(0.27, 0.77, 0.1)
SAMPLED_LOOKUP = Usual(0.2, 1.0, 0.1)
RETRIEVAL = Usual(0.7, 0.92, 0.1)
COOL_RETRIEVAL = Usual(0.33, 0.76, 0.1)


def of_lookup(temperature: float) -> Usual:
    """The usual acceptance of tokens that were found in the prompt or in the output."""
    if temperature == 0:
        return LOOKUP
    if temperature < COOL:
        return COOL_LOOKUP
    return SAMPLED_LOOKUP


def of_retrieval(temperature: float) -> Usual:
    """The usual acceptance of tokens that were found in texts written before."""
    if temperature == 0:
        return RETRIEVAL
    if temperature < COOL:
        return COOL_RETRIEVAL
    return SAMPLED_LOOKUP
