"""Update a recurrent state by an accepted path, from the state before the tree and the `KeptNodes` of the path.

    S' = e^(G_l) S0 + sum over the path j of e^(G_l - G_j) k_j u_j^T         l: the last accepted node

It is one product and no recurrence. An empty path leaves S0 unchanged, bit by bit. For up to 16 nodes the kernel reads
and writes each number of a state once. It does not touch states that stay unchanged.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import torch
from torch import Tensor

from heavypath.kernels.implementation import choose_impl, operator
from heavypath.kernels.language import tl, triton
from heavypath.kernels.recurrent.paths import BLOCK, KeptNodes, unit

_BLOCK = tl.constexpr(BLOCK)


@operator
def accept_state(
    state: Tensor, kept: KeptNodes, path: Tensor, count: Tensor, *, normalised: bool, impl: str = "auto"
) -> None:
    """Update states fp32 [B, H, Dk, Dv] by the first `count` nodes of a path, in place.

    path:  LongTensor[B, P], columns of `kept`; after the first `count`, any valid columns
    count: LongTensor[B], 0 to leave a state unchanged
    normalised: whether keys are divided by their norms, as in delta rules
    impl:  see `implementation`

    Raises ValueError if the kernel does not support the shapes, strides or dtypes.
    """
    columns = state.shape[2:]
    plain = all(size >= 16 and size & (size - 1) == 0 for size in columns)
    if (impl != "auto" or plain) and choose_impl("accept_state", impl, state) == "triton":
        return _launch(state, kept, path, count, normalised)
    wide = state.dtype
    batch = torch.arange(len(path), device=path.device)
    keys, values, totals = (field[batch[:, None], path] for field in kept)
    keys = (unit(keys) if normalised else keys).to(wide).repeat_interleave(values.shape[2] // keys.shape[2], 2)
    end = totals[batch, (count - 1).clamp(min=0)]  # [B, H] or [B, H, Dk]
    taken = (torch.arange(path.shape[1], device=path.device) < count[:, None])[..., None, None]  # the rest may be NaN
    gap = (end[:, None] - totals).masked_fill(~taken if totals.dim() == 4 else ~taken[..., 0], -torch.inf)
    fade = gap.to(wide).exp()
    faded = keys * (fade if fade.dim() == 4 else fade[..., None])
    lead = end.to(wide).exp().masked_fill((count == 0).view(-1, *[1] * (end.dim() - 1)), 1)
    state.mul_(lead[..., None] if lead.dim() == 3 else lead[..., None, None])
    added = values.to(wide).masked_fill(~taken, 0)
    flat = state.flatten(0, 1)  # a copy if the strides require it
    flat.baddbmm_(faded.permute(0, 2, 3, 1).flatten(0, 1), added.transpose(1, 2).flatten(0, 1))
    if not state.is_contiguous():
        state.copy_(flat.view(state.shape))
    return None


@triton.jit(do_not_specialize=["N", "P"])
def _accept_kernel(
    key_ptr,  # [B, N, KEY_HEADS, DK], rows of a node `key_node` apart
    update_ptr,  # fp32 [B, N, HEADS, DV]
    totals_ptr,  # fp64 [B, N, HEADS, GATES]
    state_ptr,  # fp32 [B, HEADS, DK, DV]
    path_ptr,  # [B, P]
    count_ptr,  # [B]
    N,
    P,
    key_batch,
    key_node,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    GATES: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    NORMALISED: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Each program does BV value columns of a head of a sequence. GATES is 1, or DK if each key column has a gate."""
    tile = tl.program_id(0) % (DV // BV)
    head = tl.program_id(0) // (DV // BV) % HEADS
    batch = (tl.program_id(0) // (DV // BV * HEADS)).to(tl.int64)
    count = tl.load(count_ptr + batch).to(tl.int32)
    if count > 0:
        key_ptr += batch * key_batch + head // (HEADS // KEY_HEADS) * DK
        state_ptr += (batch * HEADS + head) * DK * DV
        path_ptr += batch * P
        own = batch * N * HEADS + head
        last = own + tl.load(path_ptr + count - 1) * HEADS
        place = tl.arange(0, _BLOCK)
        values = tile * BV + tl.arange(0, BV)
        columns = tl.arange(0, BK)
        for start in range(0, count, _BLOCK):
            there = start + place < count
            node = tl.load(path_ptr + start + place, mask=there, other=0)
            update = tl.load(
                update_ptr + (own + node * HEADS)[:, None] * DV + values[None, :], mask=there[:, None], other=0.0
            )
            norm = tl.full([_BLOCK], 1.0, tl.float32)
            if NORMALISED:
                square = tl.zeros([_BLOCK], tl.float32)
                for first in range(0, DK, BK):
                    at_key = node[:, None] * key_node + first + columns[None, :]
                    key = tl.load(key_ptr + at_key, mask=there[:, None], other=0.0).to(tl.float32)
                    square += tl.sum(key * key, 1)
                norm = 1.0 / tl.sqrt(square + 1e-6)
            for first in range(0, DK, BK):
                column = first + columns
                gate = column if GATES > 1 else columns * 0
                end = tl.load(totals_ptr + last * GATES + gate)
                total = tl.load(
                    totals_ptr + (own + node * HEADS)[:, None] * GATES + gate[None, :], mask=there[:, None], other=0.0
                )
                gap = tl.where(there[:, None], (end[None, :] - total).to(tl.float32), float("-inf"))
                at_key = node[:, None] * key_node + column[None, :]
                key = tl.load(key_ptr + at_key, mask=there[:, None], other=0.0).to(tl.float32)
                key *= tl.exp(gap) * norm[:, None]
                numbers = state_ptr + column[:, None] * DV + values[None, :]
                state = tl.load(numbers)
                if start == 0:
                    state *= tl.exp(end.to(tl.float32))[:, None]
                if EXACT:
                    state = tl.dot(tl.trans(key), update, state, input_precision="ieee")
                else:
                    state = tl.dot(tl.trans(key), update, state, input_precision="tf32x3")
                tl.store(numbers, state)
            tl.debug_barrier()  # the next iteration adds to numbers that other threads have stored


def _launch(state: Tensor, kept: KeptNodes, path: Tensor, count: Tensor, normalised: bool) -> None:
    """Check the arguments and launch the kernel of `accept_state`."""
    batch, heads, key_columns, columns = state.shape
    key, update, totals = kept
    if state.dtype != torch.float32 or not state.is_contiguous():
        raise ValueError(f"impl 'triton' takes contiguous states in float32, got {state.dtype} {[*state.stride()]}")
    if any(size < 16 or size & (size - 1) for size in (key_columns, columns)):
        raise ValueError(
            f"impl 'triton' takes key and value columns that are powers of two, 16 or more, got {key_columns} and "
            f"{columns}; take impl 'torch'"
        )
    nodes = update.shape[1]
    gates = (heads, key_columns) if totals.dim() == 4 else (heads,)
    for name, each, shape in (
        ("keys", key, (batch, nodes, key.shape[2], key_columns)),
        ("values", update, (batch, nodes, heads, columns)),
        ("totals", totals, (batch, nodes, *gates)),
        ("path", path, (batch, path.shape[1])),
        ("count", count, (batch,)),
    ):
        if each.shape != shape or (name == "keys" and heads % shape[2]):
            raise ValueError(f"{name} must be {[*shape]} beside a state {[*state.shape]}, got {[*each.shape]}")
    if key.stride(3) != 1 or key.stride(2) != key_columns:
        key = key.contiguous()
    exact = key.dtype == torch.float32
    wide = min(32, columns)
    with torch.cuda.device_of(state):
        _accept_kernel[(batch * heads * (columns // wide),)](
            key,
            update.contiguous(),
            totals.contiguous(),
            state,
            path.contiguous(),
            count.contiguous(),
            update.shape[1],
            path.shape[1],
            key.stride(0),
            key.stride(1),
            HEADS=heads,
            KEY_HEADS=key.shape[2],
            DK=key_columns,
            DV=columns,
            GATES=1 if totals.dim() == 3 else key_columns,
            BK=min(key_columns, 32),
            BV=wide,
            NORMALISED=normalised,
            EXACT=exact,
            num_warps=4,
            enable_fp_fusion=False,
        )
