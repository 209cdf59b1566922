"""Attention from the N nodes of a token tree to a prefix of cached tokens and to their own ancestors.

Node i of a sequence with L prefix tokens sees cache row s when

    s < L                                    the prefix
    j = s - L in [0, N) and j <= i < end[j]  j is i itself or an ancestor of i

for nodes in depth-first order, where the subtree of j is the interval [j, end[j]): the whole mask is one integer per
node. A chain has end = N, so causal prefill, single-token decoding and tree verification are one function. Trees that
still grow, not yet in depth-first order, pass an explicit ancestor mask instead.

    out[i] = sum_s softmax_s(scale * query[i] . key[s] over the visible s) value[s]

A node that sees nothing gets zeros. Two options narrow what is seen: rows before `first_row` are left padding, and with
a sliding window node i, at position L + depth[i], sees positions above L + depth[i] - window only. Gemma 2's soft cap
replaces the scores by softcap * tanh(scores / softcap).

The kernel. A program owns BLOCK_M query rows of one key head: (node, head of the group) pairs, node by node, so that
grouped heads share every key they load. It walks over

    the prefix, in blocks of BLOCK_N rows without a mask, but for the last
    the tree's own blocks: block [j0, j1) of keys against queries i0 .. i1 is
        empty  iff  max end[j0 : j1] <= i0  or  j0 > i1     skipped
        full   iff  min end[j0 : j1] >  i1  and j1 <= i0+1  no mask
    both exact, and read off N integers once, into two words with a bit per block.

with the usual online softmax, in base 2. Few nodes leave most of a GPU idle, so the prefix is cut into up to SPLITS
parts, each with a sum, a maximum and an unnormalised output of its own, which a second kernel merges. The cuts follow
from the sequence's own length and the shape of the model, never from the rest of the batch, and lengths are read on the
device: a CUDA graph holds for any.

Costs, for G query heads per key head, L >> N and 2-byte numbers: 4 G N L D FLOPs for 4 L D bytes of a head's keys and
values, so G N FLOPs a byte: above about 165 (an H200's 790 TFLOP/s to 4.3 TB/s is 184) tensor cores bind, below memory.
"""

# Triton's language is no Python that a type checker knows.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from heavypath.kernels.implementation import check_can_launch, choose_impl

MAX_NODES = 2048  # of the kernel: 64 blocks of 32 keys have a bit each in one word
_FEW_QUERIES = 8  # at most so many are grouped on a CPU
_MIN_SPLIT = 256  # fewest rows worth a program of their own; a multiple of every BLOCK_N
_LOG2_E = tl.constexpr(1.4426950408889634)


class PackedAncestors(NamedTuple):
    """An ancestor mask [Q, N] or [B, Q, N] with 32 nodes to a word, see `pack_ancestors`.

    words: int32 [..., Q, 2 * ceil(N / 64)], bit j % 32 of word j // 32 is column j; nodes: N
    """

    words: Tensor
    nodes: int


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
    key, value:    [B, Hkv, S, D] of the same dtype, Hq a multiple of Hkv; the tree's own rows lie at
                   prefix_length .. prefix_length + N - 1, rows beyond are never read
    prefix_length: int, or LongTensor[B], one per sequence
    subtree_end:   int or long tensor [N] or [B, N], nodes in depth-first order; or
    ancestor_mask: bool [N, N] or [B, N, N], [i, j] true where j is i or an ancestor of i, or the same packed by
                   `pack_ancestors`; exactly one of the two. The query of a growing tree may hold its last Q nodes only:
                   then a mask [Q, N] or [B, Q, N], the rows of those nodes.
    first_row:     LongTensor[B]; rows before it are left padding, which nothing sees
    window:        how many positions a node sees, its own included (Mistral's sliding_window); Q = N only
    softcap:       of the scores (Gemma 2)
    scale:         of the scores, default D ** -0.5
    impl:          "triton": CUDA tensors, or any under Triton's interpreter; D a multiple of 8 from 16 to 256, at most
                   2,048 nodes, 16- or 32-bit numbers. "torch": anything, gradients too. "auto": triton for CUDA tensors
                   that need no gradient, else torch.

    Raises ValueError for shapes, dtypes or options that do not fit and, where prefix_length is an int or on the CPU, if
    the tree does not fit into S rows. The kernel reads keys and values in place where their last axis is contiguous and
    their other strides are multiples of 8 elements, of rows below 2**24; others are copied first.
    """
    needs_gradient = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if impl == "auto" and needs_gradient:
        impl = "torch"
    impl = choose_impl("tree_attention", impl, query)
    if impl == "triton" and needs_gradient:
        raise ValueError("impl 'triton' has no gradient; take impl 'torch', or call it under torch.no_grad()")
    if not isinstance(prefix_length, (int, Tensor)):
        raise ValueError(f"prefix_length must be an int or a LongTensor, got {type(prefix_length).__name__}")
    length, lengths = (0, prefix_length) if isinstance(prefix_length, Tensor) else (prefix_length, None)
    if isinstance(ancestor_mask, PackedAncestors):
        ancestors, nodes = ancestor_mask
    else:
        ancestors, nodes = ancestor_mask, query.shape[-2] if ancestor_mask is None else ancestor_mask.shape[-1]
    # PyTorch's own operators need no operator around them, whose dispatch costs as much as a small attention.
    # Nor can it pass gradients on.
    plain = impl == "torch" and (needs_gradient or not torch.compiler.is_compiling())
    attend = _tree_attention if plain else _operator
    return attend(
        query, key, value, length, lengths, subtree_end, ancestors, nodes, first_row, window, softcap, scale, impl
    )


def pack_ancestors(mask: Tensor) -> PackedAncestors:
    """Pack bool [..., Q, N] for calls that share a mask, a layer each."""
    bits = pad(mask, (0, -mask.shape[-1] % 64)).unflatten(-1, (-1, 32))
    places = torch.arange(32, device=mask.device)
    return PackedAncestors((bits.long() << places).sum(-1).to(torch.int32), mask.shape[-1])


def unpack_ancestors(packed: PackedAncestors) -> Tensor:
    """The bool [..., Q, N] that was packed."""
    bits = packed.words[..., None] >> torch.arange(32, device=packed.words.device, dtype=torch.int32)
    return (bits & 1).bool().flatten(-2)[..., : packed.nodes]


def interval_mask(subtree_end: Tensor) -> Tensor:
    """bool [..., N, N] from subtree_end [..., N]: [i, j] is true where j <= i < end[j]."""
    index = torch.arange(subtree_end.shape[-1], device=subtree_end.device)
    return (index[:, None] < subtree_end[..., None, :]).tril_()


def prepared_attention(
    *,
    prefix_length: Tensor,
    rows: int,
    dtype: torch.dtype,
    subtree_end: Tensor | None = None,
    ancestor_mask: Tensor | None = None,
    impl: str = "auto",
) -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    """tree_attention as a function of query, key, value and scale, for all layers of one forward pass.

    What follows from the mask alone is computed here, once: for the kernel packed ancestors, for PyTorch an additive
    mask over the first `rows` cache rows, which must hold the longest prefix and its tree.

    prefix_length: LongTensor[B], or [] for all
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


def attention_bias(ancestors: Tensor, lengths: int | Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """The additive mask of the formula above: 0 where node i sees cache row s, -inf elsewhere; [B or 1, 1, Q, rows].

    ancestors: bool [Q, N] or [B, Q, N], for the Q nodes that ask; lengths: prefix rows, of all or LongTensor[B].
    """
    queries, nodes = ancestors.shape[-2:]
    if isinstance(lengths, int):
        bias = torch.zeros(*ancestors.shape[:-1], rows, dtype=dtype, device=ancestors.device)
        bias[..., lengths : lengths + nodes].masked_fill_(~ancestors, -torch.inf)
        if lengths + nodes < rows:
            bias[..., lengths + nodes :] = -torch.inf
        return bias.view(-1, 1, queries, rows)
    tree = torch.zeros(ancestors.shape, dtype=dtype, device=ancestors.device).masked_fill_(~ancestors, -torch.inf)
    tree = tree.view(-1, 1, queries, nodes)
    batch = max(len(tree), len(lengths))
    bias = torch.zeros(batch, 1, queries, rows, dtype=dtype, device=ancestors.device)
    bias.masked_fill_((torch.arange(rows, device=lengths.device) >= lengths[:, None, None, None] + nodes), -torch.inf)
    columns = lengths[:, None, None, None] + torch.arange(nodes, device=lengths.device)
    return bias.scatter_(3, columns.expand(batch, 1, queries, nodes), tree.expand(batch, -1, -1, -1))


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None = None) -> Tensor:
    """Grouped-query attention [B, Hq, N, D] under an additive mask; no mask lets every query see every key.

    On a CPU what few queries of a group see is one matrix product, four operations instead of a dozen: a decoder's
    forward pass takes a tenth less.
    """
    batch, heads, queries, head_dim = query.shape
    if query.device.type != "cpu" or query.dtype != torch.float32 or queries > _FEW_QUERIES:
        return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale, enable_gqa=True)
    scale = head_dim**-0.5 if scale is None else scale
    keys, values = key.flatten(0, 1), value.flatten(0, 1)  # [B * Hkv, S, D]
    scores = torch.bmm(query.reshape(len(keys), -1, head_dim), keys.transpose(1, 2)).view(batch, heads, queries, -1)
    scores = scores * scale if bias is None else torch.add(bias, scores, alpha=scale)
    weights = scores.softmax(-1).view(len(keys), -1, keys.shape[1])
    return torch.bmm(weights, values).view(batch, heads, queries, -1)


class _Visible(NamedTuple):
    """Which rows the nodes see: `tree_attention`'s arguments, prefix_length as an int or else a tensor."""

    length: int
    lengths: Tensor | None
    subtree_end: Tensor | None
    ancestors: Tensor | None
    nodes: int
    first_row: Tensor | None
    window: int | None


def _tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix_length: int,
    prefix_lengths: Tensor | None,
    subtree_end: Tensor | None,
    ancestor_mask: Tensor | None,
    nodes: int,
    first_row: Tensor | None,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    impl: str,
) -> Tensor:
    visible = _Visible(prefix_length, prefix_lengths, subtree_end, ancestor_mask, nodes, first_row, window)
    _check(query, key, value, visible, softcap, scale, impl)
    if query.numel() == 0:
        return _by_node(query.clone())
    attend = _launch if impl == "triton" else _reference
    return attend(query, key, value, visible, softcap, query.shape[-1] ** -0.5 if scale is None else scale)


# One node for torch.compile and torch.export, with an output laid out as [B, N, Hq, D].
_operator = torch.library.custom_op("heavypath::tree_attention", _tree_attention, mutates_args=())


@_operator.register_fake
def _(query: Tensor, *_: object) -> Tensor:
    return torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: _Visible,
    softcap: float | None,
    scale: float | None,
    impl: str,
) -> None:
    if query.dim() != 4 or key.dim() != 4 or key.shape != value.shape or query.shape[::3] != key.shape[::3]:
        raise ValueError(
            "expected query [B, Hq, N, D] and key, value [B, Hkv, S, D], "
            f"got {[*query.shape]}, {[*key.shape]} and {[*value.shape]}"
        )
    batch, heads, queries, head_dim = query.shape
    kv_heads, rows = key.shape[1:3]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"query heads must be a multiple of key heads, got {heads} and {kv_heads}")
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        raise ValueError(f"expected one floating-point dtype, got {query.dtype}, {key.dtype} and {value.dtype}")
    length, lengths, subtree_end, ancestors, nodes, first_row, window = visible
    given = {"key": key, "value": value, "prefix_length": lengths, "subtree_end": subtree_end}
    for name, tensor in (given | {"ancestor_mask": ancestors, "first_row": first_row}).items():
        if tensor is not None and tensor.device != query.device:
            raise ValueError(f"{name} must be on the query's device, {query.device}, got {tensor.device}")
    if (subtree_end is None) == (ancestors is None):
        raise ValueError("give exactly one of subtree_end and ancestor_mask")
    if subtree_end is not None:
        _check_tensor("subtree_end", subtree_end, (torch.int32, torch.long), ((nodes,), (batch, nodes)))
    if ancestors is not None:
        columns = nodes if ancestors.dtype == torch.bool else 2 * -(-nodes // 64)
        dtypes, shape = (torch.bool, torch.int32), (queries, columns)
        _check_tensor("ancestor_mask", ancestors, dtypes, (shape, (batch, *shape)))
    if nodes < queries or (window is not None and nodes > queries):
        raise ValueError(f"got {queries} queries of a tree of {nodes} nodes; with a window, all nodes must ask")
    for name, option in (("window", window), ("softcap", softcap), ("scale", scale)):
        if option is not None and not option > 0:
            raise ValueError(f"{name} must be above 0, or None, got {option}")
    if lengths is not None:
        _check_tensor("prefix_length", lengths, (torch.long,), ((), (batch,)), "an int, or ")
    if first_row is not None:
        _check_tensor("first_row", first_row, (torch.long,), ((batch,),))
    shortest = longest = length
    if lengths is not None and lengths.device.type == "cpu" and lengths.numel():
        shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest < 0 or longest + nodes > rows:
        got = length if lengths is None else lengths.tolist()
        raise ValueError(f"prefix_length + {nodes} nodes must lie in 0 .. {rows}, got prefix_length {got}")

    if impl == "triton":
        if head_dim % 8 or not 16 <= head_dim <= 256:
            raise ValueError(f"impl 'triton' has head sizes 16 to 256 in steps of 8, got {head_dim}; take impl 'torch'")
        if nodes > MAX_NODES:
            raise ValueError(f"impl 'triton' takes at most {MAX_NODES} nodes, got {nodes}; take impl 'torch'")
        if query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"impl 'triton' has float32, float16 and bfloat16, got {query.dtype}; take impl 'torch'")
        check_can_launch(query)


def _check_tensor(
    name: str, value: Tensor, dtypes: tuple[torch.dtype, ...], shapes: tuple[tuple[int, ...], ...], otherwise: str = ""
) -> None:
    if value.dtype not in dtypes or value.shape not in shapes:
        wanted = " or ".join(str([*shape]) for shape in dict.fromkeys(shapes))
        raise ValueError(
            f"{name} must be {otherwise}{' or '.join(map(str, dtypes))} {wanted}, got {value.dtype} {[*value.shape]}"
        )


def _ancestors(visible: _Visible) -> Tensor:
    """bool [Q, N] or [B, Q, N]."""
    if visible.subtree_end is not None:
        return interval_mask(visible.subtree_end)
    assert visible.ancestors is not None
    if visible.ancestors.dtype == torch.bool:
        return visible.ancestors
    return unpack_ancestors(PackedAncestors(visible.ancestors, visible.nodes))


def _depths(visible: _Visible) -> Tensor:
    """int32 [N] or [B, N]: ancestors of each node, for a window."""
    if visible.subtree_end is None:
        return (_ancestors(visible).sum(-1, dtype=torch.int32) - 1).clamp_(min=0)  # 0 for a node that sees no node
    # Of the i nodes before i all are ancestors, but for those whose subtree has ended.
    end, nodes = visible.subtree_end.long(), visible.nodes
    ended = torch.zeros(*end.shape[:-1], nodes + 1, dtype=torch.int32, device=end.device)
    ended = ended.scatter_add_(-1, end, torch.ones_like(end, dtype=torch.int32)).cumsum(-1, dtype=torch.int32)
    return torch.arange(nodes, dtype=torch.int32, device=end.device) - ended[..., :nodes]


def _reference(
    query: Tensor, key: Tensor, value: Tensor, visible: _Visible, softcap: float | None, scale: float
) -> Tensor:
    batch = len(query)
    length, lengths, end, _, nodes, first_row, window = visible
    used = nodes + (length if lengths is None else int(lengths.max()))
    key, value = key[:, :, :used], value[:, :, :used]
    narrowed = first_row is not None or window is not None or softcap is not None or lengths is not None
    if not narrowed and nodes == 1 and end is not None:  # it sees everything
        return _by_node(attend(query, key, value, None, scale))
    if not narrowed and length == 0 and end is not None and not end.is_cuda and bool((end == nodes).all()):  # a chain
        return _by_node(scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True))

    bias = attention_bias(_ancestors(visible), length if lengths is None else lengths.reshape(-1), used, query.dtype)
    if not narrowed and end is not None:
        return _by_node(attend(query, key, value, bias, scale))

    row = torch.arange(used, device=query.device)
    starts = torch.full((1,), length, device=query.device) if lengths is None else lengths.reshape(-1)
    hidden = row >= starts[:, None] + nodes  # may hold anything, and 0 * NaN leaks
    if first_row is not None:
        hidden = hidden | (row < first_row[:, None])
        bias = bias.masked_fill((row < first_row[:, None])[:, None, None], -torch.inf)
    if window is not None:
        depths = _depths(visible).expand(batch, -1).long()
        node = (row - starts[:, None]).clamp(0, nodes - 1).expand(batch, -1)
        position = torch.where(row < starts[:, None], row, starts[:, None] + depths.gather(1, node))  # [B, used]
        distance = (starts[:, None] + depths)[:, :, None] - position[:, None]
        bias = bias.masked_fill((distance >= window)[:, None], -torch.inf)
    if lengths is not None or first_row is not None:
        hidden = hidden[:, None, :, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    blind = None
    if end is None or first_row is not None:  # else every node sees itself
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


def _by_node(out: Tensor) -> Tensor:
    """[B, Hq, N, D] laid out as [B, N, Hq, D], which the output projection reads in place."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


@triton.jit
def _cut(
    batch, length, lengths, lengths_stride, first_row, nodes, window,
    SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A sequence's length and first row. Its prefix from `begin` on is cut into `parts` of `size` rows.

    The last part has the tree too.
    """
    if lengths is not None:
        length = tl.load(lengths + batch * lengths_stride).to(tl.int32)
    first = 0
    if first_row is not None:
        first = tl.load(first_row + batch).to(tl.int32)
    begin = first
    if window is not None:
        begin = tl.maximum(begin, length - window + 1)  # the root sees furthest back
    begin = tl.minimum(begin, length) // BLOCK_N * BLOCK_N
    span = length - begin + tl.minimum(nodes, MIN_SPLIT)
    size = tl.maximum(MIN_SPLIT, tl.cdiv(tl.cdiv(span, SPLITS), BLOCK_N) * BLOCK_N)
    return length, first, begin, size, tl.cdiv(span, size)


@triton.jit
def _attend(
    query, query_rows, query_mask, key_rows, value_rows, visible, readable, acc, peak, total, scale, softcap,
    columns, HEAD_DIM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One block of keys in the online softmax; visible [BLOCK_M, BLOCK_N] and readable [BLOCK_N] are None for all.

    query is None in float32, where it would fill the registers: it is read again for each block.
    """
    if query is None:
        query = tl.load(query_rows, mask=query_mask, other=0.0)
    inside = columns[None, :] < HEAD_DIM
    if readable is not None:
        inside = inside & readable[:, None]
    keys = tl.load(key_rows, mask=inside, other=0.0)
    if UPCAST:
        keys = keys.to(tl.float32)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    in_base_2 = scale * _LOG2_E
    if softcap is not None:  # softcap * tanh(scale * scores / softcap), and tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = softcap - 2.0 * softcap / (tl.exp2(scores * (2.0 * in_base_2 / softcap)) + 1.0)
        in_base_2 = _LOG2_E
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    # Not scaled first: the product below is one fused multiply-add a score.
    new_peak = tl.maximum(peak, tl.max(scores, 1) * in_base_2)
    shift = new_peak
    if visible is not None:
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that has seen nothing yet
    weights = tl.exp2(scores * in_base_2 - shift[:, None])
    fade = tl.exp2(peak - shift)
    total = total * fade + tl.sum(weights, 1)
    values = tl.load(value_rows, mask=inside, other=0.0)
    if UPCAST:
        values = values.to(tl.float32)
    acc = tl.dot(weights.to(values.dtype), values, acc * fade[:, None], input_precision="ieee")
    return acc, new_peak, total


@triton.jit
def _lowest_bit(bits):
    """The place of the lowest bit set: the exponent of that power of two."""
    power = (bits & (0 - bits)).to(tl.float32)
    return ((power.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127


@triton.jit(do_not_specialize=["length", "queries", "nodes", "kv_heads", "window", "lengths_stride", "word_count"])
def _tree_attention_kernel(
    query, key, value, out, partial_out, partial_peak, partial_total,
    length, lengths, first_row, ends, words, depths,
    scale, softcap, window, queries, nodes, kv_heads, lengths_stride, ends_stride, words_stride, depths_stride,
    query_b, query_h, query_n, key_b, key_h, key_s, value_b, value_h, value_s, word_count,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TOUCHED: tl.constexpr, TREE_BLOCKS: tl.constexpr, SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile of (node, head of the group) rows, one part of the keys. Strides of 8 elements; out is [B, Q, Hq, D]."""
    tile, part = tl.program_id(0), tl.program_id(1)
    batch, kv_head = tl.program_id(2) // kv_heads, tl.program_id(2) % kv_heads
    length, first, begin, size, parts = _cut(
        batch, length, lengths, lengths_stride, first_row, nodes, window, SPLITS, MIN_SPLIT, BLOCK_N
    )  # fmt: skip
    if part >= parts:
        return
    start = begin + part * size
    stop = tl.maximum(tl.minimum(start + size, length), start)

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node, head = row // GROUP, kv_head * GROUP + row % GROUP
    asks = row < queries * GROUP
    columns, offsets = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    query_rows = batch.to(tl.int64) * query_b + head.to(tl.int64) * query_h + node.to(tl.int64) * query_n
    query_rows = query + query_rows[:, None] * 8 + columns[None, :]
    query_mask = asks[:, None] & (columns[None, :] < HEAD_DIM)
    query_tile = None
    if query.dtype.element_ty != tl.float32:
        query_tile = tl.load(query_rows, mask=query_mask, other=0.0)
        if UPCAST:
            query_tile = query_tile.to(tl.float32)
    eight = tl.full([], 8, tl.int64)  # strides in 64 bits, and known to be multiples of 8
    key += batch * (key_b * eight) + kv_head * (key_h * eight)
    value += batch * (value_b * eight) + kv_head * (value_h * eight)
    key_offsets = offsets[:, None] * (key_s * 8) + columns[None, :]  # within a block 32 bits suffice
    value_offsets = offsets[:, None] * (value_s * 8) + columns[None, :]
    key_s, value_s = key_s * eight, value_s * eight

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    # The prefix: blocks that all rows see whole, then those that are masked, at both of its ends.
    sees = tl.full([BLOCK_M], 0, tl.int32) + first  # first prefix row that each query sees
    depth = tl.zeros([BLOCK_M], tl.int32)
    if depths is not None:
        depth = tl.load(depths + batch * depths_stride + node, mask=asks, other=0)
        sees = tl.maximum(sees, length + depth - window + 1)
    whole_start, whole_stop = start, start + (stop - start) // BLOCK_N * BLOCK_N
    if (first_row is not None) or (depths is not None):
        whole_start = tl.maximum(start, tl.minimum(tl.cdiv(tl.max(sees, 0), BLOCK_N) * BLOCK_N, whole_stop))
    for block in tl.range(whole_start, whole_stop, BLOCK_N):
        acc, peak, total = _attend(
            query_tile, query_rows, query_mask,
            key + block * key_s + key_offsets, value + block * value_s + value_offsets,
            None, None, acc, peak, total, scale, softcap, columns, HEAD_DIM, UPCAST,
        )  # fmt: skip
    for masked in tl.range(start, stop - (whole_stop - whole_start), BLOCK_N, num_stages=1):
        block = masked + tl.where(masked < whole_start, 0, whole_stop - whole_start)
        at = block + offsets
        acc, peak, total = _attend(
            query_tile, query_rows, query_mask,
            key + block * key_s + key_offsets, value + block * value_s + value_offsets,
            (at[None, :] >= sees[:, None]) & (at < stop)[None, :], (at >= first) & (at < stop),
            acc, peak, total, scale, softcap, columns, HEAD_DIM, UPCAST,
        )  # fmt: skip

    if part == parts - 1:
        # The tree: which of its blocks this tile sees, a bit each; then those, and no others.
        key += length * key_s
        value += length * value_s
        first_node = tile * BLOCK_M // GROUP
        last_node = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, queries - 1)
        blocks = tl.arange(0, TREE_BLOCKS)
        if ends is not None:
            keys = blocks[:, None] * BLOCK_N + offsets[None, :]
            key_ends = tl.load(ends + batch * ends_stride + keys, mask=keys < nodes, other=0).to(tl.int32)
            occupied = (tl.max(key_ends, 1) > first_node) & (blocks * BLOCK_N <= last_node)
            full = (tl.min(key_ends, 1) > last_node) & (blocks * BLOCK_N + (BLOCK_N - 1) <= first_node)
        else:
            touched = first_node + tl.arange(0, TOUCHED)
            word = tl.arange(0, TREE_BLOCKS * BLOCK_N // 32)
            table = tl.load(
                words + batch * words_stride + touched[:, None] * word_count + word[None, :],
                mask=(touched <= last_node)[:, None] & (word < word_count)[None, :], other=0,
            )  # fmt: skip
            nonzero = tl.max((table != 0).to(tl.int32), 0)
            ones = tl.min(((table == -1) | (touched > last_node)[:, None]).to(tl.int32), 0)
            occupied = tl.max(tl.reshape(nonzero, [TREE_BLOCKS, BLOCK_N // 32]), 1) != 0
            full = tl.min(tl.reshape(ones, [TREE_BLOCKS, BLOCK_N // 32]), 1) != 0
        bit = tl.full([TREE_BLOCKS], 1, tl.int64) << blocks.to(tl.int64)

        if (first_row is None) and (depths is None) and TREE_BLOCKS > 1:
            full_bits = tl.sum(tl.where(full, bit, 0), 0)
            for _ in tl.range(0, tl.sum(full.to(tl.int32), 0)):
                block = _lowest_bit(full_bits) * BLOCK_N
                full_bits = full_bits & (full_bits - 1)
                acc, peak, total = _attend(
                    query_tile, query_rows, query_mask,
                    key + block * key_s + key_offsets, value + block * value_s + value_offsets,
                    None, None, acc, peak, total, scale, softcap, columns, HEAD_DIM, UPCAST,
                )  # fmt: skip
            occupied = occupied & (full == 0)
        bits = tl.sum(tl.where(occupied, bit, 0), 0)
        for _ in tl.range(0, tl.sum(occupied.to(tl.int32), 0)):
            block = _lowest_bit(bits) * BLOCK_N
            bits = bits & (bits - 1)
            at = block + offsets
            readable = at < nodes
            if ends is not None:
                end = tl.load(ends + batch * ends_stride + at, mask=at < nodes, other=0).to(tl.int32)
                visible = (at[None, :] <= node[:, None]) & (node[:, None] < end[None, :])
            else:
                in_word = (offsets % 32)[None, :]
                base = words + batch * words_stride + node * word_count + block // 32
                low = tl.load(base, mask=asks, other=0)[:, None]
                if BLOCK_N == 32:
                    visible = ((low >> in_word) & 1) != 0
                else:
                    high = tl.load(base + 1, mask=asks, other=0)[:, None]
                    visible = ((tl.where((offsets < 32)[None, :], low, high) >> in_word) & 1) != 0
            if depths is not None:
                above = tl.load(depths + batch * depths_stride + at, mask=at < nodes, other=0)
                visible = visible & (depth[:, None] - above[None, :] < window)
            if first_row is not None:
                readable = readable & (length + at >= first)
                visible = visible & readable[None, :]
            acc, peak, total = _attend(
                query_tile, query_rows, query_mask,
                key + block * key_s + key_offsets, value + block * value_s + value_offsets,
                visible, readable, acc, peak, total, scale, softcap, columns, HEAD_DIM, UPCAST,
            )  # fmt: skip

    if parts == 1:
        acc = acc / tl.where(total == 0, 1.0, total)[:, None]
        out += batch.to(tl.int64) * (queries * kv_heads * GROUP * HEAD_DIM)
        out_row = node * (kv_heads * GROUP) + head
        tl.store(out + (out_row[:, None] * HEAD_DIM + columns[None, :]), acc, mask=query_mask)
    elif SPLITS > 1:
        slot = (tl.program_id(2).to(tl.int64) * SPLITS + part) * (queries * GROUP)
        tl.store(partial_out + slot * HEAD_DIM + (row[:, None] * HEAD_DIM + columns[None, :]), acc, mask=query_mask)
        tl.store(partial_peak + slot + row, peak, mask=asks)
        tl.store(partial_total + slot + row, total, mask=asks)


@triton.jit(do_not_specialize=["length", "queries", "nodes", "kv_heads", "window", "lengths_stride"])
def _merge_kernel(
    out, partial_out, partial_peak, partial_total,
    length, lengths, first_row, window, queries, nodes, kv_heads, lengths_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr,
):  # fmt: skip
    """out = sum_p 2^(peak_p - peak) out_p / sum_p 2^(peak_p - peak) total_p over the parts p, all loaded at once."""
    batch, kv_head = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    _, _, _, _, parts = _cut(
        batch, length, lengths, lengths_stride, first_row, nodes, window, SPLITS, MIN_SPLIT, BLOCK_N
    )  # fmt: skip
    if parts == 1:
        return
    row, part, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    slot = (tl.program_id(1).to(tl.int64) * SPLITS + part)[:, None] * (queries * GROUP) + row[None, :]
    asks = row < queries * GROUP
    there = (part < parts)[:, None] & asks[None, :]
    peaks = tl.load(partial_peak + slot, mask=there, other=float("-inf"))
    totals = tl.load(partial_total + slot, mask=there, other=0.0)
    outs = tl.load(
        partial_out + slot[:, :, None] * HEAD_DIM + columns[None, None, :],
        mask=there[:, :, None] & (columns < HEAD_DIM)[None, None, :], other=0.0,
    )  # fmt: skip
    peak = tl.max(peaks, 0)
    weights = tl.exp2(peaks - tl.where(peak == float("-inf"), 0.0, peak)[None, :])
    total = tl.sum(weights * totals, 0)
    merged = tl.sum(weights[:, :, None] * outs, 0) / tl.where(total == 0, 1.0, total)[:, None]
    out_row = (batch.to(tl.int64) * queries + row // GROUP) * (kv_heads * GROUP) + kv_head * GROUP + row % GROUP
    tl.store(
        out + out_row[:, None] * HEAD_DIM + columns[None, :], merged,
        mask=asks[:, None] & (columns < HEAD_DIM)[None, :],
    )  # fmt: skip


class _Tiles(NamedTuple):
    """Block sizes of a launch."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def _tiles(dtype: torch.dtype, head_dim: int, rows: int, roomy: bool) -> _Tiles:
    """By dtype, head size and rows per key head: no spills, 64 rows and more on wgmma, two blocks of keys on their way.

    roomy: a data-centre GPU since Hopper, with 227 KB of shared memory and products that take operands from there.
    """
    if dtype == torch.float32:  # exact products, without tensor cores
        return _Tiles(16 if rows <= 16 or head_dim > 128 else 32, 32, 8 if head_dim <= 64 else 16, 2)
    if rows <= 16:
        return _Tiles(16, 64 if head_dim <= 128 else 32, 4, 3)
    if head_dim > 128:
        return _Tiles(64, 32, 8, 3 if roomy else 2)
    if head_dim <= 32:
        return _Tiles(64, 64, 4, 3)
    if head_dim > 64 and not roomy:
        return _Tiles(64, 32, 4, 3)
    return _Tiles(64, 64, 4, 3) if rows <= 64 else _Tiles(128, 64, 8, 3)


def _in_place(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where the kernel's 16-byte loads and 32-bit offsets within a block could not read it."""
    strides = [stride for stride, size in zip(tensor.stride()[:-1], tensor.shape, strict=False) if size > 1]
    aligned = tensor.stride(-1) == 1 and all(stride % 8 == 0 for stride in strides) and tensor.stride(2) < 1 << 24
    return tensor if aligned else tensor.contiguous()


def _launch(
    query: Tensor, key: Tensor, value: Tensor, visible: _Visible, softcap: float | None, scale: float
) -> Tensor:
    query, key, value = _in_place(query), _in_place(key), _in_place(value)
    batch, heads, queries, head_dim = query.shape
    kv_heads = key.shape[1]
    interpreted = not query.is_cuda  # Triton's interpreter truncates float32 to bfloat16, and gets products of it wrong
    out = query.new_empty(batch, queries, heads, head_dim, dtype=torch.float32 if interpreted else query.dtype)

    group = heads // kv_heads
    rows = queries * group
    if interpreted:
        processors, roomy = 16, True
    else:
        gpu = torch.cuda.get_device_properties(query.device)
        processors, roomy = gpu.multi_processor_count, gpu.major in (9, 10)
    block_m, block_n, warps, stages = _tiles(query.dtype, head_dim, rows, roomy)
    tiles = triton.cdiv(rows, block_m)
    # As many programs as run at once, two of 4 warps to a processor, whatever the batch. A power of two: few variants.
    programs = processors * (2 if warps <= 4 else 1) // (tiles * kv_heads)
    most = triton.next_power_of_2(triton.cdiv(key.shape[2], _MIN_SPLIT))
    splits = min(1 << max(programs.bit_length() - 1, 0), most, 32)
    partial_out = partial_peak = partial_total = None
    if splits > 1:
        partial_out = out.new_empty(batch, kv_heads, splits, rows, head_dim, dtype=torch.float32)
        partial_peak, partial_total = out.new_empty(2, batch, kv_heads, splits, rows, dtype=torch.float32)

    length, lengths, ends, ancestors, nodes, first_row, window = visible
    words = None
    if ancestors is not None:
        words = (pack_ancestors(ancestors).words if ancestors.dtype == torch.bool else ancestors).contiguous()
    ends = None if ends is None else ends.contiguous()
    first_row = None if first_row is None else first_row.contiguous()
    depths = None if window is None else _depths(visible).contiguous()
    batch_strides = [0 if tree is None or tree.dim() == dim else tree.stride(0)
                     for tree, dim in ((ends, 1), (words, 2), (depths, 1))]  # fmt: skip
    lengths_stride = 0 if lengths is None or lengths.dim() == 0 else lengths.stride(0)
    block_d = max(16, triton.next_power_of_2(head_dim))
    # Told how many registers there are, ptxas does not spill to fit one program more; at 16 warps that makes it spill.
    registers = None if warps == 16 and head_dim > 128 and roomy else min(255, (1 << 16) // (32 * warps))
    shape = {"GROUP": group, "HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_N": block_n}
    parts = {"SPLITS": splits, "MIN_SPLIT": _MIN_SPLIT}
    with torch.cuda.device_of(query):
        _tree_attention_kernel[(tiles, splits, batch * kv_heads)](
            query, key, value, out, partial_out, partial_peak, partial_total,
            length, lengths, first_row, ends, words, depths,
            scale, softcap, window, queries, nodes, kv_heads, lengths_stride, *batch_strides,
            *(stride // 8 for tensor in (query, key, value) for stride in tensor.stride()[:-1]),
            0 if words is None else words.shape[-1],
            **shape, **parts, BLOCK_M=block_m,
            TOUCHED=triton.next_power_of_2(block_m // group if block_m % group == 0 else (block_m - 2) // group + 2),
            TREE_BLOCKS=triton.next_power_of_2(triton.cdiv(nodes, block_n)),
            UPCAST=interpreted, num_warps=warps, num_stages=stages, enable_fp_fusion=True,
            maxnreg=registers,
        )  # fmt: skip
        if splits > 1:
            rows_each = max(1, 8192 // (splits * block_d))
            _merge_kernel[(triton.cdiv(rows, rows_each), batch * kv_heads)](
                out, partial_out, partial_peak, partial_total,
                length, lengths, first_row, window, queries, nodes, kv_heads, lengths_stride,
                **shape, **parts, ROWS=rows_each, enable_fp_fusion=True,
            )  # fmt: skip
    return out.to(query.dtype).transpose(1, 2)
