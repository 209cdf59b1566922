"""Attention from the N nodes of a token tree to a prefix of cached tokens and to their own ancestors.

Node i of a sequence with L prefix tokens sees cache row s when

    s < L                                    the prefix
    j = s - L in [0, N) and j <= i < end[j]  j is i itself or an ancestor of i

for nodes in depth-first order, where the subtree of j is the interval [j, end[j]): the whole mask is one integer per
node. A chain has end = N, so causal prefill, single-token decoding and tree verification are one function. Trees that
still grow, not yet in depth-first order, pass an explicit ancestor mask instead.

    out[i] = sum_s softmax_s(scale * query[i] . key[s] over the visible s) value[s]

A node that sees nothing gets zeros.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    prefix_length: int | Tensor,
    subtree_end: Tensor | None = None,
    ancestor_mask: Tensor | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Attend from tree nodes to the prefix and to their ancestors; returns [B, Hq, N, D].

    query:         [B, Hq, N, D]
    key, value:    [B, Hkv, S, D] of the same dtype, Hq a multiple of Hkv; the tree's own rows lie at
                   prefix_length .. prefix_length + N - 1, rows beyond are ignored
    prefix_length: int, or LongTensor[B], one per sequence
    subtree_end:   int or long tensor [N] or [B, N], nodes in depth-first order; or
    ancestor_mask: bool [N, N] or [B, N, N], [i, j] true where j is i or an ancestor of i; exactly one of the two
    scale:         of the scores, default D ** -0.5

    Raises ValueError for shapes, dtypes or options that do not fit and, for an int or CPU prefix_length, if the tree
    does not fit into S rows.
    """
    if query.dim() != 4 or key.dim() != 4 or key.shape != value.shape or query.shape[::3] != key.shape[::3]:
        raise ValueError(
            "expected query [B, Hq, N, D] and key, value [B, Hkv, S, D], "
            f"got {[*query.shape]}, {[*key.shape]} and {[*value.shape]}"
        )
    batch, heads, nodes, _ = query.shape
    kv_heads, rows = key.shape[1:3]
    if heads % kv_heads:
        raise ValueError(f"query heads must be a multiple of key heads, got {heads} and {kv_heads}")
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        raise ValueError(f"expected one floating-point dtype, got {query.dtype}, {key.dtype} and {value.dtype}")
    if (subtree_end is None) == (ancestor_mask is None):
        raise ValueError("give exactly one of subtree_end and ancestor_mask")
    if impl not in ("auto", "torch"):
        raise ValueError(f"tree_attention has impl 'auto' or 'torch', got {impl!r}")

    if subtree_end is not None:
        _check_tree("subtree_end", subtree_end, (nodes,), batch)
        ancestor_mask = interval_mask(subtree_end)
    assert ancestor_mask is not None
    _check_tree("ancestor_mask", ancestor_mask, (nodes, nodes), batch)
    lengths = torch.as_tensor(prefix_length, device=query.device)
    if lengths.dtype != torch.long or lengths.shape not in ((), (batch,)):
        raise ValueError(
            f"prefix_length must be an int or a LongTensor [{batch}], got {lengths.dtype} {[*lengths.shape]}"
        )
    on_host = isinstance(prefix_length, int) or lengths.device.type == "cpu"
    if on_host and batch and (lengths.min() < 0 or lengths.max() + nodes > rows):
        raise ValueError(f"prefix_length + {nodes} nodes must lie in 0 .. {rows}, got prefix_length {prefix_length}")
    return _tree_attention_reference(query, key, value, lengths, ancestor_mask, scale)


def _check_tree(name: str, value: Tensor, shape: tuple[int, ...], batch: int) -> None:
    kinds = (torch.bool,) if name == "ancestor_mask" else (torch.int32, torch.long)
    if value.dtype not in kinds or value.shape not in (shape, (batch, *shape)):
        raise ValueError(
            f"{name} must be {' or '.join(map(str, kinds))} {[*shape]} or {[batch, *shape]}, "
            f"got {value.dtype} {[*value.shape]}"
        )


def interval_mask(subtree_end: Tensor) -> Tensor:
    """bool [..., N, N] from subtree_end [..., N]: [i, j] is true where j <= i < end[j]."""
    index = torch.arange(subtree_end.shape[-1], device=subtree_end.device)
    return (index <= index[:, None]) & (index[:, None] < subtree_end[..., None, :])


def attention_bias(ancestors: Tensor, lengths: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """The additive mask of the formula above: 0 where node i sees cache row s, -inf elsewhere; [B or 1, 1, Q, rows].

    ancestors: bool [Q, N] or [B, Q, N], for the Q nodes that ask; lengths: LongTensor[] or [B], prefix rows.
    """
    return biased_columns(bias_table(ancestors, dtype), table_columns(lengths, ancestors.shape[-1], rows))


def bias_table(ancestors: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask [..., Q, N + 2] by column: 0 the prefix, 1 .. N the tree's nodes, N + 1 whatever lies beyond."""
    table = torch.zeros(ancestors.shape, dtype=dtype, device=ancestors.device).masked_fill_(~ancestors, -torch.inf)
    return pad(pad(table, (1, 0)), (0, 1), value=-torch.inf)


def table_columns(lengths: Tensor, nodes: int, rows: int) -> Tensor:
    """Which of `bias_table`'s columns each cache row is: LongTensor [B or 1, rows]."""
    row = torch.arange(1, rows + 1, device=lengths.device)
    return (row - lengths.reshape(-1, 1)).clamp_(0, nodes + 1)


def biased_columns(table: Tensor, columns: Tensor) -> Tensor:
    """The additive mask [B or 1, 1, Q, rows] of a table [Q, N + 2] or [B, Q, N + 2] at columns [B or 1, rows]."""
    if table.dim() == 2:
        return table[:, columns].transpose(0, 1)[:, None]
    return table.gather(2, columns[:, None].expand(len(table), table.shape[1], -1))[:, None]


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None = None) -> Tensor:
    """Grouped-query attention [B, Hq, N, D] under an additive mask; no mask lets every query see every key."""
    return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale, enable_gqa=True)


def _tree_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, ancestors: Tensor, scale: float | None
) -> Tensor:
    nodes = query.shape[2]
    used = int(lengths.max()) + nodes if lengths.numel() else nodes
    key, value = key[:, :, :used], value[:, :, :used]
    if lengths.dim():  # a shorter sequence's rows beyond its tree may hold anything: 0 * NaN would leak
        beyond = (torch.arange(used, device=key.device) >= lengths[:, None] + nodes)[:, None, :, None]
        key, value = key.masked_fill(beyond, 0), value.masked_fill(beyond, 0)
    bias = attention_bias(ancestors, lengths, used, query.dtype)
    blind = (bias == -torch.inf).all(-1, keepdim=True)
    return attend(query, key, value, bias.masked_fill(blind, 0), scale).masked_fill(blind, 0)
