"""The cache of an EAGLE head: entries in the place of tokens, and the target's features of each token.

Row i of the keys and values belongs to entry i, which is made of the target's features of token i and of token i + 1.
So the root of a tree, token L, is in row L - 1, and a node in the row before that of the target's cache. Row i of the
features and tokens is token i's.
"""

from copy import copy
from typing import Any, Self

import torch
from torch import Tensor

from heavypath.kernels.cache_compaction import compact_unchecked
from heavypath.kernels.layers.rotary import store_rows
from heavypath.speculative.models.caches import KeyValueCache, RowCache


class HeadCache(KeyValueCache):
    """Keys and values of entries [B, layers * Hkv, rows, D], and by token what entries are made of.

    features: [B, 1, rows, F], what the head keeps of the target's hidden states
    tokens:   LongTensor[B, 1, rows, 1]
    outputs:  [B, rows, H], of entry i in row i, what the entries below it get in the place of features
    known:    LongTensor[B], tokens before the root when the last tree was drafted: the entries of all those were made
    """

    _FIELDS = ("keys", "values", "features", "tokens", "outputs", "known")

    def __init__(self, batch: int, rows: int, columns: tuple[int, int], **keys_and_values: Any):
        """columns: F and H; keys_and_values: the other arguments of `KeyValueCache`."""
        super().__init__(batch=batch, rows=rows, **keys_and_values)
        features, width = columns
        self.features = self.keys.new_zeros(batch, 1, rows, features)
        self.outputs = self.keys.new_zeros(batch, rows, width)
        self.tokens = torch.zeros(batch, 1, rows, 1, dtype=torch.long, device=self.keys.device)
        self.known = torch.zeros(batch, dtype=torch.long, device=self.keys.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(field.nbytes for field in self.remembered())

    def keep(self, features: Tensor, tokens: Tensor, cache_rows: Tensor) -> None:
        """Keep the features [B, N, F] of tokens LongTensor[B, N] that the target has in these rows of its cache."""
        store_rows(self.features, features[:, :, None], cache_rows)
        store_rows(self.tokens, tokens[:, :, None, None], cache_rows)

    def begin(self, lengths: Tensor) -> None:
        """The prefill makes the entries of all tokens before the roots."""
        self.known.copy_(lengths)

    def accept(self, path: Tensor, length: Tensor, prefix_length: Tensor, node_rows: Tensor | None = None) -> None:
        """Move features and tokens, which are in the target's rows. The path's entries are made anew in the next step.

        They were made of the head's own outputs, and are to be of the target's features.
        """
        for rows in (self.features, self.tokens):
            compact_unchecked([rows], path=path, length=length, prefix_length=prefix_length)

    def first(self, slots: int) -> Self:
        """A view of the first `slots` sequences."""
        view = super().first(slots)
        for name in self._FIELDS:
            setattr(view, name, getattr(self, name)[:slots])
        return view

    def remembered(self) -> list[Tensor]:
        """See `RowCache.remembered`."""
        return [getattr(self, name) for name in self._FIELDS]

    def take(self, sequence: int, source: RowCache, of: int, rows: int) -> int:
        """See `RowCache.take`."""
        super().take(sequence, source, of, rows)
        assert isinstance(source, HeadCache)
        for own, other in ((self.features, source.features), (self.tokens, source.tokens)):
            own[sequence, :, :rows] = other[of, :, :rows]
        return rows

    def trimmed(self, slots: slice, rows: int) -> "HeadCache":
        """A copy of the first `rows` rows of the sequences in these slots."""
        copied = copy(self)  # which is only taken from: it must not keep this cache's memory
        copied._by_layer, copied.outputs = [], self.outputs[slots, :0].clone()
        for name in ("keys", "values", "features", "tokens"):
            setattr(copied, name, getattr(self, name)[slots, :, :rows].clone())
        copied.known, copied.offsets = self.known[slots].clone(), self.offsets[slots].clone()
        return copied
