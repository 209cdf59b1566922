"""A corpus sorted by contexts, so that all positions with the same preceding tokens are one range (an FM-index).

N tokens, with 0 between texts, form a ring. Entry i is a position of the ring. The entries are sorted by the tokens
before their positions, the nearest token first, up to M tokens back:

    followers[i]    the token at the position of entry i
    steps           (t, i) for all entries, sorted, where t = followers[i]; stored as numbers t N + i

Let the entries whose context ends with some k < M tokens be [lo, hi). Those whose context ends with these tokens and
then t are the positions after the entries in [lo, hi) that t follows, in the same order. They are one range, too
(Ferragina and Manzini 2000, "Opportunistic data structures with applications", sec. 3.1, backward search):

    [lo', hi') = [LF(t, lo), LF(t, hi))        LF(t, i) = how many steps are less than (t, i)

So a token is appended by two binary searches in one array, for all k together, and the followers of a context are
contiguous. Beyond M tokens the order is arbitrary, so that a few rounds of doubling (Manber and Myers 1993) suffice.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MOST_TOKENS = 2**31 - 1  # limit for the tokens of a corpus


class SortedCorpus(NamedTuple):
    """A sorted corpus. Tokens are stored plus 1, because 0 separates texts.

    followers: IntTensor[N]; steps: LongTensor[N]; both on one device
    """

    followers: Tensor
    steps: Tensor


def sort_corpus(texts: Sequence[np.ndarray], longest: int) -> SortedCorpus:
    """Sort a corpus by the `longest` tokens before each position, or more, on the CPU.

    texts: arrays [any] of integers >= 0, with at least one token in all

    Takes O(N log N log longest) time: about 5 s for 3 million tokens.
    """
    between = np.zeros(1, np.int32)
    ring = np.concatenate([part for text in texts for part in (between, text.astype(np.int32) + 1)])
    length = np.int64(len(ring))
    rank = np.roll(ring, 1).astype(np.int64)  # of a position by the last `known` tokens before it
    known = 1
    while True:
        order = np.argsort(rank)
        if known >= longest:
            break
        sorted_ranks = rank[order]
        rank[order] = np.cumsum(np.append(False, sorted_ranks[1:] != sorted_ranks[:-1]))
        rank = rank * length + np.roll(rank, known)
        known *= 2
    followers = ring[order]
    by_token = np.argsort(followers, kind="stable")
    steps = followers[by_token] * length + by_token
    return SortedCorpus(torch.from_numpy(followers), torch.from_numpy(steps))
