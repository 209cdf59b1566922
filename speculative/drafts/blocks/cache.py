"""The cache of a block draft: keys and values, which are computed during the target's passes, and a step's logits.

Row i belongs to token i, and is computed from the target's hidden states of this token alone. So the target's pass over
a tree also gives the keys and values of all its nodes. They move like the target's rows when a path is accepted. The
rows of a block come after those of the sequence, and the next tree overwrites them.
"""

from typing import Any, Self

import torch
from torch import Tensor

from heavypath.kernels.step_kernels import step_kernels
from heavypath.speculative.models.caches import KeyValueCache


class BlockCache(KeyValueCache):
    """Keys and values [B, layers * Hkv, rows, D], with each token in the same row as in the target's cache.

    tokens: LongTensor[B, rows], the token of each row; read only if acceptance is measured, see `Feed.drafted`
    base:   [B, D + 1, Vd], the logits of the D depths in this step; the last row is -inf, for deeper nodes
    hidden: [B, D + 1, C], what the term reads of the block's outputs; C = 0 for a draft without a term
    state:  [B, rows, s], the term's state of each node; s = 0 if the term does not depend on the path
    """

    _OF_A_STEP = ("tokens", "base", "hidden", "state")

    def __init__(
        self, base: Tensor, rows: int, columns: tuple[int, int], *, fp32: bool = False, **keys_and_values: Any
    ):
        """base: as above; rows: of each sequence; columns: C and s; fp32: whether `hidden` is fp32.

        keys_and_values: the other arguments of `KeyValueCache`
        """
        super().__init__(batch=len(base), rows=rows, **keys_and_values)
        self.base = base
        like = base if fp32 else self.keys
        self.hidden = like.new_zeros(*base.shape[:2], columns[0])
        self.state = self.keys.new_zeros(len(base), rows, columns[1])
        self.tokens = torch.zeros(len(base), rows, dtype=torch.long, device=base.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return super().nbytes + sum(getattr(self, name).nbytes for name in self._OF_A_STEP)

    def first(self, slots: int) -> Self:
        """A view of the first `slots` sequences."""
        view = super().first(slots)
        for name in self._OF_A_STEP:
            setattr(view, name, getattr(self, name)[:slots])
        return view

    def accept(self, path: Tensor, length: Tensor, prefix_length: Tensor, node_rows: Tensor | None = None) -> None:
        """Move the rows of an accepted path; arguments as in `RowCache.accept`.

        Nodes have the same rows as in the target's cache, so `node_rows` is ignored.
        """
        step_kernels(path.device).compact([self.keys, self.values], path, length, prefix_length)
