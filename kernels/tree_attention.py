"""Attention from the N nodes of a token tree to a prefix of cached tokens and to their own ancestors.

Node i of a sequence with L prefix tokens sees cache row s when

    s < L                                    s is in the prefix, or
    j = s - L in [0, N) and j <= i < end[j]  node j is node i itself or an ancestor of i

for nodes in depth-first order, where the subtree of j is the interval [j, end[j]): the whole mask is one integer per
node. A chain has end = N, so causal prefill, decoding of single tokens and tree verification are one function. A tree
that still grows is not in depth-first order and needs an explicit ancestor mask instead (see `attention.masks`).

    out[i] = sum_s softmax_s(scale * query[i] . key[s] over the visible s) value[s]

The output is 0 for a node that sees nothing. Two options narrow the view. Rows before `first_row` are left padding.
With a sliding window node i, at position L + depth[i], sees only positions above L + depth[i] - window; the position of
a prefix row is its index. `attention.masks` computes this from the mask. Gemma 2's soft cap replaces the scores by
softcap * tanh(scores / softcap).

The Triton kernel and its costs are in `attention.kernel`.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from heavypath.kernels.attention.layouts import (
    Layouts,
    TensorLayout,
    check_kernel_takes,
    check_layouts,
    in_place,
)
from heavypath.kernels.attention.masks import PackedAncestors, Visible, attention_bias
from heavypath.kernels.implementation import call_operator, choose_impl

if TYPE_CHECKING:
    from heavypath.kernels.attention.launch import LaunchPlan

_FEW_QUERIES = 8  # on a CPU, up to this many queries of a group share one matrix product


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    prefix_length: int | Tensor,
    subtree_end: Tensor | None = None,
    ancestor_mask: Tensor | PackedAncestors | None = None,
    first_row: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Attend from tree nodes to the prefix and to their ancestors; returns [B, Hq, N, D].

    query:         [B, Hq, N, D]
    key, value:    [B, Hkv, S, D] of the query's dtype, Hq a multiple of Hkv; the tree's own rows are
                   prefix_length .. prefix_length + N - 1, and rows beyond are never read
    prefix_length: number of prefix rows, an int for all sequences or LongTensor[B]
    subtree_end:   int or long tensor [N] or [B, N], for nodes in depth-first order; or
    ancestor_mask: bool [N, N] or [B, N, N], [i, j] true where j is i or an ancestor of i; or that mask packed by
                   `attention.masks.pack_ancestors`. Give exactly one of subtree_end and ancestor_mask. The query of a
                   growing tree may hold only Q of its nodes; the mask is then [Q, N] or [B, Q, N].
    first_row:     LongTensor[B]; rows before it are left padding, which no node sees
    window:        how many positions a node sees, with its own (Mistral's sliding_window). With an ancestor_mask,
                   numbers must rise along each path, and a query that sees no node is the last row of the prefix. A
                   mask packed for a window can be used with this window only.
    softcap:       largest absolute score (Gemma 2)
    scale:         factor of the scores, default D ** -0.5
    impl:          "triton" takes CUDA tensors, or any under Triton's interpreter. It supports D a multiple of 8 from 16
                   to 256, at most 2,048 nodes, B Hkv < 65,536, fp32 or 16 bits. "torch" takes anything, and has
                   gradients. "auto" is triton for CUDA tensors that need no gradient, else torch.

    Raises ValueError for shapes, dtypes or options that do not fit; if prefix_length is an int or on a CPU, also for
    a tree that does not fit into S rows. The kernel reads tensors in place if their last axis is contiguous, their
    other strides are multiples of 8 elements and the stride of rows is below 2**24. Others are copied.
    """
    if (subtree_end is None) == (ancestor_mask is None):
        raise ValueError("give exactly one of subtree_end and ancestor_mask")
    mask = subtree_end if ancestor_mask is None else ancestor_mask
    if not isinstance(mask, (Tensor, PackedAncestors)):
        name = "subtree_end" if ancestor_mask is None else "ancestor_mask"
        raise TypeError(f"{name} must be a tensor, got {type(mask).__name__}; make it one by torch.as_tensor")
    if not isinstance(prefix_length, (int, Tensor)):
        raise ValueError(f"prefix_length must be an int or a LongTensor, got {type(prefix_length).__name__}")
    length, lengths = (0, prefix_length) if isinstance(prefix_length, Tensor) else (prefix_length, None)
    counts = None
    if isinstance(ancestor_mask, PackedAncestors):
        ancestors, nodes, packed_for, counts = ancestor_mask
        if packed_for is not None and packed_for != window:
            raise ValueError(f"ancestor_mask was packed for a window of {packed_for}, got window {window}")
    else:
        ancestors = ancestor_mask
        nodes = query.shape[-2] if ancestor_mask is None else ancestor_mask.shape[-1]
    visible = Visible(length, lengths, subtree_end, ancestors, nodes, first_row, window, counts)
    return _routed(query, key, value, visible, softcap, scale, impl).transpose(1, 2)


def chain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix_length: int | Tensor,
    first_row: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Attend from a chain, in which each node is the parent of the next; returns [B, N, Hq, D], by nodes.

    The arguments are those of `tree_attention`, without subtree_end and ancestor_mask.
    """
    length, lengths = (0, prefix_length) if isinstance(prefix_length, Tensor) else (prefix_length, None)
    visible = Visible(length, lengths, None, None, query.shape[2], first_row, window)
    return _routed(query, key, value, visible, softcap, scale, impl)


def _routed(
    query: Tensor, key: Tensor, value: Tensor, visible: Visible, softcap: float | None, scale: float | None, impl: str
) -> Tensor:
    """Choose the implementation, and call `visible_attention` directly or as an operator of PyTorch.

    As an operator, attention is one node for compilers, tracers, dispatch modes and subclasses of Tensor. Otherwise it
    is called directly, because the operator's dispatch takes time and it has no gradient.
    """
    needs_gradient = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    impl = choose_impl("tree_attention", "torch" if impl == "auto" and needs_gradient else impl, query)
    if impl == "triton" and needs_gradient:
        raise ValueError("impl 'triton' has no gradient; take impl 'torch', or call it under torch.no_grad()")
    if torch.compiler.is_compiling():
        as_operator = not needs_gradient
    else:  # impl "torch" consists of PyTorch operators, which can be recorded without this one
        watched = type(query) is not Tensor or torch._C._is_tracing() or torch._C._len_torch_dispatch_stack() > 0
        as_operator = watched and impl != "torch"
    if as_operator:
        return call_operator("tree_attention", (query, key, value, visible, softcap, scale, impl), {})
    return visible_attention(query, key, value, visible, softcap, scale, impl)


def visible_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Visible, softcap: float | None, scale: float | None, impl: str
) -> Tensor:
    """Check the arguments and attend: [B, N, Hq, D]."""
    length, lengths, subtree_end, ancestors, nodes, first_row, window, counts = visible
    if not ((window is None or window > 0) and (softcap is None or softcap > 0) and (scale is None or scale > 0)):
        names = {"window": window, "softcap": softcap, "scale": scale}
        wrong = next(name for name, option in names.items() if option is not None and not option > 0)
        raise ValueError(f"{wrong} must be above 0, or None, got {names[wrong]}")
    softcap = None if softcap is None else float(softcap)  # an int is compiled as a variant of its own
    masks = None
    if not lengths is subtree_end is ancestors is first_row is None:
        given = (lengths, subtree_end, ancestors, first_row, counts)
        masks = tuple([None if mask is None else _layout(mask) for mask in given])
    layouts = (
        query.shape,
        query.stride(),
        query.dtype,
        query.device,
        key.shape,
        key.stride(),
        key.dtype,
        key.device,
        value.shape,
        value.stride(),
        value.dtype,
        value.device,
        masks,
    )
    plan = None
    on_gpu = query.is_cuda
    if impl == "torch" or query.numel() == 0:
        check_layouts(_named(layouts), nodes)
    else:
        plan = _plan(layouts, nodes, window is not None, softcap is not None, on_gpu)
    rows = layouts[4][2]
    shortest = longest = length
    if not on_gpu and lengths is not None and lengths.device.type == "cpu" and lengths.numel():
        shortest = int(lengths.min())
        longest = int(lengths.max())
    if shortest < 0 or longest + nodes > rows:
        got = length if lengths is None else lengths.tolist()
        raise ValueError(f"prefix_length + {nodes} nodes must lie in 0 .. {rows}, got prefix_length {got}")

    factor = layouts[0][3] ** -0.5 if scale is None else float(scale)
    if plan is None:
        return _by_node(query) if query.numel() == 0 else _reference(query, key, value, visible, softcap, factor)
    if plan.in_place and (query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16 == 0:
        return plan(query, key, value, visible, softcap, factor)
    return visible_attention(in_place(query), in_place(key), in_place(value), visible, softcap, scale, impl)


_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]  # a `TensorLayout` without its names


def _layout(tensor: Tensor) -> _Layout:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _named(layouts: tuple[Any, ...]) -> Layouts:
    """Convert the tuple of `visible_attention`, which is faster to build: query, key and value flat, then the masks."""
    query, key, value = (TensorLayout._make(layouts[at : at + 4]) for at in (0, 4, 8))
    return Layouts(query, key, value, *(mask and TensorLayout._make(mask) for mask in layouts[12] or (None,) * 5))


@lru_cache(maxsize=1024)
def _plan(layouts: tuple[Any, ...], nodes: int, windowed: bool, capped: bool, on_gpu: bool) -> "LaunchPlan":
    """Check layouts and plan their launches. A cache that grows has new layouts, and so a new plan, for each length."""
    named = _named(layouts)
    check_layouts(named, nodes)
    check_kernel_takes(named.query, nodes, named.key.shape[1])
    from heavypath.kernels.attention.launch import plan_launch  # which a CPU does not need

    return plan_launch(named, nodes, windowed, capped, on_gpu)


def _reference(
    query: Tensor, key: Tensor, value: Tensor, visible: Visible, softcap: float | None, scale: float
) -> Tensor:
    """Compute the formula at the top in PyTorch, [B, N, Hq, D]; shortcuts for one node, and a chain without prefix."""
    if visible.subtree_end is None and visible.ancestors is None:
        chain = torch.full((visible.nodes,), visible.nodes, dtype=torch.int32, device=query.device)
        visible = visible._replace(subtree_end=chain)
    length, lengths, end, _, nodes, first_row, window, _ = visible
    used = nodes + (length if lengths is None else int(lengths.max()))
    key = key[:, :, :used]
    value = value[:, :, :used]
    narrowed = first_row is not None or window is not None or softcap is not None or lengths is not None
    if not narrowed and nodes == 1 and end is not None:  # the only node sees all rows
        return _by_node(attend(query, key, value, None, scale))
    if not narrowed and length == 0 and end is not None and not end.is_cuda and bool((end == nodes).all()):  # a chain
        return _by_node(scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True))

    prefix = length if lengths is None else lengths.reshape(-1)
    bias = attention_bias(visible.ancestor_mask(), prefix, used, query.dtype, window)
    if not narrowed and end is not None:
        return _by_node(attend(query, key, value, bias, scale))

    row = torch.arange(used, device=query.device)
    starts = torch.full((1,), length, device=query.device) if lengths is None else lengths.reshape(-1)
    hidden = row >= starts[:, None] + nodes  # these rows may hold NaN, and a weight of 0 times NaN is NaN
    if first_row is not None:
        hidden = hidden | (row < first_row[:, None])
        bias = bias.masked_fill((row < first_row[:, None])[:, None, None], -torch.inf)
    if lengths is not None or first_row is not None:
        hidden = hidden[:, None, :, None]
        key = key.masked_fill(hidden, 0)
        value = value.masked_fill(hidden, 0)
    blind = None
    if end is None or first_row is not None:  # otherwise every node sees at least itself
        blind = (bias == -torch.inf).all(-1, keepdim=True)
        bias = bias.masked_fill(blind, 0)
    if softcap is None:
        out = attend(query, key, value, bias, scale)
    else:
        grouped = query.unflatten(1, (key.shape[1], -1)).float()
        scores = softcap * torch.tanh(grouped @ key[:, :, None].float().mT * (scale / softcap))
        weights = (scores + bias[:, None].float()).softmax(-1)
        out = (weights @ value[:, :, None].float()).flatten(1, 2).to(query.dtype)
    return _by_node(out if blind is None else out.masked_fill(blind, 0))


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None = None) -> Tensor:
    """Grouped-query attention; without a bias every query sees every key. Returns [B, Hq, Q, D].

    query: [B, Hq, Q, D]; key, value: [B, Hkv, S, D], Hq a multiple of Hkv
    bias:  [B or 1, 1, Q, S], added to the scaled scores
    scale: of the scores, default D ** -0.5

    On a CPU, for few fp32 queries, one matrix product serves all query heads of a key head. Four operations take the
    place of a dozen: a decoder's forward pass takes a tenth less time.
    """
    batch, heads, queries, head_dim = query.shape
    if query.device.type != "cpu" or query.dtype != torch.float32 or queries > _FEW_QUERIES:
        return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale, enable_gqa=True)
    factor = head_dim**-0.5 if scale is None else scale
    keys = key.flatten(0, 1)  # [B * Hkv, S, D]
    values = value.flatten(0, 1)  # [B * Hkv, S, D]
    scores = torch.bmm(query.reshape(len(keys), -1, head_dim), keys.transpose(1, 2)).view(batch, heads, queries, -1)
    scores = scores * factor if bias is None else torch.add(bias, scores, alpha=factor)
    weights = scores.softmax(-1).view(len(keys), -1, keys.shape[1])
    return torch.bmm(weights, values).view(batch, heads, queries, -1)


def _by_node(out: Tensor) -> Tensor:
    """Return [B, Hq, N, D] as contiguous [B, N, Hq, D], the layout that a model's output projection reads."""
    return out.transpose(1, 2).contiguous()
