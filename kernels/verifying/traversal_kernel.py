"""Traversal verification on a GPU: `traversal` has the formulas and the reference.

A node's chain is the offers of its children, one after the other. It needs the node's weight, which its parent's chain
computes: the first child's after a few loads, each later child's after the passes of those before it. So chains begin
when their weights are known. It takes four launches for any depth, after one that sets the counters to zero:

    normalize   programs share each row in one pass, as in `decision`; every row of the tree is read once
    chains      each multiprocessor has a program, which takes part in open passes, or leads a chain whose weight is
                known, until no chain is left (see `sharing`). The root's chain is open from the start
    choose      a program for each tree finds the first node in post-order that its coin accepts, and marks the path
    walk        as in the other methods: follow the marks, and draw the token after the last node (see `walk`)

Nodes of weight 0 have no chain: those below a child that cannot be accepted, and those after a child that is accepted
for certain. The longest path takes most time; a step to the j-th child costs the j - 1 passes before it. A walk that
stops at the accepted node would need fewer passes, but one after the other. A launch for each level would need the sum
of the most passes of each level. `python bench/predict.py verification` has the figures.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

import torch

from heavypath.kernels.language import tl, triton
from heavypath.kernels.nodes import Verified, VerifyInputs
from heavypath.kernels.sharing import OVER, call_leader, counters, find_open, helpers, leave, take_chunk
from heavypath.kernels.tickets import is_last
from heavypath.kernels.verifying.decision import Decided, help_at
from heavypath.kernels.verifying.distributions import (
    CHUNK,
    FACTS,
    NONE,
    PIECE,
    SharedPass,
    load_distributions,
    log_prob,
    normalized,
    store_distributions,
    store_part,
    store_residual,
    unread,
)
from heavypath.kernels.verifying.drafted_tree import (
    coins_of,
    cut_arguments,
    equal_contexts,
    first_of_token,
    launch,
    nodes_of,
    ranks_of,
    tree_arguments,
)
from heavypath.kernels.verifying.traversal_chain import (
    BEGUN,
    STATE_DRAFT_OUTSIDE,
    STATE_ENDING,
    STATE_TARGET_OUTSIDE,
    STATE_WEIGHT,
    STATES,
    TO_BEGIN,
    TRAIT_CONTEXT,
    TRAIT_DRAFT_USABLE,
    TRAIT_STAGE,
    TRAITS,
    Below,
    weigh_children,
)
from heavypath.kernels.verifying.walk import launch_walk


@triton.jit
def _depth(node, parents_ptr, max_depth):
    """Return the depth of a node, or max_depth + 1 if it is deeper."""
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
    cut_ptr,  # [B, N] if FILTERED, as end_ptr: the cuts of the target's rows, see `filter_cuts`
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
    tickets_ptr,  # [B, N], followed by the counters of `sharing` for the next kernel
    N, V, parents_stride, target_batch_stride, target_stride, draft_batch_stride, draft_stride, max_depth, temperature,
    draft_temperature,
    POINT_MASSES: tl.constexpr, LEAVES_OUT: tl.constexpr, FILTERED: tl.constexpr, DRAFT_FILTERED: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,  # nodes, rounded up to a power of two
):  # fmt: skip
    chunk = tl.program_id(0) % CHUNKS
    batch = (tl.program_id(0) // CHUNKS // N).to(tl.int64)
    node = tl.program_id(0) // CHUNKS % N
    place = batch * N + node
    tokens_ptr += batch * N
    parents_ptr += batch * parents_stride
    index = tl.arange(0, BLOCK)
    parent, token, drafted = nodes_of(tokens_ptr, parents_ptr, index, N, V)
    child = drafted & (parent == node)
    has_children = tl.max(child.to(tl.int32)) > 0

    target_row = target_ptr + batch * target_batch_stride + node.to(tl.int64) * target_stride
    draft_row = draft_ptr + batch * draft_batch_stride + node.to(tl.int64) * draft_stride
    target = unread(target_row, temperature, cut_ptr, end_ptr, place, V, FILTERED)
    draft = unread(draft_row, draft_temperature, draft_cut_ptr, draft_end_ptr, place, V, DRAFT_FILTERED)
    left_out = child if LEAVES_OUT else child & (index < 0)
    part_ptr = parts_ptr + place * 4 * CHUNKS
    store_part(target, part_ptr, chunk, V, token, left_out, FILTERED, CHUNKS)
    if has_children and not POINT_MASSES:
        store_part(draft, part_ptr + 2 * CHUNKS, chunk, V, token, left_out, DRAFT_FILTERED, CHUNKS)
    if is_last(tickets_ptr + place, CHUNKS):
        if LEAVES_OUT:
            left_out = first_of_token(token, index, tl.where(child, index, NONE), N)
        target, target_outside, usable = normalized(target, part_ptr, token, left_out, LEAVES_OUT, FILTERED, CHUNKS)
        draft_outside = tl.full([], float("-inf"), tl.float32)
        draft_usable = tl.full([], 1, tl.int32)
        if has_children and not POINT_MASSES:
            draft, draft_outside, drawable = normalized(
                draft, part_ptr + 2 * CHUNKS, token, left_out, LEAVES_OUT, DRAFT_FILTERED, CHUNKS
            )
            draft_usable = drawable.to(tl.int32)
        facts_ptr += place * FACTS
        store_distributions(facts_ptr, marks_ptr + place * FACTS, target, draft, node)
        store_residual(facts_ptr, float("-inf"), 1.0, 0.0, 1.0)
        tl.store(choice_ptr + place, tl.where(usable, -1, -2))
        if LEAVES_OUT:
            tl.store(left_out_ptr + batch * N + index, tl.zeros_like(index), mask=child)
        weight = tl.where(node == 0, 1.0, 0.0)
        states_ptr += place * STATES
        tl.store(states_ptr + STATE_WEIGHT, weight)
        tl.store(states_ptr + STATE_ENDING, weight)
        tl.store(states_ptr + STATE_TARGET_OUTSIDE, target_outside)
        tl.store(states_ptr + STATE_DRAFT_OUTSIDE, draft_outside)
        has_chain = has_children
        traits_ptr += place * TRAITS
        if not LEAVES_OUT:
            alike = equal_contexts(tl.where(index < N, index, -1), token, node, parents_ptr, tokens_ptr).to(tl.int32)
            below = drafted & (tl.gather(alike, tl.maximum(parent, 0), 0) > 0)
            has_chain = tl.max(below.to(tl.int32)) > 0
            tl.store(traits_ptr + TRAIT_CONTEXT, tl.argmax(alike, 0))
        has_chain &= _depth(node, parents_ptr, max_depth) < max_depth
        tl.store(traits_ptr + TRAIT_STAGE, tl.where(has_chain, TO_BEGIN, 0))
        tl.store(traits_ptr + TRAIT_DRAFT_USABLE, draft_usable)
        if node == 0:
            counters_ptr = tickets_ptr + tl.num_programs(0) // CHUNKS
            tl.atomic_add(counters_ptr, N, sem="relaxed")  # none of the tree's nodes has a leader yet
            call_leader(counters_ptr, place)


@triton.jit
def _lead(
    counters_ptr, all_nodes, opened, tokens_ptr, parents_ptr, ranks_ptr, target_ptr, draft_ptr, choice_ptr,
    left_out_ptr, facts_ptr, marks_ptr, states_ptr, traits_ptr, sums_ptr, N, V, parents_stride, ranks_stride,
    target_batch_stride, target_stride, draft_batch_stride, draft_stride, temperature, draft_temperature, index,
    REPLACEMENT: tl.constexpr, HELD: tl.constexpr, POINT_MASSES: tl.constexpr, HAS_RANKS: tl.constexpr,
    FILTERED: tl.constexpr, DRAFT_FILTERED: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Lead the chain of a node whose weight is stored."""
    leaves_out: tl.constexpr = POINT_MASSES or not REPLACEMENT
    place = opened.to(tl.int64)
    batch = place // N
    node = opened % N
    root = batch * N
    tl.debug_barrier()  # after all threads have read that the chain had not begun
    tl.store(traits_ptr + place * TRAITS + TRAIT_STAGE, BEGUN)
    parents_ptr += batch * parents_stride
    parent, token, child = nodes_of(tokens_ptr + root, parents_ptr, index, N, V)
    if leaves_out:
        child &= parent == node
    else:
        context = tl.load(traits_ptr + place * TRAITS + TRAIT_CONTEXT)
        child &= tl.load(traits_ptr + (root + parent) * TRAITS + TRAIT_CONTEXT, mask=child, other=-1) == context
    source = tl.max(tl.where(index == tl.argmax(child.to(tl.int32), 0), parent, 0))
    origin = root + source
    target_row = target_ptr + batch * target_batch_stride + node.to(tl.int64) * target_stride
    draft_rows = draft_ptr + batch * draft_batch_stride
    own_facts_ptr = facts_ptr + place * FACTS
    own_marks_ptr = marks_ptr + place * FACTS
    target, _ = load_distributions(
        own_facts_ptr, own_marks_ptr, target_row, draft_rows, draft_stride, temperature, draft_temperature
    )
    _, draft = load_distributions(
        facts_ptr + origin * FACTS, marks_ptr + origin * FACTS, target_row, draft_rows, draft_stride,
        temperature, draft_temperature,
    )  # fmt: skip
    usable = tl.load(choice_ptr + place) == -1
    usable &= tl.load(traits_ptr + origin * TRAITS + TRAIT_DRAFT_USABLE) > 0
    tl.debug_barrier()  # all threads must have loaded the values that are overwritten below
    if usable:
        if not leaves_out:
            store_distributions(own_facts_ptr, own_marks_ptr, target, draft, source)
        rank = ranks_of(parent, index, parents_ptr, ranks_ptr, batch * ranks_stride, N, HAS_RANKS)
        order = tl.where(child, rank * N + index, NONE)
        first = child
        if leaves_out:
            first = first_of_token(token, index, order, N)
        x = tl.load(target_row + token, mask=child, other=float("-inf")).to(tl.float32)
        log_p = log_prob(target, x, token, FILTERED)
        log_q = tl.full([index.shape[0]], float("-inf"), tl.float32)
        if not POINT_MASSES:
            y = tl.load(draft.row_ptr + token, mask=child, other=float("-inf")).to(tl.float32)
            log_q = log_prob(draft, y, token, DRAFT_FILTERED)
        states = states_ptr + place * STATES
        ending, log_multiple, uniform_log_q, left_out = weigh_children(
            SharedPass(counters_ptr, all_nodes, place, own_facts_ptr, sums_ptr + place * PIECES),
            Below(counters_ptr, root, states_ptr + root * STATES),
            left_out_ptr + root, target, draft,
            tl.load(states + STATE_TARGET_OUTSIDE), tl.load(states + STATE_DRAFT_OUTSIDE), V, N, token, index, order,
            first, tl.load(traits_ptr + (root + index) * TRAITS + TRAIT_STAGE, mask=child, other=0), log_p, log_q,
            tl.load(states + STATE_WEIGHT, cache_modifier=".cg"),
            REPLACEMENT, HELD, POINT_MASSES, FILTERED, DRAFT_FILTERED, PIECES,
        )  # fmt: skip
        if leaves_out:
            tl.store(left_out_ptr + root + index, left_out, mask=child)
        tl.store(states + STATE_ENDING, ending)
        store_residual(own_facts_ptr, log_multiple, uniform_log_q, 0.0)
    else:
        tl.store(choice_ptr + place, -2)


@triton.jit(do_not_specialize=["sequences", "temperature", "draft_temperature"])
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
    tickets_ptr,  # as in the kernel before
    sequences, N, V, parents_stride, ranks_stride, target_batch_stride, target_stride, draft_batch_stride, draft_stride,
    temperature, draft_temperature,
    REPLACEMENT: tl.constexpr, HELD: tl.constexpr, POINT_MASSES: tl.constexpr, HAS_RANKS: tl.constexpr,
    FILTERED: tl.constexpr, DRAFT_FILTERED: tl.constexpr, PIECES: tl.constexpr,
    HELPERS: tl.constexpr,  # all programs
    BLOCK: tl.constexpr,
):  # fmt: skip
    all_nodes = sequences * N
    counters_ptr = tickets_ptr + all_nodes
    index = tl.arange(0, BLOCK)
    leaves_out: tl.constexpr = POINT_MASSES or not REPLACEMENT
    opened = find_open(counters_ptr, all_nodes, tl.program_id(0) % all_nodes)
    while opened != OVER:
        piece = tl.full([], -1, tl.int32)
        if opened >= 0:
            piece = take_chunk(counters_ptr, opened)
        if piece >= 0:
            place = opened.to(tl.int64)
            stage = tl.load(traits_ptr + place * TRAITS + TRAIT_STAGE, cache_modifier=".cg")
            if stage == BEGUN:
                help_at(
                    counters_ptr, all_nodes, opened, piece, tokens_ptr, parents_ptr, target_ptr, draft_ptr,
                    left_out_ptr, facts_ptr, marks_ptr, sums_ptr, N, V, parents_stride, target_batch_stride,
                    target_stride, draft_batch_stride, draft_stride, temperature, draft_temperature, index,
                    leaves_out, FILTERED, DRAFT_FILTERED, PIECES,
                )  # fmt: skip
            else:
                if stage == TO_BEGIN:
                    _lead(
                        counters_ptr, all_nodes, opened, tokens_ptr, parents_ptr, ranks_ptr, target_ptr, draft_ptr,
                        choice_ptr, left_out_ptr, facts_ptr, marks_ptr, states_ptr, traits_ptr, sums_ptr, N, V,
                        parents_stride, ranks_stride, target_batch_stride, target_stride, draft_batch_stride,
                        draft_stride, temperature, draft_temperature, index,
                        REPLACEMENT, HELD, POINT_MASSES, HAS_RANKS, FILTERED, DRAFT_FILTERED, PIECES,
                    )  # fmt: skip
                leave(counters_ptr, all_nodes, HELPERS)  # as the node's leader
        opened = find_open(counters_ptr, all_nodes, tl.program_id(0) % all_nodes)
    leave(counters_ptr, all_nodes, HELPERS)


@triton.jit(do_not_specialize=["max_depth", "seed_ptr", "seed_low", "seed_high"])
def _choose_kernel(
    parents_ptr,  # [B, N], rows parents_stride apart
    ranks_ptr,  # the same, if HAS_RANKS
    noise_rows_ptr,  # [B, N] if HAS_NOISE_ROWS
    states_ptr,  # fp32 [B, N, STATES]
    traits_ptr,  # int32 [B, N, TRAITS]
    choice_ptr,  # int32 [B, N]: on the path to the accepted node set to the next node
    N, parents_stride, ranks_stride, max_depth, seed_ptr, seed_low, seed_high,
    MERGES: tl.constexpr,  # whether siblings of equal tokens share their children
    HAS_RANKS: tl.constexpr, HAS_NOISE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    parents_ptr += batch * parents_stride
    parent = tl.load(parents_ptr + index, mask=index < N, other=-1).to(tl.int32)
    rank = ranks_of(parent, index, parents_ptr, ranks_ptr, batch * ranks_stride, N, HAS_RANKS)
    drafted = (parent >= 0) & (parent < index)
    if HAS_NOISE_ROWS:
        noise_row = tl.load(noise_rows_ptr + batch * N + parent, mask=drafted, other=0)
    else:
        noise_row = batch * N + parent
    ending = tl.load(states_ptr + (batch * N + index) * STATES + STATE_ENDING, mask=drafted, other=0.0)
    reached = drafted & (coins_of(rank, noise_row, seed_ptr, seed_low, seed_high) < ending)
    context = index
    if MERGES:
        context = tl.load(traits_ptr + (batch * N + index) * TRAITS + TRAIT_CONTEXT, mask=index < N, other=0)
    above = tl.gather(context, tl.maximum(parent, 0), 0)

    # Pass up level by level whether a node or one below it is accepted. On the way down take the first such child.
    level = tl.full([], 0, tl.int32)
    while level < max_depth:
        below = tl.histogram(above, BLOCK, mask=reached)
        reached |= drafted & (tl.gather(below, context, 0) > 0)
        level += 1
    order = rank * N + index
    node = tl.full([], 0, tl.int32)
    here = tl.full([], 0, tl.int32)
    going = max_depth > 0
    while going:
        next_order = tl.min(tl.where(reached & (above == here), order, NONE))
        going = next_order < NONE
        if going:
            tl.store(choice_ptr + batch * N + node, next_order % N)
            node = next_order % N
            here = tl.sum(tl.where(index == node, context, 0))


def launch_traversal(inputs: VerifyInputs) -> Verified:
    """Verify trees by `traversal`: four launches, and one more for each side with filters.

    inputs: from `laid_out`, with N > 1
    """
    tokens = inputs.nodes.tokens
    batch, count = tokens.shape
    device = tokens.device
    vocab_size = inputs.target_logits.shape[-1]
    places = batch * count
    point_masses = inputs.draft_filters.temperature == 0
    chunks = triton.cdiv(vocab_size, CHUNK.value)
    pieces = triton.cdiv(vocab_size, PIECE.value)
    leaves_out = point_masses or not inputs.independent
    sizes = [places, places, places * FACTS.value, places * TRAITS.value]
    choice, left_out, marks, traits = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    sizes = [places * size for size in (FACTS.value, STATES.value, 4 * chunks, pieces)]
    facts, states, parts, sums = torch.empty(sum(sizes), dtype=torch.float32, device=device).split(sizes)
    helping = helpers(device)
    # Separate counters, not those of `tickets` that a stream shares: these are not 0 between the first two launches.
    counting = torch.zeros(places + counters(places), dtype=torch.int32, device=device)
    shared = tree_arguments(inputs) | cut_arguments(inputs, both=not point_masses)
    shared |= {
        "choice_ptr": choice, "left_out_ptr": left_out, "facts_ptr": facts, "marks_ptr": marks, "states_ptr": states,
        "traits_ptr": traits, "parts_ptr": parts, "sums_ptr": sums, "tickets_ptr": counting,
        "max_depth": inputs.max_depth, "POINT_MASSES": point_masses,
    }  # fmt: skip
    with torch.cuda.device_of(tokens):
        launch(_normalize_kernel, places * chunks, shared, LEAVES_OUT=leaves_out, CHUNKS=chunks)
        launch(
            _chains_kernel, helping, shared, sequences=batch, REPLACEMENT=inputs.independent,
            HELD=inputs.method == "held_traversal", PIECES=pieces, HELPERS=helping,
        )  # fmt: skip
        launch(_choose_kernel, batch, shared, MERGES=not leaves_out, num_warps=4, maxnreg=None)
    return launch_walk(inputs, Decided(choice, left_out if leaves_out else None, facts, marks))
