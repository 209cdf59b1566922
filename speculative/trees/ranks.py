"""Tokens that a tree brings of texts, by their ranks: which child of the draft each token of a text is.

A step begins at a token of the text, the root of the tree being the token before it. It accepts the tokens whose ranks
lead from the root down the tree, and ends with the token after these. The next step begins behind that. So a tree
brings

    tokens / steps = (end of the last step) / (steps that began)

of a text, without any assumption about how ranks follow each other. Steps are counted if they begin so early that the
text holds the longest one to its end. Then by Wald's identity the ratio has no bias from texts that are short.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from heavypath.speculative.trees.tree import TokenTree

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NONE, UNKNOWN = -1, -2  # ranks: no child was accepted; none was offered


def children_of(tree: TokenTree, device: "torch.device | str" = "cpu") -> "Tensor":
    """LongTensor[N, J]: child j of each node, 0 where there is none; J is at least 1."""
    import torch

    table = torch.zeros(len(tree), max(1, int(tree.ranks.max()) + 1), dtype=torch.long, device="cpu")
    table[tree.parents[1:].long(), tree.ranks[1:].long()] = torch.arange(1, len(tree), device="cpu")
    return table.to(device)


def steps_of(tree: TokenTree, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """The steps that a tree takes for each text, and the tokens they bring: int64 [texts, 2].

    texts: ranks; a token whose rank is UNKNOWN ends a step, as one that no child is does.
    """
    table = children_of(tree).numpy()
    lengths = np.array([len(text) for text in texts])
    ranks = np.full((len(texts), lengths.max(initial=0)), UNKNOWN)
    for row, text in zip(ranks, texts, strict=True):
        row[: len(text)] = text
    last = np.maximum(1, lengths - tree.depth)  # steps that begin before it are counted
    node, counted = np.zeros(len(texts), np.int64), np.zeros((len(texts), 2), np.int64)
    going = np.zeros(len(texts), bool)
    for place, column in enumerate(ranks.T):
        begins = (node == 0) & (place < last)
        going = begins | (going & (node > 0))
        counted[:, 0] += begins
        counted[:, 1] += going & (place < lengths)
        known = (column >= 0) & (column < table.shape[1])
        node = np.where(known, table[node, np.where(known, column, 0)], 0)
    return counted
