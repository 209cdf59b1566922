"""Prune a grown tree to its best slots: choose them, number them in heavy-path order, and make the target's input.

    kept       the N slots of largest value; ties to the shallower slot, then to the one drafted earlier
    order      `ordering.heavy_path_order` of the kept slots that have a token; the others come last, as absent nodes
    node j     slot s = kept[order.permutation[j]]: token, rank and depth of s, noise row root_row + s, and s itself as
               its row in the draft's cache

On a GPU this is three launches. The first finds the N-th largest value bit by bit: values are not negative, and such
numbers have the same order as their bits, read as integers. The second is `heavy_path_order`.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.language import tl, triton
from heavypath.kernels.ordering import MAX_NODES, Ordering, heavy_path_order, launch_order
from heavypath.kernels.trees.levels import NodeInputs
from heavypath.kernels.trees.slots import Level, Roots, Slots, host


class Assembled(NamedTuple):
    """Trees of N nodes in heavy-path order; LongTensor[B, N] each.

    tokens:      -1 for an absent node. Absent nodes come last; each has the node before it as parent, and depth 0,
                 which means nothing
    parents, ranks, depths, subtree_end: as in a tree
    slots:       the slot in which the node was drafted
    inner:       the index of the node's row in the draft's logits, flattened to [B * L, V]; L is the number of slots
                 above the last level. Nodes of the last level have no children, and get another node's row
    inputs:      the nodes as input of a model
    """

    tokens: Tensor
    parents: Tensor
    ranks: Tensor
    depths: Tensor
    subtree_end: Tensor
    slots: Tensor
    inner: Tensor
    inputs: NodeInputs


def assemble(slots: Slots, roots: Roots, last: Level, nodes: int, trims: bool) -> Assembled:
    """Make trees of at most `nodes` nodes, the root included, from the drafted slots [B, S].

    last:  the last level
    trims: remove nodes that are absent from all trees, which synchronises with the host; `launch` cannot do it

    `StepKernels.assemble` is this function, `launch`, or its C++. Nothing is checked, except that the latter two raise
    ValueError for slots that are not contiguous.
    """
    nodes = min(nodes, last.end)
    parents, ranks, depths, tokens, values = (host(field[:, : last.end]) for field in slots[:5])
    # A stable sort: the root, of infinite value, comes first, and empty slots, of value 0, come last.
    kept = np.sort(np.argsort(-values, axis=1, kind="stable")[:, :nodes], axis=1)
    each = np.arange(len(kept))[:, None]
    number = np.zeros_like(parents)
    number[each, kept] = np.arange(nodes)
    parent = parents[each, kept]
    token = tokens[each, kept]
    parent = np.where((parent >= 0) & (token >= 0), number[each, np.maximum(parent, 0)], -1)
    rank = np.where(parent >= 0, ranks[each, kept], 0)
    order = heavy_path_order(torch.from_numpy(parent), torch.from_numpy(rank), impl="torch")
    own = kept[each, host(order.permutation)]
    if trims:
        nodes = int((token >= 0).sum(1).max())  # absent ones come last
        order = Ordering(*(field[:, :nodes] for field in order))
        own = own[:, :nodes]
    token = tokens[each, own]
    index = np.arange(nodes)
    above = host(order.parents)
    absent = (above < 0) & (index > 0)
    above = np.where(absent, index - 1, above)
    depth = np.where(absent, 0, depths[each, own])
    inner = np.minimum(own, last.first - 1) + each * last.first
    token, above, depth, own, inner = (
        torch.from_numpy(field).to(slots.tokens.device) for field in (token, above, depth, own, inner)
    )
    ranks = order.ranks.to(token.device)
    ends = order.subtree_end.to(token.device)
    nodes_in_order = torch.arange(nodes, device=token.device)
    inputs = NodeInputs.of(roots.lengths, token, depth, nodes_in_order, above, roots.noise_rows[:, None] + own)
    return Assembled(token, above, ranks, depth, ends, own, inner, inputs)


@triton.jit(do_not_specialize=["S", "DRAFTED", "N"])
def _keep_kernel(
    parents_ptr,  # [B, S], as the next three
    ranks_ptr,
    tokens_ptr,
    values_ptr,  # as int64
    kept_ptr,  # [B, N], as all below
    kept_parents_ptr,
    kept_ranks_ptr,
    S,
    DRAFTED,  # of the S slots
    N,
    BLOCK: tl.constexpr,
):
    """Each program does one tree: stores the kept slots in order, with parents as indices of kept slots."""
    sequence = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    exists = index < DRAFTED
    at = sequence * S + index
    value = tl.load(values_ptr + at, mask=exists, other=-1)
    least = tl.zeros([], tl.int64)  # the N-th largest value
    for i in range(63):
        higher = least | (tl.full([], 1, tl.int64) << (62 - i))
        least = tl.where(tl.sum((value >= higher).to(tl.int32), 0) >= N, higher, least)
    above = value > least
    ties = (value == least).to(tl.int32)
    kept = above | ((ties > 0) & (tl.cumsum(ties, 0) <= N - tl.sum(above.to(tl.int32), 0)))
    number = tl.cumsum(kept.to(tl.int32), 0) - 1

    parent = tl.load(parents_ptr + at, mask=exists, other=-1).to(tl.int32)
    there = (parent >= 0) & (tl.load(tokens_ptr + at, mask=exists, other=-1) >= 0)
    parent = tl.where(there, tl.gather(number, tl.maximum(parent, 0), 0), -1)
    rank = tl.where(there, tl.load(ranks_ptr + at, mask=exists, other=0), 0)
    out = sequence * N + number
    tl.store(kept_ptr + out, index.to(tl.int64), mask=kept)
    tl.store(kept_parents_ptr + out, parent.to(tl.int64), mask=kept)
    tl.store(kept_ranks_ptr + out, rank, mask=kept)


@triton.jit(do_not_specialize=["S", "INNER", "N"])
def _number_kernel(
    slot_tokens_ptr,  # [B, S], as the next one
    slot_depths_ptr,
    kept_ptr,  # [B, N], as the next two
    permutation_ptr,
    order_parents_ptr,
    lengths_ptr,  # [B], as the next one
    root_rows_ptr,
    tokens_ptr,  # [B, N], as all below
    parents_ptr,
    depths_ptr,
    slots_ptr,
    inner_ptr,
    fed_tokens_ptr,
    positions_ptr,
    cache_rows_ptr,
    parent_rows_ptr,
    noise_rows_ptr,
    S,
    INNER,  # of the S slots
    N,
    BLOCK: tl.constexpr,
):
    """Each program does one block of nodes of one tree."""
    sequence = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = index < N
    at = sequence * N + index
    old = tl.load(permutation_ptr + at, mask=exists, other=0)
    slot = tl.load(kept_ptr + sequence * N + old, mask=exists, other=0)
    token = tl.load(slot_tokens_ptr + sequence * S + slot, mask=exists, other=-1)
    depth = tl.load(slot_depths_ptr + sequence * S + slot, mask=exists, other=0)
    parent = tl.load(order_parents_ptr + at, mask=exists, other=-1)
    absent = (parent < 0) & (index > 0)
    parent = tl.where(absent, index - 1, parent)
    depth = tl.where(absent, 0, depth)
    length = tl.load(lengths_ptr + sequence)
    tl.store(tokens_ptr + at, token, mask=exists)
    tl.store(parents_ptr + at, parent, mask=exists)
    tl.store(depths_ptr + at, depth, mask=exists)
    tl.store(slots_ptr + at, slot, mask=exists)
    tl.store(inner_ptr + at, sequence * INNER + tl.minimum(slot, INNER - 1), mask=exists)
    tl.store(fed_tokens_ptr + at, tl.maximum(token, 0), mask=exists)
    tl.store(positions_ptr + at, length + depth, mask=exists)
    tl.store(cache_rows_ptr + at, length + index, mask=exists)
    tl.store(parent_rows_ptr + at, length + parent, mask=exists)
    tl.store(noise_rows_ptr + at, tl.load(root_rows_ptr + sequence) + slot, mask=exists)


def launch(slots: Slots, roots: Roots, last: Level, nodes: int, trims: bool) -> Assembled:
    """Make the trees as `assemble` does, in three launches without host synchronisation; trims must be False."""
    slots.check_contiguous()
    batch, stride = slots.tokens.shape
    nodes = min(nodes, last.end)
    if trims or nodes > MAX_NODES:
        raise ValueError(f"on a GPU trees have at most {MAX_NODES} nodes and are not trimmed, got {nodes}, {trims=}")

    def room() -> Tensor:
        return slots.tokens.new_empty(batch, nodes)

    kept = room()
    kept_parents = room()
    kept_ranks = room()
    tokens = room()
    parents = room()
    depths = room()
    own = room()
    inner = room()
    inputs = NodeInputs(room(), room(), room(), room(), room())
    block = max(32, triton.next_power_of_2(last.end))
    small = 128
    with torch.cuda.device_of(slots.tokens):
        _keep_kernel[(batch,)](
            parents_ptr=slots.parents,
            ranks_ptr=slots.ranks,
            tokens_ptr=slots.tokens,
            values_ptr=slots.values.view(torch.long),
            kept_ptr=kept,
            kept_parents_ptr=kept_parents,
            kept_ranks_ptr=kept_ranks,
            S=stride,
            DRAFTED=last.end,
            N=nodes,
            BLOCK=block,
            num_warps=max(1, min(16, block // 128)),
            enable_fp_fusion=False,
        )
        order = launch_order(kept_parents, kept_ranks)
        _number_kernel[(batch, triton.cdiv(nodes, small))](
            slot_tokens_ptr=slots.tokens,
            slot_depths_ptr=slots.depths,
            kept_ptr=kept,
            permutation_ptr=order.permutation,
            order_parents_ptr=order.parents,
            lengths_ptr=roots.lengths.contiguous(),
            root_rows_ptr=roots.noise_rows.contiguous(),
            tokens_ptr=tokens,
            parents_ptr=parents,
            depths_ptr=depths,
            slots_ptr=own,
            inner_ptr=inner,
            fed_tokens_ptr=inputs.tokens,
            positions_ptr=inputs.positions,
            cache_rows_ptr=inputs.cache_rows,
            parent_rows_ptr=inputs.parent_rows,
            noise_rows_ptr=inputs.noise_rows,
            S=stride,
            INNER=last.first,
            N=nodes,
            BLOCK=small,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return Assembled(tokens, parents, order.ranks, depths, order.subtree_end, own, inner, inputs)
