"""What a draft is asked: the nodes of a growing tree that it is to look at next."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Feed:
    """n nodes of each sequence's tree, given to a draft at once; B sequences. Its tensors are to be read only.

    A step's first feed has n = 2: the last committed token, which is the tree's root, and the token before it, whose
    row may not have been written yet. Every later feed has the nodes of one level. In a text of one token the root is
    given twice.

    tokens, positions: LongTensor[B, n]; a position is a token's place in its text, without padding
    cache_rows:     LongTensor[B, n], where the draft's cache keeps each node: to be written by the draft
    parent_rows:    LongTensor[B, n], the cache rows of the tokens before them; -1 before the text
    prefix_lengths: LongTensor[B], cache rows before the tree: they hold the text before the root
    visible_rows:   cache rows that hold the longest prefix and its tree
    ancestor_mask:  bool [n, M] or [B, n, M], which of the tree's first M nodes each node sees, itself among them; the
                    tree's node m has cache row prefix_lengths + m
    news:           of a step's first feed, how many of the text's last tokens may be new since the last step, at most,
                    the root among them; 0 of later ones
    levels:         of a step's first feed, how many the step drafts
    level:          of the nodes: 0 for the root's
    drafted:        of a first feed, LongTensor[B]: how many of the text's last tokens are to count as drafted nodes,
                    whose features a head does not know; None for 0. Acceptance is measured so, at any depth of a tree
    """

    tokens: Tensor
    positions: Tensor
    cache_rows: Tensor
    parent_rows: Tensor
    prefix_lengths: Tensor
    visible_rows: int
    ancestor_mask: Tensor
    news: int = 0
    levels: int = 0
    drafted: Tensor | None = None
    level: int = 0
