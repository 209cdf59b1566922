"""The Triton kernel of `tree_delta`, `tree_kda` and `tree_ssd`: nodes in blocks of 16, in the order in which they come.

In depth-first order all ancestors of a block's nodes that lie outside the block are ancestors of its first node b: if
j < b is above some i >= b, then b lies in the subtree of j, too. So they are on one path, and few. They are gathered
into tiles of 16; trees of up to 16 levels need one. (In another order the list has all nodes that any node of the block
sees, and is longer.)

A program has a tile of value columns of one head, and loops over the blocks. It needs the u of earlier blocks, which it
has stored itself. Within a block (I + A) U = R is solved by the inverse T of I + A. T is merged from diagonal blocks of
2, 4, 8 and 16 rows: T <- T - T A_off T, where A_off is A between the two halves. Each merge is exact and no numbers
grow. (Powers of A would grow like binomials: for 64 equal keys they are wrong by 2e9.)

If each key column has a gate, A and P come from `pairs`, which is launched before this kernel.

16-bit queries and keys go into the tensor cores without conversion, and are normalised after the product. A state is
split into two tf32 terms, its first 10 bits and the rest. So products with 16-bit rows, which are exact in tf32, are
about as accurate as in fp32. Rows multiplied by a column's decay are not exact in tf32, and are split, too. fp32 models
use IEEE products.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

import torch
from torch import Tensor

from heavypath.kernels.language import tl, triton
from heavypath.kernels.recurrent.pairs import launch_pairs
from heavypath.kernels.recurrent.paths import BLOCK, Paths

_BLOCK = tl.constexpr(BLOCK)
_COLUMNS = 32  # value columns of a program


@triton.jit
def _with_state(rows, state, out, EXACT: tl.constexpr):
    """Return out + rows @ state, about as accurate as in fp32."""
    if EXACT:
        return tl.dot(rows.to(tl.float32), state, out, input_precision="ieee")
    first = (state.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    out = tl.dot(rows.to(tl.float32), first, out, input_precision="tf32")
    return tl.dot(rows.to(tl.float32), state - first, out, input_precision="tf32")


@triton.jit
def _product(one, other, out, EXACT: tl.constexpr):
    """Return out + one @ other for fp32 numbers that are not large."""
    if EXACT:
        return tl.dot(one, other, out, input_precision="ieee")
    return tl.dot(one, other, out, input_precision="tf32x3")


@triton.jit
def _rows(pointer, inside, INTERPRETED: tl.constexpr):
    """Load rows of queries or keys, in fp32 in the interpreter, which does not support bf16."""
    loaded = tl.load(pointer, mask=inside, other=0.0)
    if INTERPRETED:
        loaded = loaded.to(tl.float32)
    return loaded


@triton.jit(do_not_specialize=["N"])
def _blocks_kernel(
    query_ptr,  # [B, N, KEY_HEADS, DK], rows of a node `query_node` apart
    key_ptr,
    value_ptr,  # [B, N, HEADS, DV]; without DELTA this is u
    beta_ptr,  # [B, N, HEADS], if DELTA
    totals_ptr,  # fp64 [B, N, HEADS]; with PAIRS [B, N, HEADS, DK]
    of_keys_ptr,  # with PAIRS fp32 [B, HEADS, N, N], from `pairs`: A, undefined where a node does not see the other
    of_queries_ptr,  # P
    state_ptr,  # fp32 [B, HEADS, DK, DV]
    mask_ptr,  # [B, N, N], bytes
    above_ptr,  # int32 [B, blocks, N], the nodes outside each block that any of its nodes sees, rising
    count_ptr,  # int32 [B, blocks], the number of these nodes
    update_ptr,  # fp32 [B, N, HEADS, DV]
    out_ptr,  # [B, N, HEADS, DV]
    N,
    query_batch,
    query_node,
    key_batch,
    key_node,
    value_batch,
    value_node,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    SCALE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DELTA: tl.constexpr,
    EXACT: tl.constexpr,
    MERGES: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Each program does BV value columns of a head of a sequence."""
    tile = tl.program_id(0) % (DV // BV)
    head = tl.program_id(0) // (DV // BV) % HEADS
    batch = (tl.program_id(0) // (DV // BV * HEADS)).to(tl.int64)
    key_head = head // (HEADS // KEY_HEADS)
    place = tl.arange(0, _BLOCK)
    columns = tl.arange(0, BK)
    values = tile * BV + tl.arange(0, BV)
    query_ptr += batch * query_batch + key_head * DK
    key_ptr += batch * key_batch + key_head * DK
    value_ptr += batch * value_batch + head * DV
    state_ptr += (batch * HEADS + head) * DK * DV
    own = batch * N * HEADS + head  # of the first node, in tensors [B, N, HEADS]
    mask_ptr += batch * N * N
    pairs = (batch * HEADS + head) * N * N
    blocks = tl.cdiv(N, _BLOCK)
    for block in range(0, blocks):
        node = block * _BLOCK + place
        real = node < N
        at = node.to(tl.int64)
        if not PAIRS:
            total = tl.load(totals_ptr + own + at * HEADS, mask=real, other=0.0)
            lead = tl.exp(total.to(tl.float32))
        out = tl.zeros([_BLOCK, BV], tl.float32)
        read = tl.zeros([_BLOCK, BV], tl.float32)
        within = tl.zeros([_BLOCK, _BLOCK], tl.float32)
        system = tl.zeros([_BLOCK, _BLOCK], tl.float32)
        query_norm = tl.full([_BLOCK], 1.0, tl.float32)
        key_norm = tl.full([_BLOCK], 1.0, tl.float32)
        query_square = tl.zeros([_BLOCK], tl.float32)
        key_square = tl.zeros([_BLOCK], tl.float32)
        for first in range(0, DK, BK):
            column = first + columns
            query = _rows(query_ptr + at[:, None] * query_node + column[None, :], real[:, None], INTERPRETED)
            key = _rows(key_ptr + at[:, None] * key_node + column[None, :], real[:, None], INTERPRETED)
            state = tl.load(state_ptr + column[:, None] * DV + values[None, :])
            if PAIRS:
                at_total = (own + at * HEADS)[:, None] * DK + column[None, :]
                kept = tl.exp(tl.load(totals_ptr + at_total, mask=real[:, None], other=0.0).to(tl.float32))
                out = _product(query.to(tl.float32) * kept, state, out, EXACT)
                read = _product(key.to(tl.float32) * kept, state, read, EXACT)
            else:
                out = _with_state(query, state, out, EXACT)
                within = tl.dot(query, tl.trans(key), within, input_precision="ieee")
                if DELTA:
                    read = _with_state(key, state, read, EXACT)
                    system = tl.dot(key, tl.trans(key), system, input_precision="ieee")
            if DELTA:
                query_square += tl.sum(query.to(tl.float32) * query.to(tl.float32), 1)
                key_square += tl.sum(key.to(tl.float32) * key.to(tl.float32), 1)
        if DELTA:
            query_norm = SCALE / tl.sqrt(query_square + 1e-6)
            key_norm = 1.0 / tl.sqrt(key_square + 1e-6)
            read *= key_norm[:, None]
        out *= query_norm[:, None]
        if not PAIRS:
            out *= lead[:, None]
            read *= lead[:, None]

        count = tl.load(count_ptr + batch * blocks + block)
        for start in range(0, count, _BLOCK):
            which = start + place
            there = which < count
            other = tl.load(above_ptr + (batch * blocks + block) * N + which, mask=there, other=0).to(tl.int64)
            pair = at[:, None] * N + other[None, :]
            seen = tl.load(mask_ptr + pair, mask=real[:, None] & there[None, :], other=0) != 0
            if PAIRS:
                far = tl.load(of_queries_ptr + pairs + pair, mask=seen, other=0.0)
                far_system = tl.load(of_keys_ptr + pairs + pair, mask=seen, other=0.0)
            else:
                far = tl.zeros([_BLOCK, _BLOCK], tl.float32)
                far_system = tl.zeros([_BLOCK, _BLOCK], tl.float32)
                square = tl.zeros([_BLOCK], tl.float32)
                for first in range(0, DK, BK):
                    column = first + columns
                    query = _rows(query_ptr + at[:, None] * query_node + column[None, :], real[:, None], INTERPRETED)
                    theirs = _rows(key_ptr + other[:, None] * key_node + column[None, :], there[:, None], INTERPRETED)
                    far = tl.dot(query, tl.trans(theirs), far, input_precision="ieee")
                    if DELTA:
                        key = _rows(key_ptr + at[:, None] * key_node + column[None, :], real[:, None], INTERPRETED)
                        far_system = tl.dot(key, tl.trans(theirs), far_system, input_precision="ieee")
                        square += tl.sum(theirs.to(tl.float32) * theirs.to(tl.float32), 1)
                their_total = tl.load(totals_ptr + own + other * HEADS, mask=there, other=0.0)
                gap = (total[:, None] - their_total[None, :]).to(tl.float32)
                fade = tl.exp(tl.where(seen, gap, float("-inf")))
                if DELTA:
                    fade *= 1.0 / tl.sqrt(square + 1e-6)[None, :]
                far *= fade * query_norm[:, None]
                far_system *= fade * key_norm[:, None]
            update = tl.load(
                update_ptr + (own + other[:, None] * HEADS) * DV + values[None, :], mask=there[:, None], other=0.0
            )
            out = _product(far, update, out, EXACT)
            if DELTA:
                read = _product(far_system, update, read, EXACT)

        pair = at[:, None] * N + at[None, :]
        seen = tl.load(mask_ptr + pair, mask=real[:, None] & real[None, :], other=0) != 0
        if PAIRS:
            within = tl.load(of_queries_ptr + pairs + pair, mask=seen, other=0.0)
            system = tl.load(of_keys_ptr + pairs + pair, mask=seen, other=0.0)
        else:
            gap = (total[:, None] - total[None, :]).to(tl.float32)
            fade = tl.exp(tl.where(seen, gap, float("-inf"))) * key_norm[None, :]
            within *= fade * query_norm[:, None]
            system *= fade * key_norm[:, None]
        update = tl.load(value_ptr + at[:, None] * value_node + values[None, :], mask=real[:, None], other=0.0)
        update = update.to(tl.float32)
        if DELTA:
            beta = tl.load(beta_ptr + own + at * HEADS, mask=real, other=0.0).to(tl.float32)
            system *= beta[:, None]
            system = tl.where(place[:, None] > place[None, :], system, 0.0)
            inverse = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
            inverse -= tl.where((place[:, None] >> 1) == (place[None, :] >> 1), system, 0.0)
            for power in range(1, MERGES):
                halves = (place[:, None] >> power) != (place[None, :] >> power)
                between = halves & ((place[:, None] >> (power + 1)) == (place[None, :] >> (power + 1)))
                nothing = tl.zeros([_BLOCK, _BLOCK], tl.float32)
                lower = _product(inverse, tl.where(between, system, 0.0), nothing, EXACT)
                inverse -= _product(lower, inverse, nothing, EXACT)
            right = beta[:, None] * (update - read)
            update = _product(inverse, right, tl.zeros([_BLOCK, BV], tl.float32), EXACT)
        out = _product(within, update, out, EXACT)
        stored = (own + at[:, None] * HEADS) * DV + values[None, :]
        tl.store(update_ptr + stored, update, mask=real[:, None])
        tl.store(out_ptr + stored, out.to(out_ptr.dtype.element_ty), mask=real[:, None])
        tl.debug_barrier()  # the next block reads rows of u that other threads have stored


def launch_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor | None,
    total: Tensor,
    state: Tensor,
    paths: Paths,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, N, H, Dv] and u fp32 [B, N, H, Dv] of all nodes of trees that come in one pass.

    beta: None for `tree_ssd`, whose values are u; total: fp64 [B, N, H], or [B, N, H, Dk] for `tree_kda`
    The other arguments are those of `tree_delta`.

    Raises ValueError if the kernel does not support the shapes, strides or dtypes.
    """
    batch, nodes, heads, columns = value.shape
    key_heads, key_columns = key.shape[2:]
    if state.dtype != torch.float32 or not state.is_contiguous():
        raise ValueError(f"impl 'triton' takes contiguous states in float32, got {state.dtype} {[*state.stride()]}")
    if key_columns % 16 or columns % 16 or key_columns & (key_columns - 1) or columns & (columns - 1):
        raise ValueError(
            f"impl 'triton' takes key and value columns that are powers of two, 16 or more, got {key_columns} and "
            f"{columns}; take impl 'torch'"
        )
    if paths.before:
        raise ValueError("impl 'triton' takes trees in one pass; take impl 'torch' for those that grow")
    query, key, value = (
        each if each.stride(3) == 1 and each.stride(2) == each.shape[3] else each.contiguous()
        for each in (query, key, value)
    )
    exact = torch.float32 in (query.dtype, key.dtype)
    if exact:
        query = query.float()
        key = key.float()
    update = torch.empty(value.shape, dtype=torch.float32, device=value.device)
    out = torch.empty(value.shape, dtype=torch.float32 if beta is None else query.dtype, device=value.device)
    above, count = paths.outside
    wide = min(_COLUMNS, columns)
    has_pairs = total.dim() == 4
    total = total.contiguous()
    of_keys, of_queries = launch_pairs(query, key, total, paths) if has_pairs else (None, None)
    with torch.cuda.device_of(value):
        _blocks_kernel[(batch * heads * (columns // wide),)](
            query,
            key,
            value,
            None if beta is None else beta.contiguous(),
            total,
            of_keys,
            of_queries,
            state,
            paths.mask.contiguous().view(torch.int8),
            above,
            count,
            update,
            out,
            nodes,
            query.stride(0),
            query.stride(1),
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            HEADS=heads,
            KEY_HEADS=key_heads,
            DK=key_columns,
            DV=columns,
            SCALE=key_columns**-0.5,
            BK=min(key_columns, 16 if exact else 64),
            BV=wide,
            DELTA=beta is not None,
            EXACT=exact,
            MERGES=BLOCK.bit_length() - 1,
            PAIRS=has_pairs,
            INTERPRETED=not query.is_cuda,
            num_warps=4,
            num_stages=1,
            enable_fp_fusion=False,
        )
    return out, update
