"""Key-value caches that are allocated once, with one row for each token of a sequence.

Rows may be written in any order, and a cache does not count them. The caller knows where a token's row is, and how many
rows of a sequence are in use.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor
from transformers import Cache

from heavypath.kernels.layers.rotary import store_rows
from heavypath.kernels.step_kernels import step_kernels


class RowCache:
    """A cache of two tensors, keys and values [B, heads, rows, D], with one row for each token of a sequence.

    These two tensors are all that is kept of a sequence. The decoder moves rows of both when a path is accepted, and
    whole sequences of both when another sequence has ended. D may be 0, for a draft that keeps nothing.
    """

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys = keys
        self.values = values

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def first(self, slots: int) -> Self:
        """A view of the first `slots` sequences."""
        view = copy(self)
        view.keys = self.keys[:slots]
        view.values = self.values[:slots]
        return view

    def remembered(self) -> list[Tensor]:
        """All tensors with the state of sequences. `swap` and `receive` move entry b of each with sequence b.

        Their shapes: [B, any, rows, any], of which only used rows are moved, [B, any, any], [B, any] or [B].
        """
        return [self.keys, self.values]

    def swap(self, one: int, other: int, rows: int | None = None) -> None:
        """Exchange the state of the sequences number `one` and `other`; rows: the first ones, in use (default: all)."""
        for field in self.remembered():
            used = field[:, :, :rows] if field.dim() == 4 else field
            kept = used[one].clone()
            used[one] = used[other]
            used[other] = kept

    def receive(self, sequence: int, source: "RowCache", of: int, rows: int) -> None:
        """Copy sequence `of` of the cache `source` to `sequence` of this cache.

        source: a cache of the same model or draft; it may be this one
        rows: how many rows of the copied sequence are in use; the content of later rows is undefined
        """
        for own, other in zip(self.remembered(), source.remembered(), strict=True):
            copied = other[of]
            if own.dim() <= 2:
                own[sequence] = copied
                continue
            used = rows if own.dim() == 4 else len(copied)  # the other cache may have fewer rows
            own[sequence, ..., :used, :] = copied[..., :used, :]

    def begin(self, lengths: Tensor) -> None:
        """Forget the sequences of earlier generations. Called before each generation.

        lengths: LongTensor[B], the number of tokens before each root

        This does nothing, because rows are overwritten before a query sees them. Caches with other state override it.
        """

    def accept(self, path: Tensor, length: Tensor, prefix_length: Tensor, node_rows: Tensor | None = None) -> None:
        """Move the rows of an accepted path to directly after the prefix.

        path: LongTensor[B, P], node numbers: the root, the accepted nodes, then anything
        length: LongTensor[B], the number of accepted nodes, without the root
        prefix_length: LongTensor[B], rows before the tree
        node_rows: LongTensor[B, N], the row of each node after the prefix, where it differs from the node's number
        """
        rows = path
        if node_rows is not None:
            nodes = path.clamp(min=0)
            rows = node_rows.gather(1, nodes)
        kernels = step_kernels(path.device)
        kernels.compact([self.keys, self.values], rows, length, prefix_length)

    def advance(self, path: Tensor, produced: Tensor, node_rows: Tensor | None = None) -> None:
        """Update state that is not stored in rows, once in each step, after `accept`. Here there is none.

        path, node_rows: as in `accept`
        produced: LongTensor[B], the number of new tokens of each sequence so far
        """

    def reads_to(self, lengths: Tensor) -> None:
        """Announce a prefill: it will fill each sequence's rows up to number `lengths`, LongTensor[B], then padding.

        This does nothing. Caches with recurrent state override it, because they must not read padding.
        """

    def take(self, sequence: int, source: "RowCache", of: int, rows: int) -> int:
        """Copy the first `rows` rows of sequence `of` of another cache to `sequence`; returns the number copied."""
        for own, other in ((self.keys, source.keys), (self.values, source.values)):
            copied = other[of, :, :rows]
            own[sequence, :, :rows] = copied
        return rows

    def trimmed_bytes(self, slots: slice, rows: int) -> int:
        """The size in bytes of the result of `trimmed`."""
        return self._part(slots, rows).nbytes

    def trimmed(self, slots: slice, rows: int) -> "RowCache":
        """A copy of the first `rows` rows of the sequences in these slots."""
        part = self._part(slots, rows)
        return RowCache(part.keys.clone(), part.values.clone())

    def _part(self, slots: slice, rows: int) -> "RowCache":
        """A view of the first `rows` rows of the sequences in these slots."""
        keys = self.keys[slots, :, :rows]
        values = self.values[slots, :, :rows]
        return RowCache(keys, values)


class KeyValueCache(RowCache, Cache):
    """Keys and values [B, layers * Hkv, rows, D]. Layers lie side by side, so one gather moves a row of all layers.

    The cache is filled with zeros at first, so that rows never written can be masked. `rotary` [positions, 2, D] has
    cosine and sine of the positions that rows may have, for a forward pass that looks them up (see `LlamaForward`).

    All layers keep all rows. A layer with a sliding window keeps them too, but reads no more than the window.

    For transformers' own forward pass `at(cache_rows, visible_rows)` is the cache of one call, with a 4-D mask over
    the visible rows. `offsets` LongTensor[B, 1] are added to positions, which differ from row numbers after images.
    """

    def __init__(
        self,
        batch: int,
        layers: int,
        kv_heads: int,
        rows: int,
        head_dim: int,
        like: Tensor,
        rotary: Tensor | None = None,
    ):
        keys = like.new_zeros(batch, layers * kv_heads, rows, head_dim)
        values = torch.zeros_like(keys)
        RowCache.__init__(self, keys, values)
        Cache.__init__(self, layers=[])
        self.rotary = rotary
        self.offsets = torch.zeros(batch, 1, dtype=torch.long, device=like.device)
        self._kv_heads = kv_heads
        self._new_rows: Tensor | None = None
        self._visible_rows = rows
        self._first_rows: Sequence[int] = ()
        self._by_layer = self._split()

    def _split(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [B, Hkv, rows, D] of each layer."""
        layers = []
        for first in range(0, self.keys.shape[1], self._kv_heads):
            heads = slice(first, first + self._kv_heads)
            keys = self.keys[:, heads]
            values = self.values[:, heads]
            layers.append((keys, values))
        return layers

    def first(self, slots: int) -> Self:
        """A view of the first `slots` sequences."""
        view = super().first(slots)
        view._by_layer = view._split()
        view.offsets = self.offsets[:slots]
        return view

    def remembered(self) -> list[Tensor]:
        """The tensors that are moved with a sequence: keys, values and position offsets."""
        return [self.keys, self.values, self.offsets]

    def begin(self, lengths: Tensor) -> None:
        """Set all position offsets to 0, as in sequences without images."""
        self.offsets.zero_()

    def write(self, layer: int, key: Tensor, value: Tensor, cache_rows: Tensor) -> None:
        """Store a layer's key and value [B, N, Hkv, d] at cache rows LongTensor[B, N].

        d may be less than the cache's D. Then only the first d columns of each row are written.
        """
        keys, values = self._by_layer[layer]
        store_rows(keys, key, cache_rows)
        store_rows(values, value, cache_rows)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values [B, Hkv, rows, D]."""
        return self._by_layer[layer]

    def at(self, cache_rows: Tensor, visible_rows: int, first_rows: Sequence[int] = ()) -> Self:
        """A view for one forward pass, which writes the rows LongTensor[B, N] and reads the first `visible_rows`.

        first_rows: for each layer, or one number for all: rows before it are not read (default: 0)
        """
        view = copy(self)
        view._new_rows = cache_rows
        view._visible_rows = visible_rows
        view._first_rows = first_rows
        return view

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's states [B, Hkv, N, D], or with fewer columns; return keys and values of the visible rows.

        Only on a view from `at`. Rows are returned from the layer's first one on, with as many columns as were given.
        """
        assert self._new_rows is not None
        key = key_states.transpose(1, 2)  # [B, N, Hkv, D]
        value = value_states.transpose(1, 2)
        self.write(layer_idx, key, value, self._new_rows)
        first = 0
        if self._first_rows:
            number = layer_idx % len(self._first_rows)
            first = self._first_rows[number]
        visible = slice(first, self._visible_rows)
        keys, values = self.read(layer_idx)
        keys = keys[:, :, visible, : key.shape[-1]]
        values = values[:, :, visible, : value.shape[-1]]
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """For transformers: the number of visible rows before the new tokens, at least those of the longest prefix."""
        if self._new_rows is None:
            return self._visible_rows
        return self._visible_rows - self._new_rows.shape[1]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """For transformers' masks: the number of visible rows, and the number of the first one, which is 0."""
        return self._visible_rows, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """For transformers: the number of rows of each sequence."""
        return self.keys.shape[2]

    def __len__(self) -> int:
        return self.keys.shape[1] // self._kv_heads
