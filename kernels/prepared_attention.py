"""`tree_attention` for all layers of one forward pass: what follows from the mask alone is computed once."""

from collections.abc import Callable

import torch
from torch import Tensor

from heavypath.kernels.implementation import choose_impl
from heavypath.kernels.tree_attention import attend, tree_attention
from heavypath.kernels.tree_masks import attention_bias, interval_mask, pack_ancestors


def prepared_attention(
    *,
    prefix_length: Tensor,
    rows: int,
    dtype: torch.dtype,
    subtree_end: Tensor | None = None,
    ancestor_mask: Tensor | None = None,
    impl: str = "auto",
) -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    """Attention of a tree's nodes as a function of query, key, value and scale.

    The kernel gets its ancestor mask packed; PyTorch gets an additive mask over the first `rows` cache rows.

    prefix_length: LongTensor[B], or [] for all sequences
    rows:          a number of cache rows that holds the longest prefix and its tree
    dtype:         of queries, keys and values
    subtree_end, ancestor_mask, impl: as in `tree_attention`
    """
    impl = choose_impl("prepared_attention", impl, prefix_length)
    if impl == "triton":
        packed = None if ancestor_mask is None else pack_ancestors(ancestor_mask)

        def attend_by_kernel(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            visible = {"prefix_length": prefix_length, "subtree_end": subtree_end, "ancestor_mask": packed}
            return tree_attention(query, key, value, **visible, scale=scale, impl="triton")

        return attend_by_kernel

    if ancestor_mask is None:
        assert subtree_end is not None
        ancestor_mask = interval_mask(subtree_end)
    lengths = prefix_length if prefix_length.numel() > 1 else int(prefix_length)
    alone = ancestor_mask.shape[-2:] == (1, 1) and isinstance(lengths, int) and rows == lengths + 1
    bias = None if alone else attention_bias(ancestor_mask, lengths, rows, dtype)
    return lambda query, key, value, scale: attend(query, key[:, :, :rows], value[:, :, :rows], bias, scale)
