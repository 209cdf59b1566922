"""The slots of growing trees: the data that `growing` and `assembly` hand to each other.

A slot of a tree is a place for the next draw below a node. Slots are numbered in the order in which they are drafted,
level by level, and the best first. In the draft's cache slot s of a tree has the row s after the prefix.
"""

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.trees.levels import Fed


def host(tensor: Tensor) -> np.ndarray:
    """A tensor's numbers as an array on the host."""
    return tensor.cpu().numpy()


class Slots(NamedTuple):
    """The slots of B growing trees in the order in which they are drafted; [B, S] each. Slot 0 is the root's.

    parents: LongTensor, the slot of the parent, -1 for the root
    ranks:   LongTensor, the node's index among its siblings
    depths:  LongTensor
    tokens:  LongTensor, -1 where the slot stays empty
    values:  fp64, 0 where the slot stays empty, +inf for the root
    worths:  fp64, of the node; by "beam" the log-probability of its path
    keys:    fp64, by "beam" the node's key, else undefined
    """

    parents: Tensor
    ranks: Tensor
    depths: Tensor
    tokens: Tensor
    values: Tensor
    worths: Tensor
    keys: Tensor

    @classmethod
    def room_for(cls, batch: int, slots: int, device: torch.device) -> "Slots":
        """Memory for so many slots of each of `batch` trees."""
        parents, ranks, depths, tokens = torch.empty(4, batch, slots, dtype=torch.long, device=device)
        values, worths, keys = torch.empty(3, batch, slots, dtype=torch.float64, device=device)
        return cls(parents, ranks, depths, tokens, values, worths, keys)


class Roots(NamedTuple):
    """The beginning of each sequence's tree; LongTensor[B] each.

    tokens:     the root's
    lengths:    cache rows before the tree
    noise_rows: the noise row of slot 0; that of slot s is s more
    left:       tokens that the sequence may still write; at depth `left` and deeper all slots stay empty
    """

    tokens: Tensor
    lengths: Tensor
    noise_rows: Tensor
    left: Tensor


class Policy(NamedTuple):
    """The way in which slots are chosen.

    by:          "slot", "node" or "beam", see the top of this file
    width:       slots of a level, at most
    threshold:   slots of less value stay empty
    noisy:       whether tokens are drawn at a temperature above 0; if not, `draws.logprobs` are not those of values
    temperature: of the probabilities that values are made of, above 0
    lines:       fp64 [2, >= K], base_k and slope_k of a confidence; None for DySpec's values
    """

    by: Literal["slot", "node", "beam"]
    width: int
    threshold: float
    noisy: bool
    temperature: float
    lines: Tensor | None


class Level(NamedTuple):
    """The slots first .. first + size - 1 of all trees: nodes of one depth, the last drafted.

    mask: bool [B, size, first + size], which slots each of them sees, itself among them
    """

    first: int
    size: int
    depth: int
    mask: Tensor

    @property
    def end(self) -> int:
        """The first slot of the level below."""
        return self.first + self.size


class Grown(NamedTuple):
    """A new level, and what the draft is given of it."""

    level: Level
    fed: Fed
