"""Data of growing trees that `growing` passes to `assembly`: slots, roots, the growth policy, and levels.

A slot of a tree is a place for one more child of a node. Slots are numbered in the order in which they are drafted,
level by level, and within a level the best first. In the draft's cache slot s of a tree has the row s after the prefix.
"""

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.sampling import TopK


def host(tensor: Tensor) -> np.ndarray:
    """Return a tensor as a NumPy array on the host."""
    return tensor.cpu().numpy()


class Slots(NamedTuple):
    """The S slots of B growing trees, in the order in which they are drafted; [B, S] each. Slot 0 is the root.

    parents: LongTensor, the slot of the parent, -1 for the root
    ranks:   LongTensor, the node's index among its siblings
    depths:  LongTensor
    tokens:  LongTensor, -1 if the slot stays empty
    values:  fp64, 0 if the slot stays empty, +inf for the root
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
        """Allocate memory for `slots` slots of each of `batch` trees."""
        parents, ranks, depths, tokens = torch.empty(4, batch, slots, dtype=torch.long, device=device)
        values, worths, keys = torch.empty(3, batch, slots, dtype=torch.float64, device=device)
        return cls(parents, ranks, depths, tokens, values, worths, keys)

    def check_contiguous(self) -> None:
        """Raise ValueError for a tensor with gaps, which Triton and C++ do not take."""
        for name, field in self._asdict().items():
            if not field.is_contiguous():
                got = f"{name} {[*field.shape]} with strides {[*field.stride()]}"
                raise ValueError(f"slots must be contiguous, as `Slots.room_for` makes them, got {got}")


class Roots(NamedTuple):
    """The root of each sequence's tree; LongTensor[B] each.

    tokens:     the root's token
    lengths:    cache rows before the tree
    noise_rows: the noise row of slot 0; slot s has this row plus s
    left:       tokens that the sequence may still write; at depth `left` and deeper all slots stay empty
    """

    tokens: Tensor
    lengths: Tensor
    noise_rows: Tensor
    left: Tensor


class Policy(NamedTuple):
    """How `growing.grow` chooses slots.

    by:          "slot", "node" or "beam", see the top of `growing`
    width:       slots of a level, at most
    threshold:   slots of less value stay empty
    noisy:       whether tokens are drawn at a temperature above 0; if not, values need other logprobs than the draws'
    temperature: of the probabilities from which values are computed, above 0
    lines:       fp64 [2, >= K], base_k and slope_k of a confidence; None for DySpec's values
    """

    by: Literal["slot", "node", "beam"]
    width: int
    threshold: float
    noisy: bool
    temperature: float
    lines: Tensor | None

    def slots_below(self, draws: TopK) -> int:
        """Return the number of slots of the next level. draws: its candidates, K children of n nodes, [B, n, K]."""
        _, parents, most = draws.tokens.shape
        return self.width if self.by == "beam" else min(self.width, parents * most)


class Level(NamedTuple):
    """The level that was drafted last: slots first .. first + size - 1 of all trees, nodes of one depth.

    mask: bool [B, size, first + size], which slots each of them sees, itself included
    """

    first: int
    size: int
    depth: int
    mask: Tensor

    @property
    def end(self) -> int:
        """The first slot of the level below."""
        return self.first + self.size
