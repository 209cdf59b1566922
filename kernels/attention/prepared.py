"""`tree_attention` for all layers of one forward pass; what depends only on the mask is computed once."""

from collections.abc import Callable

import torch
from torch import Tensor

from heavypath.kernels.attention.masks import PackedAncestors, attention_bias, interval_mask, pack_ancestors
from heavypath.kernels.implementation import choose_impl
from heavypath.kernels.tree_attention import attend, tree_attention


def prepared_attention(
    *,
    prefix_length: Tensor,
    rows: int,
    dtype: torch.dtype,
    subtree_end: Tensor | None = None,
    ancestor_mask: Tensor | PackedAncestors | None = None,
    window: int | None = None,
    impl: str = "auto",
) -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    """Return attention of a tree's nodes as a function of query, key, value and scale.

    The kernel's ancestor mask is packed and narrowed to the window. PyTorch's additive mask covers the first `rows`
    cache rows, with a window only from the first row that any sequence sees.

    prefix_length: LongTensor[B], or [] for all sequences
    rows:          a number of cache rows that is enough for the longest prefix and its tree
    dtype:         of queries, keys and values
    subtree_end, ancestor_mask, window, impl: as in `tree_attention`; a packed mask only for its kernel and its window
    """
    impl = choose_impl("prepared_attention", impl, prefix_length)
    if ancestor_mask is None and (impl == "torch" or window is not None):
        assert subtree_end is not None
        ancestor_mask = interval_mask(subtree_end)
        subtree_end = None
    if impl == "triton":
        packed = ancestor_mask
        if isinstance(packed, Tensor):
            packed = pack_ancestors(packed, window)

        def attend_by_kernel(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            visible = {"prefix_length": prefix_length, "subtree_end": subtree_end, "ancestor_mask": packed}
            return tree_attention(query, key, value, **visible, window=window, scale=scale, impl="triton")

        return attend_by_kernel

    assert isinstance(ancestor_mask, Tensor), "words are the kernel's"
    lengths = prefix_length if prefix_length.numel() > 1 else int(prefix_length)
    first = first_row_seen(prefix_length, window)
    alone = ancestor_mask.shape[-2:] == (1, 1) and isinstance(lengths, int) and rows == lengths + 1
    bias = None
    if not alone or window is not None:
        bias = attention_bias(ancestor_mask, lengths - first, rows - first, dtype, window)
    return lambda query, key, value, scale: attend(query, key[:, :, first:rows], value[:, :, first:rows], bias, scale)


def first_row_seen(prefix_length: Tensor, window: int | None) -> int:
    """Return a cache row before which no query sees anything; 0 unless the host can read the lengths."""
    if window is None or prefix_length.device.type != "cpu":
        return 0
    return max(0, int(prefix_length.min()) - window)  # a query may be as far up as the last row of the prefix
