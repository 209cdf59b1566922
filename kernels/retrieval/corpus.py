"""A corpus sorted by its contexts, so that all places with the same tokens before them are one range.

N tokens, 0 between texts, lie on a ring. Entry i is a place of the ring; the entries are sorted by the tokens before
their places, the nearest first, as far as M tokens back:

    followers[i]    the token at the place of entry i
    steps           (t, i) for all entries, sorted, where t = followers[i]; as numbers t N + i

Let the entries after some k < M tokens be those in [lo, hi). The entries after these tokens and t are, in their order,
the next places of those entries that t follows. They, too, are one range (Burrows and Wheeler 1994; Ferragina and
Manzini 2000, "Opportunistic data structures with applications", sec. 3.1, backward search):

    [lo', hi') = [LF(t, lo), LF(t, hi))        LF(t, i) = how many steps are less than (t, i)

So a token is appended by two binary searches in one array, for every k at once, and what followed is read side by side.
Beyond M tokens the order does not matter, so that a few rounds of doubling (Manber and Myers 1993) sort a corpus.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MOST_TOKENS = 2**31 - 1  # of a corpus


class SortedCorpus(NamedTuple):
    """A corpus, sorted. Tokens are numbered from 1 here, because 0 is between texts.

    followers: IntTensor[N]; steps: LongTensor[N]; both on one device
    """

    followers: Tensor
    steps: Tensor


def sort_corpus(texts: Sequence[np.ndarray], longest: int) -> SortedCorpus:
    """The corpus of these texts, on the CPU, sorted by the `longest` tokens before each place, or by more.

    texts: integers >= 0 [any] each, at least one token in all

    It takes O(N log N log longest) time: about 5 s for 3 million tokens.
    """
    between = np.zeros(1, np.int32)
    ring = np.concatenate([part for text in texts for part in (between, text.astype(np.int32) + 1)])
    length = np.int64(len(ring))
    rank, known = np.roll(ring, 1).astype(np.int64), 1  # by the tokens before a place, of which `known` are told apart
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
