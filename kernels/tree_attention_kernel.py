"""The Triton kernels of `tree_attention`, where the formula and the reference are, and their launcher.

A program owns BLOCK_M query rows of one key head: pairs (node, query head of the group), node by node, so that the
heads of a group share every key they load. It walks over

    the prefix, in blocks of BLOCK_N rows, without a mask except for the blocks at its ends, and
    the tree, by blocks: for the keys of nodes j0 .. j1 - 1 and the queries of nodes i0 .. i1 a block is
        empty  iff  max end[j0 : j1] <= i0  or  j0 > i1        and is skipped
        full   iff  min end[j0 : j1] > i1  and  j1 <= i0 + 1   and needs no mask
    Both tests are exact. They read N integers once and leave a bit for each block in two 64-bit words.

with the usual online softmax, in base 2. A few nodes alone would leave most of a GPU idle. So the prefix is cut into up
to SPLITS parts, each with its own sum, maximum and unnormalised output, which a second kernel merges. Where the cuts
are depends on the sequence's own length and on the model's shape, never on the rest of the batch. Lengths are read on
the device, so a CUDA graph holds for all lengths.

Costs, for G query heads per key head, L >> N and 2-byte numbers: 4 G N L D FLOPs for 4 L D bytes of a head's keys and
values, which is G N FLOPs per byte. Above about 165 FLOPs per byte (an H200 has 790 TFLOP/s and 4.3 TB/s, a ratio of
184) tensor cores are the limit, below it memory is.
"""

# A type checker does not understand Triton kernels.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from heavypath.kernels.tree_masks import Visible

MAX_NODES = 2048  # each of 64 blocks of 32 keys has a bit in one word
_MIN_SPLIT = 256  # fewest rows worth a program of their own; a multiple of every BLOCK_N
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _cut(
    batch, length, lengths, lengths_stride, first_row, nodes, window,
    SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A sequence's length and first row, and how its prefix is cut: from row `begin` on into `parts` of `size` rows.

    The tree belongs to the last part.
    """
    if lengths is not None:
        length = tl.load(lengths + batch * lengths_stride).to(tl.int32)
    first = 0
    if first_row is not None:
        first = tl.load(first_row + batch).to(tl.int32)
    begin = first
    if window is not None:
        begin = tl.maximum(begin, length - window)  # what a query of depth -1 sees: none sees further back
    begin = tl.minimum(begin, length) // BLOCK_N * BLOCK_N
    span = length - begin + tl.minimum(nodes, MIN_SPLIT)
    size = tl.maximum(MIN_SPLIT, tl.cdiv(tl.cdiv(span, SPLITS), BLOCK_N) * BLOCK_N)
    return length, first, begin, size, tl.cdiv(span, size)


@triton.jit
def _attend(
    query, query_rows, query_mask, key_rows, value_rows, visible, readable, acc, peak, total, scale, softcap,
    columns, HEAD_DIM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Add one block of keys to the online softmax.

    visible [BLOCK_M, BLOCK_N] and readable [BLOCK_N] say which keys count and which may be loaded; None means all.
    query is None in float32, where it would fill the registers: it is then loaded anew for each block.
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
    # Scores are not scaled beforehand, so that scaling and shifting them below is one fused multiply-add each.
    new_peak = tl.maximum(peak, tl.max(scores, 1) * in_base_2)
    shift = new_peak
    if visible is not None:
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # for a query that has seen nothing yet
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
    """The position of the lowest bit that is set, read from the exponent of that power of two as fp32."""
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
    """A program for each tile of (node, head of the group) rows, part of the keys, and (sequence, key head).

    Strides of query, key and value count units of 8 elements; out is [B, Q, Hq, D]. With a window, depths are those of
    the queries, and words are narrowed to the window already.
    """
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
    eight = tl.full([], 8, tl.int64)  # makes strides 64 bits wide, and known to be multiples of 8
    key += batch * (key_b * eight) + kv_head * (key_h * eight)
    value += batch * (value_b * eight) + kv_head * (value_h * eight)
    key_offsets = offsets[:, None] * (key_s * 8) + columns[None, :]  # 32 bits suffice within a block
    value_offsets = offsets[:, None] * (value_s * 8) + columns[None, :]
    key_s, value_s = key_s * eight, value_s * eight

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    # The prefix: first the blocks that every query sees whole, then the masked ones at both of its ends.
    sees = tl.full([BLOCK_M], 0, tl.int32) + first  # the first prefix row that each query sees
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
        # The tree: find which of its blocks this tile sees, a bit for each, then go through those alone.
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

        if (first_row is None) and ((depths is None) or (ends is None)) and TREE_BLOCKS > 1:
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
                if depths is not None:
                    above = tl.load(depths + batch * depths_stride + at, mask=at < nodes, other=0)
                    visible = visible & (depth[:, None] - above[None, :] < window)
            else:
                in_word = (offsets % 32)[None, :]
                base = words + batch * words_stride + node * word_count + block // 32
                low = tl.load(base, mask=asks, other=0)[:, None]
                if BLOCK_N == 32:
                    visible = ((low >> in_word) & 1) != 0
                else:
                    high = tl.load(base + 1, mask=asks, other=0)[:, None]
                    visible = ((tl.where((offsets < 32)[None, :], low, high) >> in_word) & 1) != 0
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
    """Merge the parts p: out = sum_p 2^(peak_p - peak) out_p / sum_p 2^(peak_p - peak) total_p.

    A program for each ROWS query rows and each (sequence, key head); it loads all parts at once.
    """
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
    """Block sizes, warps and pipeline stages of a launch."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def _tiles(dtype: torch.dtype, head_dim: int, rows: int, roomy: bool) -> _Tiles:
    """Choose tiles that do not spill, keep two blocks of keys in flight, and from 64 query rows on can use wgmma.

    rows:  query rows per key head
    roomy: a data-centre GPU since Hopper, with 227 KB of shared memory and products that take operands from there
    """
    if dtype == torch.float32:  # exact products, which do not use tensor cores
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
    """The tensor, or a copy of one that 16-byte loads and 32-bit offsets within a block cannot read."""
    strides = [stride for stride, size in zip(tensor.stride()[:-1], tensor.shape, strict=False) if size > 1]
    aligned = tensor.stride(-1) == 1 and all(stride % 8 == 0 for stride in strides) and tensor.stride(2) < 1 << 24
    return tensor if aligned else tensor.contiguous()


def _batch_stride(tensor: Tensor | None, dims: int) -> int:
    """The stride between sequences; 0 for a tensor of `dims` dimensions, which all sequences share."""
    return 0 if tensor is None or tensor.dim() == dims else tensor.stride(0)


def launch_tree_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Visible, softcap: float | None, scale: float
) -> Tensor:
    """`tree_attention` of checked arguments; the output [B, Hq, N, D] is in memory as [B, N, Hq, D]."""
    query, key, value = _in_place(query), _in_place(key), _in_place(value)
    batch, heads, queries, head_dim = query.shape
    kv_heads = key.shape[1]
    interpreted = not query.is_cuda  # Triton's interpreter truncates float32 to bfloat16 and gets bfloat16 dots wrong
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
    # As many programs as run at once, where two of 4 warps share a processor, whatever the batch size. Splits are a
    # power of two, so that few variants are compiled.
    programs = processors * (2 if warps <= 4 else 1) // (tiles * kv_heads)
    most = triton.next_power_of_2(triton.cdiv(key.shape[2], _MIN_SPLIT))
    splits = min(1 << max(programs.bit_length() - 1, 0), most, 32)
    partial_out = partial_peak = partial_total = None
    if splits > 1:
        partial_out = out.new_empty(batch, kv_heads, splits, rows, head_dim, dtype=torch.float32)
        partial_peak, partial_total = out.new_empty(2, batch, kv_heads, splits, rows, dtype=torch.float32)

    length, lengths, ends, _, nodes, first_row, window, _ = visible
    words = depths = None
    if ends is None:
        packed = visible.packed()
        words, depths = packed.words.contiguous(), None if packed.depths is None else packed.depths.contiguous()
    else:
        ends = ends.contiguous()
        depths = None if window is None else visible.node_depths()
    first_row = None if first_row is None else first_row.contiguous()
    lengths_stride = 0 if lengths is None or lengths.dim() == 0 else lengths.stride(0)
    block_d = max(16, triton.next_power_of_2(head_dim))
    # A limit on registers keeps ptxas from spilling to fit one more program; with 16 warps it would make ptxas spill.
    registers = None if warps == 16 and head_dim > 128 and roomy else min(255, (1 << 16) // (32 * warps))
    shared = {
        "out": out, "partial_out": partial_out, "partial_peak": partial_peak, "partial_total": partial_total,
        "length": length, "lengths": lengths, "lengths_stride": lengths_stride, "first_row": first_row,
        "window": window, "queries": queries, "nodes": nodes, "kv_heads": kv_heads,
        "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_N": block_n,
        "SPLITS": splits, "MIN_SPLIT": _MIN_SPLIT, "enable_fp_fusion": True,
    }  # fmt: skip
    with torch.cuda.device_of(query):
        _tree_attention_kernel[(tiles, splits, batch * kv_heads)](
            query=query, key=key, value=value, ends=ends, words=words, depths=depths, scale=scale, softcap=softcap,
            ends_stride=_batch_stride(ends, 1), words_stride=_batch_stride(words, 2),
            depths_stride=_batch_stride(depths, 1),
            query_b=query.stride(0) // 8, query_h=query.stride(1) // 8, query_n=query.stride(2) // 8,
            key_b=key.stride(0) // 8, key_h=key.stride(1) // 8, key_s=key.stride(2) // 8,
            value_b=value.stride(0) // 8, value_h=value.stride(1) // 8, value_s=value.stride(2) // 8,
            word_count=0 if words is None else words.shape[-1], BLOCK_M=block_m,
            TOUCHED=triton.next_power_of_2(block_m // group if block_m % group == 0 else (block_m - 2) // group + 2),
            TREE_BLOCKS=triton.next_power_of_2(triton.cdiv(nodes, block_n)),
            UPCAST=interpreted, num_warps=warps, num_stages=stages, maxnreg=registers, **shared,
        )  # fmt: skip
        if splits > 1:
            rows_each = max(1, 8192 // (splits * block_d))
            _merge_kernel[(triton.cdiv(rows, rows_each), batch * kv_heads)](ROWS=rows_each, **shared)
    return out.to(query.dtype).transpose(1, 2)
