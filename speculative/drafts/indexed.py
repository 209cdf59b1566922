"""The cache of a draft that looks up tokens in its own sequence, with an index for the compiled kernels."""

from typing import Self

import torch
from torch import Tensor

from heavypath.kernels.native.library import library
from heavypath.kernels.native.retrieval import Index, Sought
from heavypath.speculative.drafts.draft import Feed
from heavypath.speculative.models.caches import RowCache
from heavypath.speculative.models.forward import host_can_read


class IndexedCache(RowCache):
    """Keys and values [B, heads, rows, M] of sequences, and an index on the CPU of the rows in which each token occurs.

    With the index, compiled code finds earlier occurrences of a token without reading all rows.
    """

    def __init__(self, keys: Tensor, values: Tensor, vocab_size: int):
        super().__init__(keys, values)
        batch, _, rows, _ = keys.shape
        self.index = Index(
            known=torch.zeros(batch, dtype=torch.long, device="cpu"),
            latest=torch.empty(batch, vocab_size, dtype=torch.int32, device="cpu"),
            earlier=torch.empty(batch, 1, rows, 1, dtype=torch.int32, device="cpu"),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of rows and index."""
        return super().nbytes + sum(field.nbytes for field in self.index)

    def begin(self, lengths: Tensor) -> None:
        """Clear the index for new sequences. lengths: ignored, since the kernels add rows when they read."""
        self.index.known.zero_()

    def first(self, slots: int) -> Self:
        """A view of the first `slots` sequences."""
        view = super().first(slots)
        view.index = Index(*(field[:slots] for field in self.index))
        return view

    def remembered(self) -> list[Tensor]:
        """All tensors with the state of sequences, which `RowCache.swap` and `receive` move with a sequence."""
        return [*super().remembered(), *self.index]

    def with_nodes(self, feed: Feed) -> Sought:
        """The arguments of the compiled lookup for the nodes of a feed: the nodes, this cache's rows, and the index."""
        return Sought(
            tokens=feed.tokens,
            cache_rows=feed.cache_rows,
            parent_rows=feed.parent_rows,
            lengths=feed.prefix_lengths,
            keys=self.keys,
            values=self.values,
            known_rows=self.index,
        )


def text_cache(keys: Tensor, values: Tensor, vocab_size: int) -> RowCache:
    """A cache of keys and values [B, heads, rows, M] of sequences: an `IndexedCache` where compiled code reads it."""
    if host_can_read(keys.device) and library() is not None:
        return IndexedCache(keys, values, vocab_size)
    return RowCache(keys, values)
