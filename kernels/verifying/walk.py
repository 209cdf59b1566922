"""Walk down each tree along the decisions for its nodes, and draw the token after the last accepted node, on a GPU.

For each node there is either a choice or a token (see `decision` and `verification`):

    choice    the accepted child, or none; at the end of the walk the token is drawn by P - share * min(P, l Q)
    token     the target's choice; the walk goes to a child with this token, and ends with it if there is none

It is one launch. Several programs share the vocabulary of each sequence. Each of them walks, which takes a few loads,
and finds the best token of its chunk; the last one to finish stores the best of all. As in `sampling_kernel`, a token's
key is computed exactly only if an upper bound of it is above the best key so far.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

import math

import torch

from heavypath.kernels.language import tl, triton
from heavypath.kernels.nodes import Verified, VerifyInputs
from heavypath.kernels.noise import Stream, gumbel_of, log2_below, octet_bits, seed_words
from heavypath.kernels.sampling_kernel import NEVER, pack, unpack
from heavypath.kernels.tickets import is_last, tickets
from heavypath.kernels.verifying.decision import Decided
from heavypath.kernels.verifying.distributions import (
    CHUNK,
    FACT_LOG_MULTIPLE,
    FACT_LOG_P_MASS,
    FACT_SHARE,
    FACT_UNIFORM_LOG_Q,
    FACTS,
    LANES,
    NONE,
    TILE,
    load_distributions,
    log_prob,
    overlap,
    restricted,
    without,
)
from heavypath.kernels.verifying.drafted_tree import launch, nodes_of, ranks_of, store_path, tree_arguments

_TARGET = tl.constexpr(int(Stream.TARGET))
_LOG_2 = tl.constexpr(math.log(2))


@triton.jit
def _best(
    target,
    draft,
    log_multiple,
    uniform_log_q,
    share,
    begin,
    end,
    V,
    token,
    left_out,
    noise_row,
    seed_low,
    seed_high,
    FILTERED: tl.constexpr,
    DRAFT_FILTERED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return the best key of the tokens begin .. end - 1 and its token, packed: a draw by P - share * min(P, l Q).

    log_multiple is log2 l, or -inf to draw by P; uniform_log_q is as in `distributions`.
    """
    best = tl.full([], NEVER, tl.int64)
    bar = tl.full([], float("-inf"), tl.float32)  # the best key so far, to base 2, which an upper bound must exceed
    for start in range(begin, end, TILE):
        octet = start // 8 + tl.arange(0, LANES)
        here = octet[:, None] * 8 + tl.arange(0, 8)[None, :]
        if log_multiple > float("-inf"):
            p, covered = overlap(
                target,
                draft,
                log_multiple,
                uniform_log_q,
                here,
                start,
                end,
                V,
                token,
                left_out,
                FILTERED,
                DRAFT_FILTERED,
            )
            weight = p - share * covered
        else:
            x = tl.load(target.row_ptr + here, mask=here < end, other=float("-inf")).to(tl.float32)
            weight = tl.exp2(without(log_prob(target, x, here, FILTERED), here, start, end, token, left_out, V))
        log_weight = tl.where(weight > 0, tl.log2(tl.maximum(weight, 2.0**-126)), float("-inf"))
        bits = octet_bits(seed_low, seed_high, octet, noise_row, tl.full([], _TARGET, tl.int32))
        if tl.max(tl.reshape(log_weight - log2_below(bits, INTERPRETED), [TILE])) > bar:
            key = log_weight * _LOG_2 + gumbel_of(bits)
            packed = tl.where(weight > 0, pack(key, here), NEVER)
            best = tl.maximum(best, tl.max(tl.reshape(packed, [TILE])))
            bar, _ = unpack(best)
            bar = tl.where(best == NEVER, float("-inf"), bar / _LOG_2 - 1e-3)  # for the rounding of bounds
    return best


@triton.jit(do_not_specialize=["max_depth", "seed_ptr", "seed_low", "seed_high", "temperature", "draft_temperature"])
def _walk_kernel(
    tokens_ptr,  # [B, N]
    parents_ptr,  # [B, N], rows parents_stride apart
    ranks_ptr,  # the same, if HAS_RANKS
    noise_rows_ptr,  # [B, N] if HAS_NOISE_ROWS
    decision_ptr,  # [B, N]: the accepted child if DRAFT_AWARE, else the target's token; less than 0 for none
    target_ptr,  # [B, N, V]; this and all pointers down to tickets_ptr are None unless DRAFT_AWARE
    draft_ptr,
    left_out_ptr,
    facts_ptr,
    marks_ptr,
    best_ptr,  # int64 [B, CHUNKS]
    tickets_ptr,  # [B]
    path_ptr,  # [B, max_depth + 1]
    length_ptr,  # [B]
    next_token_ptr,  # [B]
    N,
    V,
    parents_stride,
    ranks_stride,
    target_batch_stride,
    target_stride,
    draft_batch_stride,
    draft_stride,
    max_depth,
    seed_ptr,
    seed_low,
    seed_high,
    temperature,
    draft_temperature,
    DRAFT_AWARE: tl.constexpr,
    LEAVES_OUT: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    HAS_NOISE_ROWS: tl.constexpr,
    FILTERED: tl.constexpr,
    DRAFT_FILTERED: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,  # nodes, rounded up to a power of two
    PATH: tl.constexpr,  # max_depth + 1, rounded up to a power of two
    INTERPRETED: tl.constexpr,
):
    chunk = tl.program_id(0) % CHUNKS
    batch = (tl.program_id(0) // CHUNKS).to(tl.int64)
    tokens_ptr += batch * N
    parents_ptr += batch * parents_stride
    decision_ptr += batch * N

    index = tl.arange(0, BLOCK)
    parent, token, present = nodes_of(tokens_ptr, parents_ptr, index, N, V)
    order = index
    reached = (index == 0).to(tl.int32)
    if not DRAFT_AWARE:
        order = ranks_of(parent, index, parents_ptr, ranks_ptr, batch * ranks_stride, N, HAS_RANKS) * N + index

    last = tl.full([], 0, tl.int32)
    length = tl.full([], 0, tl.int32)
    decision = tl.load(decision_ptr).to(tl.int32)
    going = (decision >= 0) & (length < max_depth)
    while going:
        child = decision
        if not DRAFT_AWARE:
            candidate = present & (tl.gather(reached, tl.maximum(parent, 0), 0) > 0) & (token == decision)
            first = tl.min(tl.where(candidate, order, NONE))
            reached = candidate.to(tl.int32)
            child = tl.where(first < NONE, first % N, -1)
        going = child >= 0
        if going:
            last = child
            length += 1
            decision = tl.load(decision_ptr + last).to(tl.int32)
            going = (decision >= 0) & (length < max_depth)

    if chunk == 0:
        # The path is read upwards from the last node. On the way down `last` may have been one of several siblings with
        # the same token, and the accepted child may belong to another of them.
        path_ptr += batch * (max_depth + 1)
        store_path(path_ptr, length_ptr + batch, parents_ptr, last, length, max_depth, PATH)
    if not DRAFT_AWARE:
        tl.store(next_token_ptr + batch, decision)
    else:
        facts_ptr += (batch * N + last) * FACTS
        marks_ptr += (batch * N + last) * FACTS
        target, draft = load_distributions(
            facts_ptr,
            marks_ptr,
            target_ptr + batch * target_batch_stride + last.to(tl.int64) * target_stride,
            draft_ptr + batch * draft_batch_stride,
            draft_stride,
            temperature,
            draft_temperature,
        )
        log_multiple = tl.load(facts_ptr + FACT_LOG_MULTIPLE)
        uniform_log_q = tl.load(facts_ptr + FACT_UNIFORM_LOG_Q)
        share = tl.load(facts_ptr + FACT_SHARE)
        log_p_mass = tl.load(facts_ptr + FACT_LOG_P_MASS)
        seed_low, seed_high = seed_words(seed_ptr, seed_low, seed_high)
        noise_row = batch * N + last
        if HAS_NOISE_ROWS:
            noise_row = tl.load(noise_rows_ptr + noise_row)
        at_end = length == max_depth  # the node's children, if there are any, are too deep
        log_multiple = tl.where(at_end, float("-inf"), log_multiple)
        log_p_mass = tl.where(at_end, 0.0, log_p_mass)
        left_out = present & (parent == tl.where(at_end, -2, last))
        if LEAVES_OUT:
            left_out &= tl.load(left_out_ptr + batch * N + index, mask=left_out, other=0) > 0
        else:
            left_out = index < 0
        begin = chunk * CHUNK
        best = _best(
            restricted(target, log_p_mass),
            draft,
            log_multiple,
            uniform_log_q,
            share,
            begin,
            tl.minimum(begin + CHUNK, V),
            V,
            token,
            left_out,
            noise_row,
            seed_low,
            seed_high,
            FILTERED,
            DRAFT_FILTERED,
            INTERPRETED,
        )
        tl.store(best_ptr + batch * CHUNKS + chunk, best)
        if is_last(tickets_ptr + batch, CHUNKS):
            every = tl.arange(0, triton.next_power_of_2(CHUNKS))
            all_best = tl.load(
                best_ptr + batch * CHUNKS + every, mask=every < CHUNKS, other=NEVER, cache_modifier=".cg"
            )
            best = tl.max(all_best)
            if (best == NEVER) & (decision != -2):  # the residual is 0 by rounding: draw by P
                best = _best(
                    target,
                    draft,
                    float("-inf"),
                    1.0,
                    1.0,
                    0,
                    V,
                    V,
                    token,
                    index < 0,
                    noise_row,
                    seed_low,
                    seed_high,
                    FILTERED,
                    DRAFT_FILTERED,
                    INTERPRETED,
                )
            _, next_token = unpack(best)
            tl.store(next_token_ptr + batch, tl.where((best == NEVER) | (decision == -2), -1, next_token))


def launch_walk(inputs: VerifyInputs, decided: Decided) -> Verified:
    """Walk down trees [B, N] from `laid_out`, by choices, or by tokens if `decided` has no facts.

    draft_logits may hold anything if no node has children.
    """
    tokens = inputs.nodes.tokens
    max_depth = inputs.max_depth
    device = tokens.device
    vocab_size = inputs.target_logits.shape[-1]
    batch = len(tokens)
    draft_aware = decided.facts is not None
    chunks = triton.cdiv(vocab_size, CHUNK.value) if draft_aware else 1
    best = torch.empty(batch, chunks, dtype=torch.long, device=device) if draft_aware else None
    path = torch.empty(batch, max_depth + 1, dtype=torch.long, device=device)
    length = torch.empty(batch, dtype=torch.long, device=device)
    next_token = torch.empty_like(tokens[:, 0])
    without_rows = {} if draft_aware else {"target_ptr": None, "draft_ptr": None}
    with torch.cuda.device_of(tokens):
        launch(
            _walk_kernel,
            batch * chunks,
            tree_arguments(inputs) | without_rows,
            decision_ptr=decided.choice,
            left_out_ptr=decided.left_out,
            facts_ptr=decided.facts,
            marks_ptr=decided.marks,
            best_ptr=best,
            tickets_ptr=tickets(batch, device) if draft_aware else None,
            path_ptr=path,
            length_ptr=length,
            next_token_ptr=next_token,
            max_depth=max_depth,
            DRAFT_AWARE=draft_aware,
            LEAVES_OUT=decided.left_out is not None,
            FILTERED=inputs.target_filters.drop(vocab_size),
            DRAFT_FILTERED=inputs.draft_filters.drop(vocab_size),
            CHUNKS=chunks,
            PATH=triton.next_power_of_2(max_depth + 1),
            INTERPRETED=not tokens.is_cuda,
        )
    return Verified(path, length, next_token)
