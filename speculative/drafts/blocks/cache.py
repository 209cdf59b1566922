"""The cache of a block draft: keys and values of the text, which the target's passes write, and a step's own numbers.

Row i belongs to token i, and is made of the target's hidden states of that token alone. So the keys and values of all
nodes of a tree are made when the target has read them, and move as the target's own when a path is accepted. The rows
of a block, after the text's, are overwritten by the next tree.
"""

from typing import Any, Self

import torch
from torch import Tensor

from heavypath.kernels.step_kernels import step_kernels
from heavypath.speculative.models.caches import KeyValueCache


class BlockCache(KeyValueCache):
    """Keys and values [B, layers * Hkv, rows, D], in the rows of the target's cache.

    tokens: LongTensor[B, rows], the token of each row of a text that is read token by token, see `Feed.drafted`
    base:   [B, D + 1, Vd], the logits of the D depths in this step. After them -inf, for nodes that are deeper
    hidden: [B, D + 1, H], the rows of the block that they are of; of no columns for a draft whose laws do not read them
    state:  [B, rows, s], of the nodes of the tree, where a law depends on the path
    """

    _OF_A_STEP = ("tokens", "base", "hidden", "state")

    def __init__(self, base: Tensor, rows: int, columns: tuple[int, int], **keys_and_values: Any):
        """columns: H and s; keys_and_values: the other arguments of `KeyValueCache`."""
        super().__init__(batch=len(base), rows=rows, **keys_and_values)
        self.base = base
        self.hidden = self.keys.new_zeros(*base.shape[:2], columns[0])
        self.state = self.keys.new_zeros(len(base), rows, columns[1])
        self.tokens = torch.zeros(len(base), rows, dtype=torch.long, device=base.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return super().nbytes + sum(getattr(self, name).nbytes for name in self._OF_A_STEP)

    def first(self, slots: int) -> Self:
        """A view of the first `slots` sequences."""
        view = super().first(slots)
        for name in self._OF_A_STEP:
            setattr(view, name, getattr(self, name)[:slots])
        return view

    def accept(self, path: Tensor, length: Tensor, prefix_length: Tensor, node_rows: Tensor | None = None) -> None:
        """Move the rows of an accepted path, which are the target's whatever the draft's were."""
        step_kernels(path.device).compact([self.keys, self.values], path, length, prefix_length)
