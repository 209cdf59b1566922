"""Traversal verification on a GPU: `traversal` has the formulas and the reference.

A node's chain needs its weight, which its parent's chain gives. So there is a launch for each level of the tree:

    normalize   programs share each row in one pass, as in `decision`; every row of the tree is read once
    chains      for each level from the root down, the chains of its nodes, whose passes are shared by programs that are
                free (see `sharing`). A chain stores its children's weights, and the chance to end at the node itself
    choose      a program for each tree finds the first node in post-order that its coin accepts, and marks the way
    walk        as for the other methods: along the marks, and the token behind the last node (see `walk`)

Nodes that no weight reaches have no chain: those below a child that cannot be accepted, and behind one that is accepted
for certain. All chains of a level run side by side, so what takes time is, level by level, the node with most passes;
passes for children behind the one that the walk ends below are not needed, but are taken before that is known.
`bench/predict_verification.py` has the figures.

A node's depth is known from the first launch on, so a launch of chains touches nothing that another program of it
changes: it reads the weights of its own level, and stores those of the next one.
"""

# A type checker does not understand Triton kernels.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from heavypath.kernels.filter_cuts import filter_cuts
from heavypath.kernels.filtering import Filters, raised
from heavypath.kernels.nodes import Nodes, Verified
from heavypath.kernels.noise import Noise, seed_arguments
from heavypath.kernels.sharing import counters, helpers, leave
from heavypath.kernels.tickets import is_last, tickets
from heavypath.kernels.verifying.decision import Decided, coins_of, help_others, ranks_of
from heavypath.kernels.verifying.distributions import (
    CHUNK,
    FACTS,
    LANES,
    NONE,
    PIECE,
    log_prob,
    normalized,
    softmax_part,
    store_sides,
    stored_sides,
)
from heavypath.kernels.verifying.rule import Rule
from heavypath.kernels.verifying.traversal_chain import weigh_children
from heavypath.kernels.verifying.walk import launch_walk

# What is stored about a node beside what `distributions` names, by index:
#
#     states, fp32   0  its weight, 0 if none reaches it         2  log2 of the target's mass outside its children
#                    1  the chance that the walk ends at it      3  the same of the draft
#     traits, int32  0  its depth                                2  whether the draft's row is a distribution
#                    1  the first sibling of the same token      3  unused
STATES = tl.constexpr(4)
TRAITS = tl.constexpr(4)


@triton.jit
def _depth(node, parents_ptr, max_depth):
    """Edges from the root to a node, or max_depth + 1 if there are more."""
    depth = tl.full([], 0, tl.int32)
    while (node > 0) & (depth <= max_depth):
        above = tl.load(parents_ptr + node).to(tl.int32)
        node = tl.where(above < node, above, 0)
        depth += 1
    return depth


@triton.jit(do_not_specialize=["max_depth", "temperature", "draft_temperature"])
def _normalize_kernel(
    tokens_ptr,  # [B, N]
    parents_ptr,  # [B, N], rows parents_stride apart
    target_ptr,  # [B, N, V]
    draft_ptr,  # [B, N, V]
    cut_ptr,  # [B, N] if FILTERED, as end_ptr: where the target's rows are cut off, see `filter_cuts`
    end_ptr,
    draft_cut_ptr,  # the same of the draft's rows, if DRAFT_FILTERED
    draft_end_ptr,
    choice_ptr,  # int32 [B, N]: -1, or -2 for a row without a distribution
    left_out_ptr,  # int32 [B, N] if LEAVES_OUT
    facts_ptr,  # fp32 [B, N, FACTS]
    marks_ptr,  # int32 [B, N, FACTS]
    states_ptr,  # fp32 [B, N, STATES]
    traits_ptr,  # int32 [B, N, TRAITS]
    parts_ptr,  # fp32 [B, N, 4, CHUNKS]: the target's largest logit and sum of exponentials, then the draft's
    tickets_ptr,  # [B, N]
    N,
    V,
    parents_stride,
    target_batch_stride,
    target_stride,
    draft_batch_stride,
    draft_stride,
    max_depth,
    temperature,
    draft_temperature,
    POINT_MASSES: tl.constexpr,
    LEAVES_OUT: tl.constexpr,
    FILTERED: tl.constexpr,
    DRAFT_FILTERED: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,  # nodes, rounded up to a power of two
):
    chunk = tl.program_id(0) % CHUNKS
    batch = (tl.program_id(0) // CHUNKS // N).to(tl.int64)
    node = tl.program_id(0) // CHUNKS % N
    place = batch * N + node
    parents_ptr += batch * parents_stride
    index = tl.arange(0, BLOCK)
    parent = tl.load(parents_ptr + index, mask=index < N, other=-1).to(tl.int32)
    token = tl.load(tokens_ptr + batch * N + index, mask=index < N, other=-1).to(tl.int32)
    child = (parent == node) & (parent < index) & (token >= 0) & (token < V)
    has_children = tl.max(child.to(tl.int32)) > 0

    cut, draft_cut = tl.full([], float("-inf"), tl.float32), tl.full([], float("-inf"), tl.float32)
    end_of_ties, draft_end_of_ties = V + tl.full([], 0, tl.int32), V + tl.full([], 0, tl.int32)
    if FILTERED:
        cut, end_of_ties = tl.load(cut_ptr + place), tl.load(end_ptr + place)
    if DRAFT_FILTERED:
        draft_cut, draft_end_of_ties = tl.load(draft_cut_ptr + place), tl.load(draft_end_ptr + place)
    target_row = target_ptr + batch * target_batch_stride + node.to(tl.int64) * target_stride
    draft_row = draft_ptr + batch * draft_batch_stride + node.to(tl.int64) * draft_stride
    target = (target_row, 0.0, 0.0, temperature, cut, end_of_ties)
    draft = (draft_row, 0.0, 0.0, draft_temperature, draft_cut, draft_end_of_ties)
    begin = chunk * CHUNK
    end = tl.minimum(begin + CHUNK, V)
    left_out = child if LEAVES_OUT else child & (index < 0)
    part_ptr = parts_ptr + place * 4 * CHUNKS + chunk
    largest, total = softmax_part(target, begin, end, V, token, left_out, FILTERED)
    tl.store(part_ptr, largest)
    tl.store(part_ptr + CHUNKS, total)
    if has_children and not POINT_MASSES:
        largest, total = softmax_part(draft, begin, end, V, token, left_out, DRAFT_FILTERED)
        tl.store(part_ptr + 2 * CHUNKS, largest)
        tl.store(part_ptr + 3 * CHUNKS, total)
    if is_last(tickets_ptr + place, CHUNKS):
        target, target_outside, usable = normalized(
            target, part_ptr - chunk, V, token, left_out, LEAVES_OUT, FILTERED, CHUNKS
        )
        draft_outside = tl.full([], float("-inf"), tl.float32)
        draft_usable = tl.full([], 1, tl.int32)
        if has_children and not POINT_MASSES:
            draft, draft_outside, drawable = normalized(
                draft, part_ptr - chunk + 2 * CHUNKS, V, token, left_out, LEAVES_OUT, DRAFT_FILTERED, CHUNKS
            )
            draft_usable = drawable.to(tl.int32)
        facts_ptr += place * FACTS
        store_sides(facts_ptr, marks_ptr + place * FACTS, target, draft, node)
        tl.store(facts_ptr + 4, float("-inf"))
        tl.store(facts_ptr + 5, 1.0)
        tl.store(facts_ptr + 6, 1.0)
        tl.store(facts_ptr + 7, 0.0)
        tl.store(choice_ptr + place, tl.where(usable, -1, -2))
        if LEAVES_OUT:
            tl.store(left_out_ptr + batch * N + index, tl.zeros_like(index), mask=child)
        weight = tl.where(node == 0, 1.0, 0.0)
        states_ptr += place * STATES
        tl.store(states_ptr, weight)
        tl.store(states_ptr + 1, weight)
        tl.store(states_ptr + 2, target_outside)
        tl.store(states_ptr + 3, draft_outside)
        traits_ptr += place * TRAITS
        tl.store(traits_ptr, _depth(node, parents_ptr, max_depth))
        tl.store(traits_ptr + 1, tl.where(node == 0, 0, -1))
        tl.store(traits_ptr + 2, draft_usable)


@triton.jit(do_not_specialize=["level", "temperature", "draft_temperature"])
def _chains_kernel(
    tokens_ptr,  # [B, N]
    parents_ptr,  # [B, N], rows parents_stride apart
    ranks_ptr,  # the same, if HAS_RANKS
    target_ptr,  # [B, N, V]
    draft_ptr,  # [B, N, V]
    choice_ptr,  # int32 [B, N]
    left_out_ptr,  # int32 [B, N] if children are distinct: 1 for one whose token is no longer part of P
    facts_ptr,  # fp32 [B, N, FACTS]
    marks_ptr,  # int32 [B, N, FACTS]
    states_ptr,  # fp32 [B, N, STATES]
    traits_ptr,  # int32 [B, N, TRAITS]
    sums_ptr,  # fp32 [B, N, PIECES]
    tickets_ptr,  # the counters of `sharing`
    N,
    V,
    parents_stride,
    ranks_stride,
    target_batch_stride,
    target_stride,
    draft_batch_stride,
    draft_stride,
    level,
    temperature,
    draft_temperature,
    REPLACEMENT: tl.constexpr,
    HELD: tl.constexpr,
    POINT_MASSES: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    FILTERED: tl.constexpr,
    DRAFT_FILTERED: tl.constexpr,
    PIECES: tl.constexpr,
    HELPERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.num_programs(0) - HELPERS
    index = tl.arange(0, BLOCK)
    leaves_out: tl.constexpr = POINT_MASSES or not REPLACEMENT
    if tl.program_id(0) >= rows:
        help_others(
            tickets_ptr, rows, tl.program_id(0) - rows, tokens_ptr, parents_ptr, target_ptr, draft_ptr,
            left_out_ptr, facts_ptr, marks_ptr, sums_ptr, N, V, parents_stride, target_batch_stride, target_stride,
            draft_batch_stride, draft_stride, temperature, draft_temperature, index,
            leaves_out, False, FILTERED, DRAFT_FILTERED, PIECES,
        )  # fmt: skip
        leave(tickets_ptr, rows, HELPERS)
        return

    row = tl.program_id(0)
    place = row.to(tl.int64)
    batch, node = place // N, row % N
    weight = tl.full([], 0.0, tl.float32)
    if tl.load(traits_ptr + place * TRAITS) == level:
        weight = tl.load(states_ptr + place * STATES)
    if weight > 0:
        parent = tl.load(parents_ptr + batch * parents_stride + index, mask=index < N, other=-1).to(tl.int32)
        token = tl.load(tokens_ptr + batch * N + index, mask=index < N, other=-1).to(tl.int32)
        child = (parent >= 0) & (parent < index) & (token >= 0) & (token < V)
        if leaves_out:
            child &= parent == node
        else:
            own_traits_ptr = traits_ptr + batch * N * TRAITS
            child &= tl.load(own_traits_ptr + index * TRAITS, mask=child, other=-1) == level + 1
            child &= tl.load(own_traits_ptr + parent * TRAITS + 1, mask=child, other=-1) == node
        if tl.max(child.to(tl.int32)) > 0:
            source = tl.max(tl.where(index == tl.argmax(child.to(tl.int32), 0), parent, 0))
            origin = batch * N + source
            target_row = target_ptr + batch * target_batch_stride + node.to(tl.int64) * target_stride
            draft_rows = draft_ptr + batch * draft_batch_stride
            own_facts_ptr, own_marks_ptr = facts_ptr + place * FACTS, marks_ptr + place * FACTS
            target, _ = stored_sides(
                own_facts_ptr, own_marks_ptr, target_row, draft_rows, draft_stride, temperature, draft_temperature
            )
            _, draft = stored_sides(
                facts_ptr + origin * FACTS, marks_ptr + origin * FACTS, target_row, draft_rows, draft_stride,
                temperature, draft_temperature,
            )  # fmt: skip
            usable = (tl.load(choice_ptr + place) == -1) & (tl.load(traits_ptr + origin * TRAITS + 2) > 0)
            tl.debug_barrier()  # all threads have loaded what is stored anew
            if usable:
                if not leaves_out:
                    store_sides(own_facts_ptr, own_marks_ptr, target, draft, source)
                if HAS_RANKS:
                    rank = tl.load(ranks_ptr + batch * ranks_stride + index, mask=index < N, other=0).to(tl.int32)
                else:
                    rank = ranks_of(parent, index, parents_ptr + batch * parents_stride, N)
                order = tl.where(child, rank * N + index, NONE)
                x = tl.load(target_row + token, mask=child, other=float("-inf")).to(tl.float32)
                log_p = log_prob(target, x, token, FILTERED)
                log_q = tl.full([BLOCK], float("-inf"), tl.float32)
                if not POINT_MASSES:
                    y = tl.load(draft[0] + token, mask=child, other=float("-inf")).to(tl.float32)
                    log_q = log_prob(draft, y, token, DRAFT_FILTERED)
                states = states_ptr + place * STATES
                job = (tickets_ptr, rows, row, own_facts_ptr, sums_ptr + place * PIECES)
                weights, first, ending, log_multiple, uniform, restricted = weigh_children(
                    job, left_out_ptr + batch * N, target, draft, tl.load(states + 2), tl.load(states + 3), V, N,
                    token, index, order, log_p, log_q, weight,
                    REPLACEMENT, HELD, POINT_MASSES, FILTERED, DRAFT_FILTERED, PIECES,
                )  # fmt: skip
                below = states_ptr + (batch * N + index) * STATES
                tl.store(below, weights, mask=child)
                tl.store(below + 1, weights, mask=child)  # unless it has children of its own
                if leaves_out:
                    tl.store(left_out_ptr + batch * N + index, restricted, mask=child)
                else:
                    tl.store(traits_ptr + (batch * N + index) * TRAITS + 1, first, mask=child)
                tl.store(states + 1, ending)
                tl.store(own_facts_ptr + 4, log_multiple)
                tl.store(own_facts_ptr + 5, uniform)
                tl.store(own_facts_ptr + 7, 0.0)
            else:
                tl.store(choice_ptr + place, -2)
    leave(tickets_ptr, rows, HELPERS)


@triton.jit(do_not_specialize=["max_depth", "seed_ptr", "seed_low", "seed_high"])
def _choose_kernel(
    parents_ptr,  # [B, N], rows parents_stride apart
    ranks_ptr,  # the same, if HAS_RANKS
    rows_ptr,  # [B, N] if HAS_ROWS
    states_ptr,  # fp32 [B, N, STATES]
    traits_ptr,  # int32 [B, N, TRAITS]
    choice_ptr,  # int32 [B, N]: becomes the next node for those on the way to the accepted one
    N,
    parents_stride,
    ranks_stride,
    max_depth,
    seed_ptr,
    seed_low,
    seed_high,
    MERGES: tl.constexpr,  # whether siblings of equal tokens share their children
    HAS_RANKS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    batch = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    parents_ptr += batch * parents_stride
    parent = tl.load(parents_ptr + index, mask=index < N, other=-1).to(tl.int32)
    if HAS_RANKS:
        rank = tl.load(ranks_ptr + batch * ranks_stride + index, mask=index < N, other=0).to(tl.int32)
    else:
        rank = ranks_of(parent, index, parents_ptr, N)
    drafted = (parent >= 0) & (parent < index)
    row = tl.load(rows_ptr + batch * N + parent, mask=drafted, other=0) if HAS_ROWS else batch * N + parent
    ending = tl.load(states_ptr + (batch * N + index) * STATES + 1, mask=drafted, other=0.0)
    reached = drafted & (coins_of(rank, row, seed_ptr, seed_low, seed_high) < ending)
    above = parent
    if MERGES:
        above = tl.load(traits_ptr + (batch * N + parent) * TRAITS + 1, mask=reached, other=-1)

    # Whether a node or any below it is accepted goes up level by level; then the way down takes the first such child.
    level = tl.full([], 0, tl.int32)
    while level < max_depth:
        below = tl.histogram(tl.maximum(above, 0), BLOCK, mask=reached & (above >= 0)) > 0
        reached |= below & drafted
        if MERGES:
            above = tl.load(traits_ptr + (batch * N + parent) * TRAITS + 1, mask=reached, other=-1)
        level += 1
    order = rank * N + index
    node = tl.full([], 0, tl.int32)
    going = max_depth > 0
    while going:
        next_order = tl.min(tl.where(reached & (above == node), order, NONE))
        going = next_order < NONE
        if going:
            tl.store(choice_ptr + batch * N + node, next_order % N)
            node = next_order % N


def launch_traversal(
    nodes: Nodes,
    target: Tensor,
    draft: Tensor,
    *,
    rule: Rule,
    max_depth: int,
    target_filters: Filters,
    draft_filters: Filters,
    noise: Noise,
) -> Verified:
    """`traverse` in max_depth + 3 launches, and one for the filters of each side that has any.

    Tokens and noise.rows are contiguous LongTensors [B, N]; parents and ranks are contiguous in N.
    target, draft: logits [B, N, V], contiguous in V, N > 1
    """
    tokens, parents, ranks = nodes
    batch, count = tokens.shape
    device, vocab_size, places = tokens.device, target.shape[-1], batch * count
    point_masses = draft_filters.temperature == 0
    chunks, pieces = triton.cdiv(vocab_size, CHUNK.value), triton.cdiv(vocab_size, PIECE.value)
    leaves_out = point_masses or not rule.independent
    sizes = [places, places, places * FACTS.value, places * TRAITS.value]
    choice, left_out, marks, traits = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    sizes = [places * size for size in (FACTS.value, STATES.value, 4 * chunks, pieces)]
    facts, states, parts, sums = torch.empty(sum(sizes), device=device).split(sizes)
    cuts = filter_cuts(target, target_filters)
    draft_cuts = None if point_masses else filter_cuts(draft, draft_filters)
    block = max(16, triton.next_power_of_2(count))
    helping = 0 if point_masses else helpers(device)
    shared = {
        "tokens_ptr": tokens, "parents_ptr": parents, "target_ptr": target, "draft_ptr": draft, "choice_ptr": choice,
        "left_out_ptr": left_out, "facts_ptr": facts, "marks_ptr": marks, "states_ptr": states, "traits_ptr": traits,
        "N": count, "V": vocab_size, "parents_stride": parents.stride(0),
        "target_batch_stride": target.stride(0), "target_stride": target.stride(1),
        "draft_batch_stride": draft.stride(0), "draft_stride": draft.stride(1),
        "temperature": raised(target_filters.temperature), "draft_temperature": raised(draft_filters.temperature),
        "POINT_MASSES": point_masses, "FILTERED": cuts is not None, "DRAFT_FILTERED": draft_cuts is not None,
        "BLOCK": block, "num_warps": LANES.value // 32, "enable_fp_fusion": True, "maxnreg": 255,
    }  # fmt: skip
    ranked = {
        "ranks_ptr": ranks,
        "ranks_stride": 0 if ranks is None else ranks.stride(0),
        "HAS_RANKS": ranks is not None,
    }
    with torch.cuda.device_of(tokens):
        _normalize_kernel[(places * chunks,)](
            cut_ptr=None if cuts is None else cuts.cut, end_ptr=None if cuts is None else cuts.end,
            draft_cut_ptr=None if draft_cuts is None else draft_cuts.cut,
            draft_end_ptr=None if draft_cuts is None else draft_cuts.end,
            parts_ptr=parts, tickets_ptr=tickets(places, device), max_depth=max_depth,
            LEAVES_OUT=leaves_out, CHUNKS=chunks, **shared,
        )  # fmt: skip
        for level in range(max_depth):
            _chains_kernel[(places + helping,)](
                sums_ptr=sums, tickets_ptr=tickets(counters(places), device), level=level,
                REPLACEMENT=rule.independent, HELD=rule.method == "held_traversal",
                PIECES=pieces, HELPERS=helping, **shared, **ranked,
            )  # fmt: skip
        _choose_kernel[(batch,)](
            parents_ptr=parents, rows_ptr=noise.rows, states_ptr=states, traits_ptr=traits, choice_ptr=choice,
            N=count, parents_stride=parents.stride(0), max_depth=max_depth, **seed_arguments(noise.seed),
            MERGES=not leaves_out, HAS_ROWS=noise.rows is not None, BLOCK=block, num_warps=4, **ranked,
        )  # fmt: skip
    return launch_walk(
        nodes,
        target,
        draft,
        Decided(choice, left_out if leaves_out else None, facts, marks),
        max_depth=max_depth,
        target_filters=target_filters,
        draft_filters=draft_filters,
        noise=noise,
    )
