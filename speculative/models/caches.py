"""Caches that are allocated once, with a row for each token of a text.

Rows may be written in any order, and a cache does not count them. The caller knows where a token's row is, and how many
rows of a sequence are in use.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor
from transformers import Cache

from heavypath.kernels.cache_compaction import compact_unchecked
from heavypath.kernels.layers.rotary import store_rows


class RowCache:
    """keys and values [B, heads, rows, D], with a row for each token of a text.

    A text is remembered in these two tensors alone. The decoder moves rows of both when a path is accepted, and whole
    sequences of both when another one has ended. D may be 0, for a draft that remembers nothing.
    """

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys, self.values = keys, values

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def first(self, slots: int) -> Self:
        """A view of the first `slots` sequences."""
        view = copy(self)
        view.keys, view.values = self.keys[:slots], self.values[:slots]
        return view

    def remembered(self) -> list[Tensor]:
        """The tensors [B, any, rows, any], [B, rows or any, any], [B, any] or [B] with all there is of a sequence."""
        return [self.keys, self.values]

    def swap(self, one: int, other: int, rows: int | None = None) -> None:
        """Exchange all that is remembered of two sequences; of their rows the first ones, if they are so many."""
        for field in self.remembered():
            used = field[:, :, :rows] if field.dim() == 4 else field
            kept = used[one].clone()
            used[one] = used[other]
            used[other] = kept

    def receive(self, sequence: int, source: "RowCache", of: int, rows: int) -> None:
        """Remember as `sequence` what another cache of the same draft or model, or this one, remembers of `of`.

        rows: how many rows of it are in use. Nothing is said of those after them.
        """
        for own, other in zip(self.remembered(), source.remembered(), strict=True):
            if own.dim() > 2:
                used = rows if own.dim() == 4 else other.shape[1]  # of a cache that may have fewer rows
                own[sequence][..., :used, :] = other[of][..., :used, :]
            else:
                own[sequence] = other[of]

    def begin(self, lengths: Tensor) -> None:
        """Forget all former texts. Called before a generation, with the tokens before each root, LongTensor[B].

        Nothing is to be done for the rows, which are overwritten before they are read.
        """

    def accept(self, path: Tensor, length: Tensor, prefix_length: Tensor, node_rows: Tensor | None = None) -> None:
        """Move the rows of an accepted path after the prefix, see `kernels.cache_compaction`.

        path: LongTensor[B, P], the root, accepted nodes, then anything; length: LongTensor[B], accepted nodes
        prefix_length: LongTensor[B], rows before the tree
        node_rows: LongTensor[B, N], the row of each node after the prefix, where it is not the node's own number
        """
        rows = path
        if node_rows is not None:
            rows = node_rows.gather(1, path.clamp(min=0))
        compact_unchecked([self.keys, self.values], path=rows, length=length, prefix_length=prefix_length)

    def advance(self, path: Tensor, produced: Tensor, node_rows: Tensor | None = None) -> None:
        """Move on what is no row, in each step; produced: LongTensor[B], new tokens of each text so far."""

    def reads_to(self, lengths: Tensor) -> None:
        """Know that a prefill goes on with texts, to read so many tokens of each, LongTensor[B]; padding follows."""

    def take(self, sequence: int, source: "RowCache", of: int, rows: int) -> int:
        """Copy up to `rows` first rows of sequence `of` of another cache to `sequence`; returns how many it can be."""
        for own, other in ((self.keys, source.keys), (self.values, source.values)):
            own[sequence, :, :rows] = other[of, :, :rows]
        return rows

    def trimmed_bytes(self, slots: slice, rows: int) -> int:
        """Bytes that `trimmed` takes."""
        return self.keys[slots, :, :rows].nbytes + self.values[slots, :, :rows].nbytes

    def trimmed(self, slots: slice, rows: int) -> "RowCache":
        """A copy of the first `rows` rows of the sequences in these slots."""
        return RowCache(self.keys[slots, :, :rows].clone(), self.values[slots, :, :rows].clone())


class KeyValueCache(RowCache, Cache):
    """Keys and values [B, layers * Hkv, rows, D]: the layers lie side by side, so that one gather moves a row of all.

    Filled with zeros at first, so that rows never written can be masked. `rotary` [positions, 2, D] are cosine and sine
    of the positions that the rows may have, for a forward pass that looks them up (see `LlamaForward`).

    All layers keep all rows, those with a sliding window, too, though they read no more than the window.

    For transformers' own forward pass `at(cache_rows, visible_rows)` is the cache of one call, with a 4-D mask over
    the visible rows. `offsets` LongTensor[B, 1] are added to positions, which go on elsewhere after images.
    """

    def __init__(
        self, batch: int, layers: int, kv_heads: int, rows: int, head_dim: int, like: Tensor,
        rotary: Tensor | None = None,
    ):  # fmt: skip
        keys = like.new_zeros(batch, layers * kv_heads, rows, head_dim)
        RowCache.__init__(self, keys, torch.zeros_like(keys))
        Cache.__init__(self, layers=[])
        self.rotary, self.offsets = rotary, torch.zeros(batch, 1, dtype=torch.long, device=like.device)
        self._kv_heads = kv_heads
        self._new_rows: Tensor | None = None
        self._visible_rows = rows
        self._first_rows: Sequence[int] = ()
        self._by_layer = self._split()

    def _split(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [B, Hkv, rows, D] of each layer."""
        heads = [slice(first, first + self._kv_heads) for first in range(0, self.keys.shape[1], self._kv_heads)]
        return [(self.keys[:, own], self.values[:, own]) for own in heads]

    def first(self, slots: int) -> Self:
        """A view of the first `slots` sequences."""
        view = super().first(slots)
        view._by_layer, view.offsets = view._split(), self.offsets[:slots]
        return view

    def remembered(self) -> list[Tensor]:
        """See `RowCache.remembered`."""
        return [self.keys, self.values, self.offsets]

    def begin(self, lengths: Tensor) -> None:
        """See `RowCache.begin`."""
        self.offsets.zero_()

    def write(self, layer: int, key: Tensor, value: Tensor, cache_rows: Tensor) -> None:
        """Store a layer's key and value [B, N, Hkv, D], or of fewer columns, at cache rows LongTensor[B, N]."""
        for own, new in zip(self._by_layer[layer], (key, value), strict=True):
            store_rows(own, new, cache_rows)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values [B, Hkv, rows, D]."""
        return self._by_layer[layer]

    def at(self, cache_rows: Tensor, visible_rows: int, first_rows: Sequence[int] = ()) -> Self:
        """A view for one forward pass, which writes the rows LongTensor[B, N] and reads the first `visible_rows`.

        first_rows: of each layer, or of all layers if it is one number: rows before it are not read (default: 0)
        """
        view = copy(self)
        view._new_rows, view._visible_rows, view._first_rows = cache_rows, visible_rows, first_rows
        return view

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's states [B, Hkv, N, D], or of fewer columns; return keys and values of the visible rows."""
        assert self._new_rows is not None
        self.write(layer_idx, key_states.transpose(1, 2), value_states.transpose(1, 2), self._new_rows)
        first = self._first_rows[layer_idx % len(self._first_rows)] if self._first_rows else 0
        keys, values = (states[:, :, first : self._visible_rows] for states in self.read(layer_idx))
        return keys[..., : key_states.shape[-1]], values[..., : value_states.shape[-1]]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Visible rows before the new tokens: as many as the longest sequence has, or more."""
        return self._visible_rows - (0 if self._new_rows is None else self._new_rows.shape[1])

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The number of rows that `update` returns, and the first of them."""
        return self._visible_rows, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The number of rows."""
        return self.keys.shape[2]

    def __len__(self) -> int:
        return self.keys.shape[1] // self._kv_heads
