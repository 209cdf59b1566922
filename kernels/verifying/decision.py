"""Decide on a GPU, for all nodes of a tree in parallel, which child is accepted if the walk reaches the node.

`residual`, `held` and `k_seq` have the formulas and references for one node. Several programs share a node's rows of
logits in the one pass that normalises them, and the last of them to finish tries the children. Each child after the
first needs a sum over the whole row, a pass. This program leads the passes, and programs at the end of the grid, which
are free by then, take part in them (see `sharing`). It stores the accepted child and, if none is accepted, the
distribution of the recovered token, as a few numbers that define

    P(v) - share * min(P(v), l Q(v))

where l is the factor of Q that is covered already, share the part of it that is subtracted (1 except in K-SEQ), and P
and Q may be restricted to tokens that no rejected child has. A pass sums these weights, so programs that take part read
the numbers from memory, where `walk` reads them again when it draws the token (see the facts in `distributions`).
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

from typing import NamedTuple

import torch
from torch import Tensor

from heavypath.kernels.language import tl, triton
from heavypath.kernels.nodes import VerifyInputs
from heavypath.kernels.sharing import LOOKS, OVER, counters, find_open, helpers, leave, take_chunk
from heavypath.kernels.tickets import is_last, tickets
from heavypath.kernels.verifying.distributions import (
    CHUNK,
    FACT_LOG_MULTIPLE,
    FACT_LOG_P_MASS,
    FACT_UNIFORM_LOG_Q,
    FACTS,
    NONE,
    PIECE,
    SharedPass,
    load_distributions,
    log_prob,
    normalized,
    restricted,
    store_distributions,
    store_part,
    store_residual,
    sum_pieces,
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
from heavypath.kernels.verifying.held import try_held
from heavypath.kernels.verifying.k_seq import try_k_seq
from heavypath.kernels.verifying.residual import try_rejection


@triton.jit
def help_at(
    counters_ptr,
    all_nodes,
    place,
    piece,
    tokens_ptr,
    parents_ptr,
    target_ptr,
    draft_ptr,
    left_out_ptr,
    facts_ptr,
    marks_ptr,
    sums_ptr,
    N,
    V,
    parents_stride,
    target_batch_stride,
    target_stride,
    draft_batch_stride,
    draft_stride,
    temperature,
    draft_temperature,
    index,
    LEAVES_OUT: tl.constexpr,
    FILTERED: tl.constexpr,
    DRAFT_FILTERED: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Take part in the pass of node `place` (its index in [B * N]), beginning with the piece that was taken."""
    batch = (place // N).to(tl.int64)
    node = place % N
    facts_ptr += place * FACTS
    target, draft = load_distributions(
        facts_ptr,
        marks_ptr + place * FACTS,
        target_ptr + batch * target_batch_stride + node.to(tl.int64) * target_stride,
        draft_ptr + batch * draft_batch_stride,
        draft_stride,
        temperature,
        draft_temperature,
    )
    log_multiple = tl.load(facts_ptr + FACT_LOG_MULTIPLE, cache_modifier=".cg")
    log_p_mass = tl.load(facts_ptr + FACT_LOG_P_MASS, cache_modifier=".cg")
    uniform_log_q = 1.0
    token = index
    left_out = index < 0
    if LEAVES_OUT:
        uniform_log_q = tl.load(facts_ptr + FACT_UNIFORM_LOG_Q, cache_modifier=".cg")
        parent, token, drafted = nodes_of(tokens_ptr + batch * N, parents_ptr + batch * parents_stride, index, N, V)
        out_ptr = left_out_ptr + batch * N + index
        left_out = tl.load(out_ptr, mask=drafted & (parent == node), other=0, cache_modifier=".cg") > 0
    sum_pieces(
        SharedPass(counters_ptr, all_nodes, place, facts_ptr, sums_ptr + place.to(tl.int64) * PIECES),
        piece,
        restricted(target, log_p_mass),
        draft,
        log_multiple,
        uniform_log_q,
        V,
        token,
        left_out,
        FILTERED,
        DRAFT_FILTERED,
    )


@triton.jit(do_not_specialize=["seed_ptr", "seed_low", "seed_high", "temperature", "draft_temperature"])
def _decide_kernel(
    tokens_ptr,  # [B, N]
    parents_ptr,  # [B, N], rows parents_stride apart
    ranks_ptr,  # the same, if HAS_RANKS
    noise_rows_ptr,  # [B, N] if HAS_NOISE_ROWS
    target_ptr,  # [B, N, V]
    draft_ptr,  # [B, N, V]
    cut_ptr,  # [B, N] if FILTERED, as end_ptr: the cuts of the target's rows, see `filter_cuts`
    end_ptr,
    draft_cut_ptr,  # the same of the draft's rows, if DRAFT_FILTERED
    draft_end_ptr,
    choice_ptr,  # int32 [B, N]: the accepted child, -1 for none, -2 if a row has no distribution
    left_out_ptr,  # int32 [B, N]: 1 for a rejected child whose token is no longer part of P
    facts_ptr,  # fp32 [B, N, FACTS]
    marks_ptr,  # int32 [B, N, FACTS]
    parts_ptr,  # fp32 [B, N, 4, CHUNKS]: the target's largest logit and sum of exponentials, then the draft's
    sums_ptr,  # fp32 [B, N, PIECES]
    tickets_ptr,  # [B, N], followed by the counters of `sharing`
    N,
    V,
    parents_stride,
    ranks_stride,
    target_batch_stride,
    target_stride,
    draft_batch_stride,
    draft_stride,
    seed_ptr,
    seed_low,
    seed_high,
    temperature,
    draft_temperature,
    REPLACEMENT: tl.constexpr,
    HELD: tl.constexpr,
    K_SEQ: tl.constexpr,
    POINT_MASSES: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    HAS_NOISE_ROWS: tl.constexpr,
    FILTERED: tl.constexpr,
    DRAFT_FILTERED: tl.constexpr,
    CHUNKS: tl.constexpr,
    PIECES: tl.constexpr,
    HELPERS: tl.constexpr,  # programs that only take part in others' passes; 0 if there are no passes
    BLOCK: tl.constexpr,  # nodes, rounded up to a power of two
):
    all_nodes = (tl.num_programs(0) - HELPERS) // CHUNKS  # B * N
    counters_ptr = tickets_ptr + all_nodes
    leaves_out: tl.constexpr = POINT_MASSES or not REPLACEMENT
    index = tl.arange(0, BLOCK)
    if tl.program_id(0) >= all_nodes * CHUNKS:
        look = tl.full([], 0, tl.int32)
        while look < LOOKS:
            opened = find_open(counters_ptr, all_nodes, (tl.program_id(0) - all_nodes * CHUNKS) % all_nodes)
            look = tl.where(opened == OVER, LOOKS, look + 1)
            if opened >= 0:
                piece = take_chunk(counters_ptr, opened)
                if piece >= 0:
                    help_at(
                        counters_ptr,
                        all_nodes,
                        opened,
                        piece,
                        tokens_ptr,
                        parents_ptr,
                        target_ptr,
                        draft_ptr,
                        left_out_ptr,
                        facts_ptr,
                        marks_ptr,
                        sums_ptr,
                        N,
                        V,
                        parents_stride,
                        target_batch_stride,
                        target_stride,
                        draft_batch_stride,
                        draft_stride,
                        temperature,
                        draft_temperature,
                        index,
                        leaves_out,
                        FILTERED,
                        DRAFT_FILTERED,
                        PIECES,
                    )
        leave(counters_ptr, all_nodes, HELPERS)
        return

    chunk = tl.program_id(0) % CHUNKS
    batch = tl.program_id(0) // CHUNKS // N
    node = tl.program_id(0) // CHUNKS % N
    place = batch.to(tl.int64) * N + node
    tokens_ptr += batch.to(tl.int64) * N
    parents_ptr += batch.to(tl.int64) * parents_stride
    parent, token, child = nodes_of(tokens_ptr, parents_ptr, index, N, V)
    if not HAS_DRAFT:
        child &= index < 0
    elif REPLACEMENT and not POINT_MASSES:
        child &= equal_contexts(parent, token, node, parents_ptr, tokens_ptr)
    else:
        child &= parent == node
    has_children = tl.max(child.to(tl.int32)) > 0
    any_child = tl.argmax(child.to(tl.int32), 0)
    source = tl.max(tl.where(index == any_child, parent, 0))  # the node from whose draft row the children were drawn

    target_row = target_ptr + batch.to(tl.int64) * target_batch_stride + node.to(tl.int64) * target_stride
    draft_row = draft_ptr + batch.to(tl.int64) * draft_batch_stride + source.to(tl.int64) * draft_stride
    target = unread(target_row, temperature, cut_ptr, end_ptr, place, V, FILTERED)
    draft_place = batch.to(tl.int64) * N + source
    draft = unread(draft_row, draft_temperature, draft_cut_ptr, draft_end_ptr, draft_place, V, DRAFT_FILTERED)
    left_out = child if leaves_out else child & (index < 0)
    part_ptr = parts_ptr + place * 4 * CHUNKS
    store_part(target, part_ptr, chunk, V, token, left_out, FILTERED, CHUNKS)
    if has_children and not POINT_MASSES:
        store_part(draft, part_ptr + 2 * CHUNKS, chunk, V, token, left_out, DRAFT_FILTERED, CHUNKS)
    if is_last(tickets_ptr + place, CHUNKS):
        rank = ranks_of(parent, index, parents_ptr, ranks_ptr, batch.to(tl.int64) * ranks_stride, N, HAS_RANKS)
        if HAS_NOISE_ROWS:
            noise_row = tl.load(noise_rows_ptr + batch.to(tl.int64) * N + parent, mask=child, other=0)
        else:
            noise_row = batch.to(tl.int64) * N + parent
        coin = coins_of(rank, noise_row, seed_ptr, seed_low, seed_high)
        order = tl.where(child, rank * N + index, NONE)  # in draw order, and order % N is the node
        first = child
        if leaves_out:
            first = first_of_token(token, index, order, N)

        target, target_outside, usable = normalized(target, part_ptr, token, first, leaves_out, FILTERED, CHUNKS)
        choice = tl.where(usable, -1, -2)
        log_multiple = tl.full([], float("-inf"), tl.float32)
        share = tl.full([], 1.0, tl.float32)
        log_p_mass = tl.full([], 0.0, tl.float32)
        uniform_log_q = tl.full([], 1.0, tl.float32)
        rejected = tl.zeros_like(index)
        if has_children:
            if POINT_MASSES:
                draft_outside = tl.full([], float("-inf"), tl.float32)
            else:
                draft, draft_outside, draft_usable = normalized(
                    draft, part_ptr + 2 * CHUNKS, token, first, leaves_out, DRAFT_FILTERED, CHUNKS
                )
                choice = tl.where(draft_usable, choice, -2)
            x = tl.load(target_row + token, mask=child, other=float("-inf")).to(tl.float32)
            log_p = log_prob(target, x, token, FILTERED)
            # Here for programs that share a pass; the call at the end serves nodes without children, too.
            store_distributions(facts_ptr + place * FACTS, marks_ptr + place * FACTS, target, draft, source)
            passes = SharedPass(counters_ptr, all_nodes, place, facts_ptr + place * FACTS, sums_ptr + place * PIECES)
            log_q = tl.full([BLOCK], float("-inf"), tl.float32)
            if not POINT_MASSES:
                y = tl.load(draft_row + token, mask=child, other=float("-inf")).to(tl.float32)
                log_q = log_prob(draft, y, token, DRAFT_FILTERED)
            if K_SEQ:
                choice, log_multiple, share = try_k_seq(
                    passes,
                    target,
                    draft,
                    V,
                    token,
                    order,
                    coin,
                    log_p,
                    log_q,
                    choice,
                    FILTERED,
                    DRAFT_FILTERED,
                    PIECES,
                )
            elif HELD:
                choice, log_multiple, log_p_mass, uniform_log_q, rejected = try_held(
                    passes,
                    left_out_ptr + batch.to(tl.int64) * N,
                    target,
                    draft,
                    target_outside,
                    draft_outside,
                    V,
                    N,
                    token,
                    index,
                    order,
                    first,
                    coin,
                    log_p,
                    log_q,
                    choice,
                    REPLACEMENT,
                    FILTERED,
                    DRAFT_FILTERED,
                    PIECES,
                )
            else:
                choice, log_multiple, log_p_mass, uniform_log_q, rejected = try_rejection(
                    passes,
                    left_out_ptr + batch.to(tl.int64) * N,
                    target,
                    draft,
                    target_outside,
                    draft_outside,
                    V,
                    N,
                    token,
                    index,
                    order,
                    first,
                    coin,
                    log_p,
                    log_q,
                    choice,
                    REPLACEMENT,
                    POINT_MASSES,
                    FILTERED,
                    DRAFT_FILTERED,
                    PIECES,
                )

        tl.store(choice_ptr + place, choice)
        if leaves_out:
            tl.store(left_out_ptr + batch.to(tl.int64) * N + index, rejected, mask=child)
        facts_ptr += place * FACTS
        store_distributions(facts_ptr, marks_ptr + place * FACTS, target, draft, source)
        store_residual(facts_ptr, log_multiple, uniform_log_q, log_p_mass, share)
        if HELPERS > 0:
            leave(counters_ptr, all_nodes, HELPERS)


class Decided(NamedTuple):
    """Decisions for all B * N nodes, which `walk` follows.

    choice:   the accepted child, int32; if facts is None, the token that the target chose, int64. -1 for neither,
              -2 for a node without a distribution
    left_out: int32, 1 for a rejected child whose token is no longer part of P; None if that cannot happen
    facts:    fp32 [B * N * FACTS], numbers that define the recovered token's distribution, see `distributions`
    marks:    int32 [B * N * FACTS], likewise
    """

    choice: Tensor
    left_out: Tensor | None
    facts: Tensor | None
    marks: Tensor | None


def decide(inputs: VerifyInputs) -> Decided:
    """Decide for all nodes [B, N] which child they accept, by a method of DRAFT_AWARE.

    A method that looks at the whole tree comes here only without a draft, where the tree is its root.

    inputs: from `laid_out`
    """
    tokens, _, _ = inputs.nodes
    draft = inputs.draft_logits
    method = inputs.method
    batch, count = tokens.shape
    device = tokens.device
    vocab_size = inputs.target_logits.shape[-1]
    if count == 1:  # no children; and Triton 3.6 crashes on loads in a loop that never runs for a constant node 0
        draft = None
    point_masses = inputs.draft_filters.temperature == 0
    chunks = triton.cdiv(vocab_size, CHUNK.value)
    pieces = triton.cdiv(vocab_size, PIECE.value)
    passes = draft is not None and not point_masses
    helping = helpers(device) if passes else 0
    ints = torch.empty(batch * count * (2 + FACTS.value), dtype=torch.int32, device=device)
    sizes = [batch * count * size for size in (FACTS.value, 4 * chunks, pieces)]
    facts, parts, sums = torch.empty(sum(sizes), dtype=torch.float32, device=device).split(sizes)
    choice, left_out, marks = ints.split([batch * count, batch * count, batch * count * FACTS.value])
    inputs = inputs._replace(draft_logits=draft)
    shared = tree_arguments(inputs) | cut_arguments(inputs, both=passes)
    with torch.cuda.device_of(tokens):
        launch(
            _decide_kernel,
            batch * count * chunks + helping,
            shared,
            choice_ptr=choice,
            left_out_ptr=left_out,
            facts_ptr=facts,
            marks_ptr=marks,
            parts_ptr=parts,
            sums_ptr=sums,
            tickets_ptr=tickets(batch * count + counters(batch * count), device),
            REPLACEMENT=inputs.independent,
            HELD=method == "held" and not point_masses,
            K_SEQ=method == "kseq",
            POINT_MASSES=point_masses,
            HAS_DRAFT=draft is not None,
            CHUNKS=chunks,
            PIECES=pieces,
            HELPERS=helping,
        )
    leaves_out = point_masses or not inputs.independent
    return Decided(choice, left_out if leaves_out else None, facts, marks)
