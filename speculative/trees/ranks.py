"""How many tokens per step a tree yields on measured sequences, from the ranks of their tokens.

A token's rank is the index of the draft's child that has it. A step begins at a token of the sequence: the tree's root
is the token before it. The step accepts the tokens whose ranks lead from the root down the tree, and ends with the
token after these. The next step begins after that one. So a tree yields

    tokens / steps = (end of the last step) / (number of steps)

on a sequence, without any assumption about how ranks depend on each other. Only steps are counted that begin so early
that the longest possible one fits into the sequence. Then by Wald's identity the ratio is not biased by the end of the
sequence.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from heavypath.speculative.trees.tree import TokenTree

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NONE = -1  # a rank: no child was accepted
UNKNOWN = -2  # a rank: none was offered


def children_of(tree: TokenTree, device: "torch.device | str" = "cpu") -> "Tensor":
    """The number of child j of each node, LongTensor[N, J]; 0 if there is no such child. J is at least 1."""
    import torch

    table = torch.zeros(len(tree), max(1, int(tree.ranks.max()) + 1), dtype=torch.long, device="cpu")
    table[tree.parents[1:].long(), tree.ranks[1:].long()] = torch.arange(1, len(tree), device="cpu")
    return table.to(device)


def steps_of(tree: TokenTree, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """Replay steps with a tree along measured sequences. Returns steps and their tokens on each, int64 [texts, 2].

    texts: for each sequence the rank of each token: which child of the draft it was. A token ends a step if the tree
        has no such child, or if its rank is NONE or UNKNOWN
    """
    table = children_of(tree).numpy()
    lengths = np.array([len(text) for text in texts])
    ranks = np.full((len(texts), lengths.max(initial=0)), UNKNOWN)
    for row, text in zip(ranks, texts, strict=True):
        row[: len(text)] = text
    last = np.maximum(1, lengths - tree.depth)  # steps that begin before this index are counted
    node = np.zeros(len(texts), np.int64)
    counted = np.zeros((len(texts), 2), np.int64)
    going = np.zeros(len(texts), bool)
    for place, column in enumerate(ranks.T):
        begins = (node == 0) & (place < last)
        going = begins | (going & (node > 0))
        counted[:, 0] += begins
        counted[:, 1] += going & (place < lengths)
        known = (column >= 0) & (column < table.shape[1])
        node = np.where(known, table[node, np.where(known, column, 0)], 0)
    return counted
