"""The cache of an EAGLE head: keys and values of entries, and the target's features of each token.

Row i of the keys and values belongs to entry i, which is computed from the target's features of token i and from token
i + 1. So the root of a tree, token L, is in row L - 1, and every node is one row earlier than in the target's cache.
Row i of features and tokens belongs to token i.
"""

from copy import copy
from typing import Any, Self

import torch
from torch import Tensor

from heavypath.kernels.layers.rotary import store_rows
from heavypath.kernels.step_kernels import step_kernels
from heavypath.speculative.models.caches import KeyValueCache, RowCache


class HeadCache(KeyValueCache):
    """Keys and values of entries [B, layers * Hkv, rows, D], and what entries are computed from.

    features: [B, 1, rows, F], the features of the target's hidden states
    tokens: LongTensor[B, 1, rows, 1], the token of each row
    outputs: [B, rows, H], in row i what the children of entry i get instead of features
    known: LongTensor[B], number of tokens before the root of the last tree; their entries exist
    """

    _FIELDS = ("keys", "values", "features", "tokens", "outputs", "known")

    def __init__(self, batch: int, rows: int, columns: tuple[int, int], **keys_and_values: Any):
        """columns: F and H; keys_and_values: the other arguments of `KeyValueCache`"""
        super().__init__(batch=batch, rows=rows, **keys_and_values)
        features, width = columns
        self.features = self.keys.new_zeros(batch, 1, rows, features)
        self.outputs = self.keys.new_zeros(batch, rows, width)
        self.tokens = torch.zeros(batch, 1, rows, 1, dtype=torch.long, device=self.keys.device)
        self.known = torch.zeros(batch, dtype=torch.long, device=self.keys.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(field.nbytes for field in self.remembered())

    def keep(self, features: Tensor, tokens: Tensor, cache_rows: Tensor) -> None:
        """Store the features [B, N, F] of tokens LongTensor[B, N] at the rows that the tokens have in the target's
        cache.
        """
        store_rows(self.features, features[:, :, None], cache_rows)
        store_rows(self.tokens, tokens[:, :, None, None], cache_rows)

    def begin(self, lengths: Tensor) -> None:
        """Mark all tokens before the roots as known, because prefill computes their entries; lengths: LongTensor[B]."""
        self.known.copy_(lengths)

    def accept(self, path: Tensor, length: Tensor, prefix_length: Tensor, node_rows: Tensor | None = None) -> None:
        """Move features and tokens of an accepted path; arguments as in `RowCache.accept`. Entries are not moved.

        The path's entries are computed again in the next step: they were computed from the head's own outputs, and must
        be computed from the target's features.
        """
        for rows in (self.features, self.tokens):
            step_kernels(path.device).compact([rows], path, length, prefix_length)

    def first(self, slots: int) -> Self:
        """A view of the first `slots` sequences."""
        view = super().first(slots)
        for name in self._FIELDS:
            setattr(view, name, getattr(self, name)[:slots])
        return view

    def remembered(self) -> list[Tensor]:
        """All tensors with the state of sequences, which `RowCache.swap` and `receive` move with a sequence."""
        return [getattr(self, name) for name in self._FIELDS]

    def take(self, sequence: int, source: RowCache, of: int, rows: int) -> int:
        """Copy the first `rows` rows of sequence `of` of another head's cache to `sequence`; returns `rows`.

        Keys, values, features and tokens are copied; `outputs` and `known` are not.
        """
        super().take(sequence, source, of, rows)
        assert isinstance(source, HeadCache)
        for own, other in ((self.features, source.features), (self.tokens, source.tokens)):
            own[sequence, :, :rows] = other[of, :, :rows]
        return rows

    def trimmed(self, slots: slice, rows: int) -> "HeadCache":
        """A copy of the first `rows` rows of the sequences in these slots."""
        copied = copy(self)  # only copied from later; it must not keep this cache's memory alive
        copied._by_layer = []
        copied.outputs = self.outputs[slots, :0].clone()
        for name in ("keys", "values", "features", "tokens"):
            setattr(copied, name, getattr(self, name)[slots, :, :rows].clone())
        copied.known = self.known[slots].clone()
        copied.offsets = self.offsets[slots].clone()
        return copied
