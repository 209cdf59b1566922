"""What a draft is asked: the nodes of a growing tree that it is to look at next."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Feed:
    """n nodes of each sequence's tree, given to a draft at once; B sequences.

    tokens, positions: LongTensor[B, n]
    cache_rows:     LongTensor[B, n], where the draft's cache keeps each node
    parent_rows:    LongTensor[B, n], the cache rows of the tokens before them; -1 before the text
    prefix_lengths: LongTensor[B], cache rows before the tree
    visible_rows:   cache rows that hold the longest prefix and its tree
    ancestor_mask:  bool [n, M] or [B, n, M], which of the tree's first M nodes each node sees
    """

    tokens: Tensor
    positions: Tensor
    cache_rows: Tensor
    parent_rows: Tensor
    prefix_lengths: Tensor
    visible_rows: int
    ancestor_mask: Tensor
