"""The Triton kernel of `tree_attention`. That file has the formula and the reference, `launch` launches the kernel.

A program owns BLOCK_M query rows of one key head. The rows are pairs (node, query head of the group), node by node, so
that the heads of a group share every key they load. The program walks over

    the prefix, in blocks of BLOCK_N rows, without a mask except for the blocks at its ends, and
    the tree, by blocks: for the keys of nodes j0 .. j1 - 1 and the queries of nodes i0 .. i1 a block is
        empty  iff  max end[j0 : j1] <= i0  or  j0 > i1        and is skipped
        full   iff  min end[j0 : j1] > i1  and  j1 <= i0 + 1   and needs no mask
    Both tests are exact. They read N integers once and give one bit for each block, in two 64-bit words.

with the usual online softmax, in base 2. Few nodes would leave most of a GPU idle. So the prefix is split into up to
SPLITS parts, with a program for each (split-K). It stores a sum, a maximum and an unnormalised output, and the program
that finishes last (see `tickets`) merges the results of all parts p, for each query row:

    out = sum_p 2^(peak_p - peak) out_p / sum_p 2^(peak_p - peak) total_p,   peak = max_p peak_p

It reads its own part back, too, so the result does not depend on which program is last. The split depends only on the
sequence's length and padding, the number of nodes, the model's shape and the GPU, never on the rest of the batch.
Lengths are read on the device, so one CUDA graph serves all lengths.

Costs, for G query heads per key head, L >> N and 2-byte numbers: a head's keys and values are 4 L D bytes. They take
4 G N L D FLOPs, which is G N FLOPs per byte. An H200 reaches about 790 TFLOP/s and 4.3 TB/s. So above 184 FLOPs per
byte tensor cores are the limit, below it memory is.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false

from heavypath.kernels.language import tl, triton
from heavypath.kernels.tickets import is_last

MIN_SPLIT = 256  # fewest rows that are worth a separate program; a multiple of every BLOCK_N
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _cut(
    batch,
    length,
    lengths,
    lengths_stride,
    first_row,
    nodes,
    window,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return a sequence's length and first row, and the split of its prefix: `parts` of `size` rows from `begin` on.

    The tree belongs to the last part.
    """
    if lengths is not None:
        length = tl.load(lengths + batch * lengths_stride).to(tl.int32)
    first = 0
    if first_row is not None:
        first = tl.load(first_row + batch).to(tl.int32)
    begin = first
    if window is not None:
        begin = tl.maximum(begin, length - window)  # the first row that a query without visible nodes sees
    begin = tl.minimum(begin, length) // BLOCK_N * BLOCK_N
    span = length - begin + tl.minimum(nodes, MIN_SPLIT)
    size = tl.maximum(MIN_SPLIT, tl.cdiv(tl.cdiv(span, SPLITS), BLOCK_N) * BLOCK_N)
    return length, first, begin, size, tl.cdiv(span, size)


@triton.jit
def _attend(
    query,
    query_rows,
    query_mask,
    key_rows,
    value_rows,
    visible,
    readable,
    acc,
    peak,
    total,
    scale,
    softcap,
    columns,
    HEAD_DIM: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Add one block of keys to the online softmax.

    visible [BLOCK_M, BLOCK_N]: which keys count; readable [BLOCK_N]: which may be loaded; None means all.
    query is None in float32, where it would fill the registers: it is then loaded again for each block.
    """
    if query is None:
        query = tl.load(query_rows, mask=query_mask, other=0.0)
    inside = columns[None, :] < HEAD_DIM
    if readable is not None:
        inside = inside & readable[:, None]
    keys = tl.load(key_rows, mask=inside, other=0.0)
    values = tl.load(
        value_rows, mask=inside, other=0.0
    )  # before the first product, so that one wait for memory serves both
    if UPCAST:
        keys = keys.to(tl.float32)
        values = values.to(tl.float32)
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
    acc = tl.dot(weights.to(values.dtype), values, acc * fade[:, None], input_precision="ieee")
    return acc, new_peak, total


@triton.jit
def _either(some, others):
    return some | others


@triton.jit
def _lowest_bit(bits):
    """Return the index of the lowest set bit, read from the exponent of that power of two in fp32."""
    power = (bits & (0 - bits)).to(tl.float32)
    return ((power.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127


# No integer is specialised, and only those pointers whose alignment matters. So launches with other lengths and strides
# use the same variant: fewer are compiled, and `Variant` may skip Triton's lookup.
_SIZES = ["queries", "nodes", "kv_heads", "lengths_stride"]
_STRIDES = [
    f"{tensor}_{axis}" for tensor, axes in (("query", "bhn"), ("key", "bhs"), ("value", "bhs")) for axis in axes
]
_MASK_STRIDES = ["ends_stride", "words_stride", "counts_stride", "word_count"]
_MASKS = ["lengths", "first_row", "ends", "words", "counts"]


@triton.jit(
    do_not_specialize=["length", "window", *_SIZES, *_MASK_STRIDES, *_STRIDES], do_not_specialize_on_alignment=_MASKS
)
def tree_attention_kernel(
    query,
    key,
    value,
    out,
    partial,
    tickets,
    length,
    lengths,
    first_row,
    ends,
    words,
    counts,
    scale,
    softcap,
    window,
    queries,
    nodes,
    kv_heads,
    lengths_stride,
    ends_stride,
    words_stride,
    counts_stride,
    word_count,
    query_b,
    query_h,
    query_n,
    key_b,
    key_h,
    key_s,
    value_b,
    value_h,
    value_s,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MERGED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TOUCHED: tl.constexpr,
    TREE_BLOCKS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One program for each tile of (node, head of the group) rows, part of the keys, and (sequence, key head).

    Without ends and words the tree is a chain. Strides of query, key and value count units of 8 elements; out is
    [B, Q, Hq, D]. With a window, words are narrowed to it, and counts say how many nodes a query sees; with ends, how
    many it would see without the window; a chain needs no counts.
    """
    tile = tl.program_id(0)
    part = tl.program_id(1)
    batch = tl.program_id(2) // kv_heads
    kv_head = tl.program_id(2) % kv_heads
    length, first, begin, size, parts = _cut(
        batch, length, lengths, lengths_stride, first_row, nodes, window, SPLITS, MIN_SPLIT, BLOCK_N
    )
    if part >= parts:
        return
    start = begin + part * size
    stop = tl.maximum(tl.minimum(start + size, length), start)

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node = row // GROUP
    head = kv_head * GROUP + row % GROUP
    asks = row < queries * GROUP
    columns = tl.arange(0, BLOCK_D)
    offsets = tl.arange(0, BLOCK_N)
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
    key_s = key_s * eight
    value_s = value_s * eight

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    blocks = tl.arange(0, TREE_BLOCKS)
    if words is None:  # the loads of the ends overlap with those of the prefix
        keys = blocks[:, None] * BLOCK_N + offsets[None, :]
        key_ends = tl.where(keys < nodes, nodes, 0)
        if ends is not None:
            key_ends = tl.load(ends + batch * ends_stride + keys, mask=keys < nodes, other=0).to(tl.int32)

    # The prefix: first the blocks that all queries see in full, then the masked blocks at both ends.
    sees = tl.full([BLOCK_M], 0, tl.int32) + first  # the first prefix row that each query sees
    count = tl.zeros([BLOCK_M], tl.int32)
    if window is not None:
        count = node + 1
        if counts is not None:
            count = tl.load(counts + batch * counts_stride + node, mask=asks, other=0)
        sees = tl.maximum(sees, length + count - window)
    whole_start = start
    whole_stop = start + (stop - start) // BLOCK_N * BLOCK_N
    if (first_row is not None) or (window is not None):
        all_see = first  # from this row on, every query sees the prefix
        if window is not None:  # a path is no longer than the number of its last node; a maximum here would spill
            longest = nodes if words is not None else (tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1
            all_see = tl.maximum(all_see, length + longest - window)
        whole_start = tl.maximum(start, tl.minimum(tl.cdiv(all_see, BLOCK_N) * BLOCK_N, whole_stop))
    for block in tl.range(whole_start, whole_stop, BLOCK_N):
        acc, peak, total = _attend(
            query_tile,
            query_rows,
            query_mask,
            key + block * key_s + key_offsets,
            value + block * value_s + value_offsets,
            None,
            None,
            acc,
            peak,
            total,
            scale,
            softcap,
            columns,
            HEAD_DIM,
            UPCAST,
        )
    for masked in tl.range(start, stop - (whole_stop - whole_start), BLOCK_N, num_stages=1):
        block = masked + tl.where(masked < whole_start, 0, whole_stop - whole_start)
        at = block + offsets
        acc, peak, total = _attend(
            query_tile,
            query_rows,
            query_mask,
            key + block * key_s + key_offsets,
            value + block * value_s + value_offsets,
            (at[None, :] >= sees[:, None]) & (at < stop)[None, :],
            (at >= first) & (at < stop),
            acc,
            peak,
            total,
            scale,
            softcap,
            columns,
            HEAD_DIM,
            UPCAST,
        )

    if part == parts - 1:
        # The tree: find the blocks that this tile sees, one bit for each, then visit only these.
        key += length * key_s
        value += length * value_s
        first_node = tile * BLOCK_M // GROUP
        last_node = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, queries - 1)
        if words is None:
            occupied = (tl.max(key_ends, 1) > first_node) & (blocks * BLOCK_N <= last_node)
            full = (tl.min(key_ends, 1) > last_node) & (blocks * BLOCK_N + (BLOCK_N - 1) <= first_node)
        else:
            touched = first_node + tl.arange(0, TOUCHED)
            word = tl.arange(0, TREE_BLOCKS * BLOCK_N // 32)
            table = tl.load(
                words + batch * words_stride + touched[:, None] * word_count + word[None, :],
                mask=(touched <= last_node)[:, None] & (word < word_count)[None, :],
                other=0,
            )
            nonzero = tl.max((table != 0).to(tl.int32), 0)
            ones = tl.min(((table == -1) | (touched > last_node)[:, None]).to(tl.int32), 0)
            occupied = tl.max(tl.reshape(nonzero, [TREE_BLOCKS, BLOCK_N // 32]), 1) != 0
            full = tl.min(tl.reshape(ones, [TREE_BLOCKS, BLOCK_N // 32]), 1) != 0
        bit = tl.full([TREE_BLOCKS], 1, tl.int64) << blocks.to(tl.int64)

        if (first_row is None) and (window is None) and TREE_BLOCKS > 1:
            full_bits = tl.sum(tl.where(full, bit, 0), 0)
            for _ in tl.range(0, tl.sum(full.to(tl.int32), 0)):
                block = _lowest_bit(full_bits) * BLOCK_N
                full_bits = full_bits & (full_bits - 1)
                acc, peak, total = _attend(
                    query_tile,
                    query_rows,
                    query_mask,
                    key + block * key_s + key_offsets,
                    value + block * value_s + value_offsets,
                    None,
                    None,
                    acc,
                    peak,
                    total,
                    scale,
                    softcap,
                    columns,
                    HEAD_DIM,
                    UPCAST,
                )
            occupied = occupied & (full == 0)
        bits = tl.sum(tl.where(occupied, bit, 0), 0)
        for _ in tl.range(0, tl.sum(occupied.to(tl.int32), 0)):
            block = _lowest_bit(bits) * BLOCK_N
            bits = bits & (bits - 1)
            at = block + offsets
            readable = at < nodes
            if words is None:
                visible = at[None, :] <= node[:, None]
                if ends is not None:
                    end = tl.load(ends + batch * ends_stride + at, mask=at < nodes, other=0).to(tl.int32)
                    visible = visible & (node[:, None] < end[None, :])
                if window is not None:
                    above = at + 1
                    if counts is not None:
                        above = tl.load(counts + batch * counts_stride + at, mask=at < nodes, other=0)
                    visible = visible & (count[:, None] - above[None, :] < window)
            else:
                in_word = offsets % 32
                base = words + batch * words_stride + node * word_count + block // 32
                low = tl.load(base, mask=asks, other=0)
                bits_of = low[:, None]
                seen = tl.reduce(low, 0, _either)
                if BLOCK_N == 64:
                    high = tl.load(base + 1, mask=asks, other=0)
                    bits_of = tl.where((offsets < 32)[None, :], bits_of, high[:, None])
                    seen = tl.where(offsets < 32, seen, tl.reduce(high, 0, _either))
                visible = ((bits_of >> in_word[None, :]) & 1) != 0
                # Nodes that are not drafted yet may have rows with NaN, which a weight of 0 would not remove.
                readable = ((seen >> in_word) & 1) != 0
            if first_row is not None:
                readable = readable & (length + at >= first)
                visible = visible & readable[None, :]
            acc, peak, total = _attend(
                query_tile,
                query_rows,
                query_mask,
                key + block * key_s + key_offsets,
                value + block * value_s + value_offsets,
                visible,
                readable,
                acc,
                peak,
                total,
                scale,
                softcap,
                columns,
                HEAD_DIM,
                UPCAST,
            )

    out += batch.to(tl.int64) * (queries * kv_heads * GROUP * HEAD_DIM)
    if parts == 1:
        acc = acc / tl.where(total == 0, 1.0, total)[:, None]
        out_row = node * (kv_heads * GROUP) + head
        tl.store(out + (out_row[:, None] * HEAD_DIM + columns[None, :]), acc, mask=query_mask)
    elif SPLITS > 1:
        rows = queries * GROUP
        slots = tl.num_programs(2).to(tl.int64) * SPLITS * rows
        first_slot = tl.program_id(2).to(tl.int64) * SPLITS * rows
        slot = first_slot + part * rows
        tl.store(partial + slot * HEAD_DIM + (row[:, None] * HEAD_DIM + columns[None, :]), acc, mask=query_mask)
        tl.store(partial + slots * HEAD_DIM + slot + row, peak, mask=asks)
        tl.store(partial + slots * (HEAD_DIM + 1) + slot + row, total, mask=asks)
        if is_last(tickets + tl.program_id(2) * tl.num_programs(0) + tile, parts):
            for some in tl.range(tile * BLOCK_M, tl.minimum(tile * BLOCK_M + BLOCK_M, rows), MERGED):
                _merge(
                    out,
                    partial,
                    some + tl.arange(0, MERGED),
                    columns,
                    first_slot,
                    slots,
                    parts,
                    kv_head,
                    kv_heads,
                    rows,
                    GROUP,
                    HEAD_DIM,
                    BLOCK_D,
                    SPLITS,
                    MERGED,
                )


@triton.jit
def _merge(
    out,
    partial,
    row,
    columns,
    first_slot,
    slots,
    parts,
    kv_head,
    kv_heads,
    rows,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Merge the parts of some rows [MERGED] from `partial`: outputs [slots, D], then peaks [slots] and totals [slots].

    Parts are added one after another, each with all rows at once, so a part waits for memory once. Adding all parts of
    a few rows, and then those of the next rows, would wait once for each group of rows.
    """
    asks = row < rows
    mask = asks[:, None] & (columns < HEAD_DIM)[None, :]
    peaks = partial + slots * HEAD_DIM + first_slot
    totals = peaks + slots
    part = tl.arange(0, SPLITS)
    there = (part < parts)[:, None] & asks[None, :]
    every = part[:, None] * rows + row[None, :]
    peak = tl.max(tl.load(peaks + every, mask=there, other=float("-inf"), cache_modifier=".cg"), 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)  # of a query that has seen nothing
    total = tl.zeros([MERGED], tl.float32)
    merged = tl.zeros([MERGED, BLOCK_D], tl.float32)
    for each in tl.range(0, parts):
        at = each * rows + row
        weight = tl.exp2(tl.load(peaks + at, mask=asks, other=0.0, cache_modifier=".cg") - peak)
        total += weight * tl.load(totals + at, mask=asks, other=0.0, cache_modifier=".cg")
        outs = partial + (first_slot + each * rows) * HEAD_DIM + (row[:, None] * HEAD_DIM + columns[None, :])
        merged += weight[:, None] * tl.load(outs, mask=mask, other=0.0, cache_modifier=".cg")
    merged = merged / tl.where(total == 0, 1.0, total)[:, None]
    out_row = row // GROUP * (kv_heads * GROUP) + kv_head * GROUP + row % GROUP
    tl.store(out + (out_row[:, None] * HEAD_DIM + columns[None, :]), merged, mask=mask)
