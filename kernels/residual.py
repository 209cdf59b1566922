"""One node of a drafted tree: try its children in draw order, and say what the recovered token is drawn by.

At a node with target distribution P and draft distribution Q, let x_1, x_2, ... be its children in draw order,
F(l) = sum_v max(P(v) - l Q(v), 0), l_1 = 0, and R_k the mass of Q outside the children before x_k. Then

    accept x_k  iff  coin_k < max(P(x_k) - l_k Q(x_k), 0) / F(l_k) * R_k / Q(x_k)
    if rejected      l_{k+1} = l_k + F(l_k) / R_k
    all rejected     recovered token ~ max(P - l Q, 0)

which is Sequoia's algorithm 2 (Chen et al. 2024) and RSD's recursive rejection sampling (Jeon et al. 2024) without
a residual distribution ever being stored; with R = 1 it is SpecInfer's multi-step speculative sampling (Miao et al.
2023), and with one child standard speculative sampling (Leviathan et al. 2023). What multiplies Q stays in the log
domain, and R_k is summed over the tokens not yet drawn, so nothing cancels or underflows.

Where the children so far have used up the draft's support, the next was drawn uniformly from the tokens left: the
chain starts again with P and Q restricted to those. A child drawn at draft temperature 0 is the same with one token
left, the child itself. A child that the draft could not have drawn is passed over like an absent one.

K-SEQ (SpecTr, Sun et al. 2023, algorithm 2) takes K independent children of Q. With C(g) = sum_v min(P(v), g Q(v)),
the part of P that g Q covers, and A(g) = 1 - (1 - C(g) / g)^K, the probability that it accepts any,

    g in [1, K]      the least with C(g) >= A(g); K is always one
    accept x_k  iff  coin_k < P(x_k) / (g Q(x_k))
    all rejected     recovered token ~ P - min(P, g Q) A(g) / C(g)

The target's law is kept for every g with C(g) >= A(g), so the search for the least one may stop anywhere above it.

On a GPU every node is worked on at once. Programs share a node's rows for the one pass that normalises them; the last
to finish goes through the children: the first costs two numbers, since F(0) = 1, each later one a pass over both rows.
"""

# Triton's language is no Python that a type checker knows.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from heavypath.kernels.filtering import HIDDEN_BITS, LOWEST, Filters, cut_of, filter_cut, is_kept, softmax_scale
from heavypath.kernels.noise import Stream, philox_words, seed_words
from heavypath.kernels.tickets import is_last, tickets

SEARCH_STEPS = tl.constexpr(12)  # for K-SEQ's g


def residual_chain(
    log_target: Tensor, log_draft: Tensor | None, drawn: np.ndarray, coins: np.ndarray, replacement: bool
) -> tuple[np.ndarray, Tensor]:
    """Try the children of one node per sequence in draw order, by the closed form above.

    log_target, log_draft: [A, V], log2 P and log2 Q; no draft says each child is a point mass. drawn: int64 [A, K],
    -1 for no child. coins: fp64 [A, K]. Returns the place of the accepted child or -1, [A], and weights [A', V] that
    the recovered tokens of the A' sequences without an accepted child are drawn by. Rows stay where they are, and what
    is one number for a sequence is fp64 on the host.
    """
    choice, waiting = np.full(len(drawn), -1), drawn >= 0
    target = residual = undrawn = None  # P, max(P - l Q, 0) and the tokens not drawn, once a child has been rejected
    total, log_lambda, log_mass = np.ones(len(drawn)), np.full(len(drawn), -np.inf), 0.0  # F(l), log l, log R
    draft = torch.full_like(log_target, -torch.inf) if log_draft is None else log_draft
    distinct = log_draft is None or not replacement
    for place in range(drawn.shape[1]):
        child, here = drawn[:, place].clip(min=0), waiting[:, place]
        if log_draft is None or (place and distinct):
            undrawn = torch.ones_like(draft, dtype=torch.bool) if undrawn is None else undrawn
            log_mass = _host(_log_sums(draft.where(undrawn, -torch.inf)))
            restart = here & (log_mass == -np.inf)
            if restart.any():
                again = _column(restart, log_target)
                left = undrawn
                if log_draft is None:
                    left = torch.zeros_like(undrawn).scatter_(1, _column(child, log_target), True)
                target = log_target.exp2() if target is None else target
                target = target.where(~again | undrawn, 0)
                target = target / target.sum(-1, keepdim=True).clamp(min=torch.finfo(target.dtype).tiny)
                residual = target if residual is None else target.where(again, residual)
                uniform = -left.sum(-1, keepdim=True).to(draft.dtype).log2()
                draft = torch.where(again, uniform.where(left, -torch.inf), draft)
                total = np.where(restart, _host(target.sum(-1)), total)
                log_lambda, log_mass = np.where(restart, -np.inf, log_lambda), np.where(restart, 0, log_mass)
            here = here & (_at(undrawn, child) > 0)

        log_q = _at(draft, child)
        here = here & (log_q > -np.inf)
        with np.errstate(all="ignore"):
            if residual is None:  # l = 0 and F = 1
                ratio = np.exp2(_at(log_target, child) - log_q)
            else:
                ratio = _at(residual, child) / total * np.exp2(log_mass - log_q)
            accepted = here & (coins[:, place] < ratio)
            rejected = here & ~accepted
            choice[accepted] = place
            waiting[accepted] = False
            if not waiting.any():
                break
            if not rejected.any():
                continue
            log_lambda = np.where(rejected, np.logaddexp2(log_lambda, np.log2(total) - log_mass), log_lambda)
        if distinct:
            undrawn = torch.ones_like(draft, dtype=torch.bool) if undrawn is None else undrawn
            kept = torch.from_numpy(~rejected)[:, None].to(undrawn.device)
            place_of = _column(child, undrawn)
            undrawn = undrawn.scatter(1, place_of, kept & undrawn.gather(1, place_of))
        target = log_target.exp2() if target is None else target
        residual = torch.add(draft, _column(log_lambda, draft).to(draft.dtype)).exp2_()
        residual = torch.sub(target, residual, out=residual).clamp_(min=0)
        total = _host(residual.sum(-1))

    if (choice >= 0).all():
        return choice, log_target[:0]
    weights = log_target.exp2() if residual is None else residual
    if (total <= 0).any():  # by rounding, or for a child that neither model could draw
        weights = weights.where(_column(total > 0, weights), log_target.exp2())
    return choice, weights if (choice < 0).all() else weights[torch.from_numpy(choice < 0).to(weights.device)]


def k_seq(log_target: Tensor, log_draft: Tensor, drawn: np.ndarray, coins: np.ndarray) -> tuple[np.ndarray, Tensor]:
    """As `residual_chain`, by K-SEQ."""
    tokens = drawn.clip(min=0)
    log_p, log_q = (_at(rows, tokens) for rows in (log_target, log_draft))
    here = (drawn >= 0) & (log_q > -np.inf)
    children = here.sum(1)
    target, draft = log_target.exp2(), log_draft.exp2()
    share_of = torch.empty_like(draft)

    def covered(g: np.ndarray) -> np.ndarray:
        torch.mul(draft, _column(g, draft).to(draft.dtype), out=share_of)
        return _host(torch.minimum(target, share_of, out=share_of).sum(-1))

    def accepting(g: np.ndarray, cover: np.ndarray) -> np.ndarray:
        return 1 - np.maximum(1 - cover / g, 0) ** children

    # Regula falsi by the Illinois rule: the least g lies in [low, high], whose upper end always does.
    low, high = np.ones(len(drawn)), np.maximum(children, 1.0)
    cover = covered(low)
    low_gap = cover - accepting(low, cover)
    cover = covered(high)
    high_gap = cover - accepting(high, cover)
    high, enough = np.where(low_gap >= 0, low, high), None
    for _ in range(SEARCH_STEPS.value):
        if (high == low).all():
            break
        slope = np.where(high > low, high_gap - low_gap, 1)
        middle = (high - high_gap * (high - low) / np.where(slope == 0, 1, slope)).clip(low, high)
        cover = covered(middle)
        gap = cover - accepting(middle, cover)
        before, enough = enough, gap >= 0
        again = np.zeros_like(enough) if before is None else enough == before
        low_gap = np.where(enough, np.where(again, low_gap / 2, low_gap), gap)
        high_gap = np.where(enough, gap, np.where(again, high_gap / 2, high_gap))
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)

    with np.errstate(all="ignore"):
        accepted = here & (coins < np.exp2(log_p - log_q) / high[:, None])
    choice = np.where(accepted.any(1), accepted.argmax(1) if drawn.shape[1] else -1, -1)
    cover = covered(high)
    share = np.minimum(accepting(high, cover) / np.maximum(cover, np.finfo(np.float64).tiny), 1)
    stopped = torch.from_numpy(choice < 0).to(target.device)
    weights = (target - _column(share, target).to(target.dtype) * share_of)[stopped].clamp_(min=0)
    return choice, weights.where((weights > 0).any(-1, keepdim=True), target[stopped])


def _log_sums(logs: Tensor) -> Tensor:
    """log2 [A] of sums of 2^logs [A, V]; -inf where there is nothing."""
    largest = logs.amax(-1, keepdim=True).clamp_(min=torch.finfo(logs.dtype).min)
    return largest[:, 0] + (logs - largest).exp2_().sum(-1).log2_()


def _host(rows: Tensor) -> np.ndarray:
    return rows.double().cpu().numpy()


def _column(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values)[:, None].to(like.device)


def _at(rows: Tensor, tokens: np.ndarray) -> np.ndarray:
    """fp64 values of rows [A, V] at tokens [A] or [A, K], on the host."""
    place = torch.from_numpy(tokens if tokens.ndim == 2 else tokens[:, None]).to(rows.device)
    return rows.gather(1, place).double().cpu().numpy().reshape(tokens.shape)


LANES = tl.constexpr(256)  # threads of a program; each holds eight neighbouring tokens of a tile
TILE = tl.constexpr(8 * 256)
CHUNK = tl.constexpr(4 * 8 * 256)
FACTS = tl.constexpr(8)  # numbers that _chain_kernel leaves about a node, and integers
_ACCEPT = tl.constexpr(int(Stream.ACCEPT))
_NONE = tl.constexpr(2**31 - 1)


@triton.jit
def add_logs(a, b):
    """log2(2^a + 2^b)"""
    larger = tl.maximum(tl.maximum(a, b), LOWEST)
    return larger + tl.log2(tl.exp2(a - larger) + tl.exp2(b - larger))


@triton.jit
def _log_sum(logs, where, also):
    """log2 of the sum of 2^logs at some places, and of 2^also."""
    logs = tl.where(where, logs, float("-inf"))
    larger = tl.maximum(tl.maximum(tl.max(logs), also), LOWEST)
    return larger + tl.log2(tl.sum(tl.exp2(logs - larger)) + tl.exp2(also - larger))


@triton.jit
def without(values, token, start, end, child_token, left_out, V):
    """values [...] at tokens start <= token < end, -inf at those that left_out children carry."""
    here = left_out & (child_token >= start) & (child_token < end)
    out = tl.min(tl.where(here, child_token, V))
    while out < V:
        values = tl.where(token == out, float("-inf"), values)
        out = tl.min(tl.where(here & (child_token > out), child_token, V))
    return values


@triton.jit
def ranks_of(parent, index, parents_ptr, N):
    """Places among siblings in index order."""
    rank = tl.zeros_like(index)
    for other in range(N):
        rank += tl.where((parent == tl.load(parents_ptr + other)) & (index > other), 1, 0)
    return rank


@triton.jit
def _equal_contexts(parent, token, node, parents_ptr, tokens_ptr):
    """Whether the tokens from the root to each `parent` are those from the root to `node`."""
    same = parent == node
    equal = parent >= 0
    while node > 0:
        there = equal & (parent > 0)
        their = tl.load(tokens_ptr + parent, mask=there, other=-1)
        equal = same | (there & (their == tl.load(tokens_ptr + node)) & (their >= 0))
        parent = tl.load(parents_ptr + parent, mask=there, other=-1).to(tl.int32)
        node = tl.load(parents_ptr + node).to(tl.int32)
        same |= equal & (parent == node)
    return equal & (parent == node)


# A row and what turns its logits into a filtered distribution, as kernels hand it around:
#     side = (row_ptr, largest, log_total, temperature, cut_key, cut_end, log_min_p)
# largest is the largest logit; log_total, and every logarithm here, is to base 2.


@triton.jit
def _part(side, begin, end, V, child_token, left_out, FILTERED: tl.constexpr, HIDDEN: tl.constexpr):
    """The largest logit of tokens begin .. end - 1 but left_out children's, and the sum of exponentials less it."""
    row_ptr, whole_largest, _, temperature, cut_key, cut_end, log_min_p = side
    scale = softmax_scale(temperature)
    largest = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
        x = tl.load(row_ptr + token, mask=token < end, other=float("-inf")).to(tl.float32)
        if FILTERED:
            kept = is_kept(x, token, whole_largest, temperature, cut_key, cut_end, log_min_p, HIDDEN)
            x = tl.where(kept, x, float("-inf"))
        x = without(x, token, start, start + TILE, child_token, left_out, V)
        higher = tl.maximum(largest, tl.max(x, 1))
        total = total * tl.exp2((largest - higher) * scale) + tl.sum(tl.exp2((x - higher[:, None]) * scale), 1)
        largest = higher
    highest = tl.max(largest)
    return highest, tl.sum(total * tl.exp2((largest - highest) * scale))


@triton.jit
def log_prob(side, x, token, FILTERED: tl.constexpr, HIDDEN: tl.constexpr):
    """log2 of the probability of tokens with logits x."""
    _, largest, log_total, temperature, cut_key, cut_end, log_min_p = side
    logs = (x - largest) * softmax_scale(temperature) - log_total
    if FILTERED:
        kept = is_kept(x, token, largest, temperature, cut_key, cut_end, log_min_p, HIDDEN)
        logs = tl.where(kept, logs, float("-inf"))
    return logs


@triton.jit
def shares(
    target, draft, log_multiple, uniform, token, start, end, V, child_token, left_out,
    FILTERED: tl.constexpr, DRAFT_FILTERED: tl.constexpr, HIDDEN: tl.constexpr, DRAFT_HIDDEN: tl.constexpr,
):  # fmt: skip
    """P and min(P, l Q) of tokens start <= token < end, with log l, and for Q `uniform` where that is a logarithm."""
    x = tl.load(target[0] + token, mask=token < end, other=float("-inf")).to(tl.float32)
    log_p = log_prob(target, x, token, FILTERED, HIDDEN)
    if uniform > 0:
        y = tl.load(draft[0] + token, mask=token < end, other=float("-inf")).to(tl.float32)
        log_q = log_prob(draft, y, token, DRAFT_FILTERED, DRAFT_HIDDEN)
    else:
        log_q = tl.zeros_like(log_p) + uniform
        log_p = without(log_p, token, start, end, child_token, left_out, V)
    p = tl.exp2(log_p)
    return p, tl.minimum(p, tl.exp2(log_q + log_multiple))


@triton.jit
def _sums(
    target, draft, log_multiple, uniform, V, child_token, left_out,
    FILTERED: tl.constexpr, DRAFT_FILTERED: tl.constexpr, HIDDEN: tl.constexpr, DRAFT_HIDDEN: tl.constexpr,
):  # fmt: skip
    """F(l) and C(l)."""
    over, covered = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for start in range(0, V, TILE):
        p, cover = shares(
            target, draft, log_multiple, uniform, start + tl.arange(0, TILE), start, tl.minimum(start + TILE, V), V,
            child_token, left_out, FILTERED, DRAFT_FILTERED, HIDDEN, DRAFT_HIDDEN,
        )  # fmt: skip
        over += p - cover
        covered += cover
    return tl.sum(over), tl.sum(covered)


@triton.jit
def _accepting(g, covered, children):
    """A(g), in fp64."""
    refuse = tl.maximum(1 - covered.to(tl.float64) / g, 1e-300)
    return 1 - tl.exp(children * tl.log(refuse))


_NUMBERS = ["seed_low", "seed_high", "temperature", "top_k", "top_p", "log_min_p"]
_NUMBERS += ["draft_temperature", "draft_top_k", "draft_top_p", "draft_log_min_p"]


@triton.jit(do_not_specialize=_NUMBERS)
def _chain_kernel(
    tokens_ptr,  # [B, N]
    parents_ptr,  # [B, N], rows parents_stride apart
    ranks_ptr,  # the same, if HAS_RANKS
    rows_ptr,  # [B, N] if HAS_ROWS
    target_ptr,  # [B, N, V]
    draft_ptr,  # [B, N, V]
    choice_ptr,  # int32 [B, N]: the accepted child, -1 for none, -2 if a row has no distribution
    left_out_ptr,  # int32 [B, N]: children of whom P is restricted to others
    facts_ptr,  # fp32 [B, N, FACTS]
    marks_ptr,  # int32 [B, N, FACTS]
    parts_ptr,  # fp32 [B, N, 4, CHUNKS]
    tickets_ptr,  # [B, N]
    N,
    V,
    parents_stride,
    ranks_stride,
    target_batch_stride,
    target_stride,
    draft_batch_stride,
    draft_stride,
    seed_low,
    seed_high,
    temperature,
    top_k,
    top_p,
    log_min_p,
    draft_temperature,
    draft_top_k,
    draft_top_p,
    draft_log_min_p,
    REPLACEMENT: tl.constexpr,
    K_SEQ: tl.constexpr,
    POINT_MASSES: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    FILTERED: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    DRAFT_FILTERED: tl.constexpr,
    DRAFT_HAS_TOP_K: tl.constexpr,
    DRAFT_HAS_TOP_P: tl.constexpr,
    HIDDEN: tl.constexpr,
    DRAFT_HIDDEN: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,  # nodes, rounded up to a power of two
):
    chunk = tl.program_id(0) % CHUNKS
    batch = tl.program_id(0) // CHUNKS // N
    node = tl.program_id(0) // CHUNKS % N
    place = batch.to(tl.int64) * N + node
    tokens_ptr += batch.to(tl.int64) * N
    parents_ptr += batch.to(tl.int64) * parents_stride
    leaves_out: tl.constexpr = POINT_MASSES or not REPLACEMENT

    index = tl.arange(0, BLOCK)
    parent = tl.load(parents_ptr + index, mask=index < N, other=-1).to(tl.int32)
    token = tl.load(tokens_ptr + index, mask=index < N, other=-1).to(tl.int32)
    child = (parent >= 0) & (parent < index) & (token >= 0) & (token < V)
    if REPLACEMENT and not POINT_MASSES:
        child &= _equal_contexts(parent, token, node, parents_ptr, tokens_ptr)
    else:
        child &= parent == node
    if not HAS_DRAFT:
        child &= index < 0
    has_children = tl.max(child.to(tl.int32)) > 0
    first = tl.argmax(child.to(tl.int32), 0)
    source = tl.max(tl.where(index == first, parent, 0))  # whose draft row the children were drawn from

    none = tl.full([], 0, tl.uint32)
    target_row = target_ptr + batch.to(tl.int64) * target_batch_stride + node.to(tl.int64) * target_stride
    draft_row = draft_ptr + batch.to(tl.int64) * draft_batch_stride + source.to(tl.int64) * draft_stride
    target = (target_row, 0.0, 0.0, temperature, none, V, log_min_p)
    draft = (draft_row, 0.0, 0.0, draft_temperature, none, V, draft_log_min_p)
    begin = chunk * CHUNK
    end = tl.minimum(begin + CHUNK, V)
    left_out = child if leaves_out else child & (index < 0)
    part_ptr = parts_ptr + place * 4 * CHUNKS + chunk
    largest, total = _part(target, begin, end, V, token, left_out, False, HIDDEN)
    tl.store(part_ptr, largest)
    tl.store(part_ptr + CHUNKS, total)
    if has_children and not POINT_MASSES:
        largest, total = _part(draft, begin, end, V, token, left_out, False, DRAFT_HIDDEN)
        tl.store(part_ptr + 2 * CHUNKS, largest)
        tl.store(part_ptr + 3 * CHUNKS, total)
    if is_last(tickets_ptr + place, CHUNKS):
        if HAS_RANKS:
            rank = tl.load(ranks_ptr + batch.to(tl.int64) * ranks_stride + index, mask=index < N, other=0).to(tl.int32)
        else:
            rank = ranks_of(parent, index, parents_ptr, N)
        if HAS_ROWS:
            row = tl.load(rows_ptr + batch.to(tl.int64) * N + parent, mask=child, other=0)
        else:
            row = batch.to(tl.int64) * N + parent
        words = (rank // 4).to(tl.uint32), row.to(tl.uint32), (row >> 32).to(tl.uint32)
        w0, w1, w2, w3 = philox_words(seed_low, seed_high, *words, tl.full([], _ACCEPT, tl.uint32))
        word = rank % 4
        word = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
        coin = (word >> 8).to(tl.float32) * (2.0**-24)
        order = tl.where(child, rank * N + index, _NONE)

        target, target_outside, usable = _normalized(
            target, part_ptr - chunk, V, token, left_out, top_k, top_p,
            leaves_out, FILTERED, HAS_TOP_K, HAS_TOP_P, HIDDEN, CHUNKS,
        )  # fmt: skip
        choice = tl.where(usable, -1, -2)
        log_multiple = tl.full([], float("-inf"), tl.float32)
        share = tl.full([], 1.0, tl.float32)
        p_offset = tl.full([], 0.0, tl.float32)
        uniform = tl.full([], 1.0, tl.float32)
        restricted = tl.zeros_like(index)
        if has_children:
            if POINT_MASSES:
                draft_outside = tl.full([], float("-inf"), tl.float32)
            else:
                draft, draft_outside, draft_usable = _normalized(
                    draft, part_ptr - chunk + 2 * CHUNKS, V, token, left_out, draft_top_k, draft_top_p,
                    leaves_out, DRAFT_FILTERED, DRAFT_HAS_TOP_K, DRAFT_HAS_TOP_P, DRAFT_HIDDEN, CHUNKS,
                )  # fmt: skip
                choice = tl.where(draft_usable, choice, -2)
            x = tl.load(target_row + token, mask=child, other=float("-inf")).to(tl.float32)
            log_p = log_prob(target, x, token, FILTERED, HIDDEN)
            log_q = tl.full([BLOCK], float("-inf"), tl.float32)
            if not POINT_MASSES:
                y = tl.load(draft_row + token, mask=child, other=float("-inf")).to(tl.float32)
                log_q = log_prob(draft, y, token, DRAFT_FILTERED, DRAFT_HIDDEN)
            if K_SEQ:
                choice, log_multiple, share = _k_seq(
                    target, draft, V, token, order, coin, log_p, log_q, choice,
                    FILTERED, DRAFT_FILTERED, HIDDEN, DRAFT_HIDDEN,
                )  # fmt: skip
            else:
                choice, log_multiple, p_offset, uniform, restricted = _chain(
                    target, draft, target_outside, draft_outside, V, N, token, index, order, coin, log_p, log_q, choice,
                    REPLACEMENT, POINT_MASSES, FILTERED, DRAFT_FILTERED, HIDDEN, DRAFT_HIDDEN,
                )  # fmt: skip

        tl.store(choice_ptr + place, choice)
        if leaves_out:
            tl.store(left_out_ptr + batch.to(tl.int64) * N + index, restricted, mask=child)
        facts_ptr += place * FACTS
        tl.store(facts_ptr, target[1])
        tl.store(facts_ptr + 1, target[2])
        tl.store(facts_ptr + 2, draft[1])
        tl.store(facts_ptr + 3, draft[2])
        tl.store(facts_ptr + 4, log_multiple)
        tl.store(facts_ptr + 5, uniform)
        tl.store(facts_ptr + 6, share)
        tl.store(facts_ptr + 7, p_offset)
        marks_ptr += place * FACTS
        tl.store(marks_ptr, target[4].to(tl.int32, bitcast=True))
        tl.store(marks_ptr + 1, target[5])
        tl.store(marks_ptr + 2, draft[4].to(tl.int32, bitcast=True))
        tl.store(marks_ptr + 3, draft[5])
        tl.store(marks_ptr + 4, source)


@triton.jit
def _normalized(
    side, part_ptr, V, token, left_out, top_k, top_p, LEAVES_OUT: tl.constexpr,
    FILTERED: tl.constexpr, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HIDDEN: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """The side with all it needs, the logarithm of its mass outside the children left out, and whether there is any."""
    row_ptr, _, _, temperature, cut_key, cut_end, log_min_p = side
    scale = softmax_scale(temperature)
    chunk = tl.arange(0, triton.next_power_of_2(CHUNKS))
    parts = tl.load(part_ptr + chunk, mask=chunk < CHUNKS, other=LOWEST, cache_modifier=".cg")
    sums = tl.load(part_ptr + CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0, cache_modifier=".cg")
    outside_largest = tl.max(parts)
    outside = tl.sum(sums * tl.exp2((parts - outside_largest) * scale))
    largest, total = outside_largest, outside
    if LEAVES_OUT:
        x = tl.load(row_ptr + token, mask=left_out, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, tl.max(x))
        total = outside * tl.exp2((outside_largest - largest) * scale)
        out = tl.min(tl.where(left_out, token, V))
        while out < V:  # each token once
            total += tl.exp2((tl.max(tl.where(left_out & (token == out), x, float("-inf"))) - largest) * scale)
            out = tl.min(tl.where(left_out & (token > out), token, V))
    usable = total > 0
    if FILTERED:
        cut_key, cut_end, total = filter_cut(
            row_ptr, V, largest, temperature, top_k, top_p, log_min_p, HAS_TOP_K, HAS_TOP_P, HIDDEN
        )
        if LEAVES_OUT:
            whole = (row_ptr, largest, 0.0, temperature, cut_key, cut_end, log_min_p)
            outside_largest, outside = _part(whole, 0, V, V, token, left_out, True, HIDDEN)
    log_total = tl.log2(tl.where(usable, total, 1.0))
    log_outside = (outside_largest - largest) * scale + tl.log2(outside) - log_total
    return (row_ptr, largest, log_total, temperature, cut_key, cut_end, log_min_p), log_outside, usable


@triton.jit
def _chain(
    target, draft, target_outside, draft_outside, V, N, token, index, order, coin, log_p, log_q, choice,
    REPLACEMENT: tl.constexpr, POINT_MASSES: tl.constexpr,
    FILTERED: tl.constexpr, DRAFT_FILTERED: tl.constexpr, HIDDEN: tl.constexpr, DRAFT_HIDDEN: tl.constexpr,
):  # fmt: skip
    """The closed form: choice, log l, log of the P left, log of a uniform Q (or 1), children of the P given up."""
    leaves_out: tl.constexpr = POINT_MASSES or not REPLACEMENT
    log_multiple = tl.full([], float("-inf"), tl.float32)
    left = tl.full([], 0.0, tl.float32)  # log of the P left
    uniform = tl.full([], 1.0, tl.float32)
    over = tl.full([], 1.0, tl.float32)  # F(l)
    rejected, restricted = tl.zeros_like(index), tl.zeros_like(index)
    tokens_left, tokens_then = V.to(tl.float32), V.to(tl.float32)
    next_order = tl.where(choice == -1, tl.min(order), _NONE)
    while next_order < _NONE:
        this = next_order % N
        one = index == this
        this_token = tl.sum(tl.where(one, token, 0))
        this_p = tl.sum(tl.where(one, log_p, 0.0))
        this_q = tl.sum(tl.where(one, log_q, 0.0))
        log_mass = tl.full([], 0.0, tl.float32)
        fresh = tl.full([], 1, tl.int32)
        if leaves_out:
            open = (order < _NONE) & (rejected == 0)
            fresh = tl.min(tl.where((rejected > 0) & (token == this_token), 0, 1))
            if POINT_MASSES:
                log_mass = tl.full([], float("-inf"), tl.float32)
            elif tl.max(rejected) > 0:
                log_mass = _log_sum(log_q, open, draft_outside) if uniform > 0 else tl.log2(tokens_left / tokens_then)
            if log_mass == float("-inf"):
                left = tl.maximum(_log_sum(log_p, open, target_outside), LOWEST)
                log_multiple = tl.full([], float("-inf"), tl.float32)
                log_mass = tl.full([], 0.0, tl.float32)
                over = tl.full([], 1.0, tl.float32)
                restricted = rejected
                tokens_then = tl.where(POINT_MASSES, 1.0, tokens_left)
                uniform = -tl.log2(tokens_then)
            if uniform <= 0:
                this_q = uniform
        # (P - l Q) R / (Q F), in an order in which nothing overflows.
        ratio = tl.exp2(this_p - left - this_q + log_mass) - tl.exp2(log_multiple + log_mass)
        ratio = tl.maximum(ratio, 0.0) / over
        here = (this_q > float("-inf")) & (fresh > 0)
        accepted = here & (tl.sum(tl.where(one, coin, 0.0)) < ratio)
        next_order = tl.min(tl.where(order > next_order, order, _NONE))
        if accepted:
            choice = this
            next_order = _NONE
        elif here:
            rejected = tl.where(one, 1, rejected)
            tokens_left -= 1
            if POINT_MASSES:
                restricted = rejected
            else:
                log_multiple = add_logs(log_multiple, tl.log2(over) - log_mass)
                if next_order < _NONE:
                    over, _ = _sums(
                        (target[0], target[1], target[2] + left, target[3], target[4], target[5], target[6]), draft,
                        log_multiple, uniform, V, token, restricted > 0, FILTERED, DRAFT_FILTERED, HIDDEN, DRAFT_HIDDEN,
                    )  # fmt: skip
    return choice, log_multiple, left, uniform, restricted


@triton.jit
def _k_seq(
    target, draft, V, token, order, coin, log_p, log_q, choice,
    FILTERED: tl.constexpr, DRAFT_FILTERED: tl.constexpr, HIDDEN: tl.constexpr, DRAFT_HIDDEN: tl.constexpr,
):  # fmt: skip
    """K-SEQ: choice, log g, A(g) / C(g)."""
    here = (order < _NONE) & (log_q > float("-inf"))
    children = tl.sum(here.to(tl.int32)).to(tl.float64)
    low = tl.full([], 1.0, tl.float64)
    high = tl.maximum(children, 1.0)
    low_gap, high_gap = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    before = tl.full([], -1, tl.int32)
    for step in range(SEARCH_STEPS + 2):  # both ends first
        width = (high - low) / tl.where(high > low, high_gap - low_gap, 1.0)
        middle = tl.minimum(tl.maximum(high - high_gap * width, low), high)
        middle = tl.where(step == 0, low, tl.where(step == 1, high, middle))
        _, covered = _sums(
            target, draft, tl.log2(middle.to(tl.float32)), 1.0, V, token, order < 0,
            FILTERED, DRAFT_FILTERED, HIDDEN, DRAFT_HIDDEN,
        )  # fmt: skip
        gap = covered.to(tl.float64) - _accepting(middle, covered, children)
        enough = gap >= 0
        if step == 0:
            low_gap = gap
            high = tl.where(enough, low, high)
        elif step == 1:
            high_gap = gap
        elif enough:
            low_gap = tl.where(before == 1, low_gap / 2, low_gap)
            high, high_gap, before = middle, gap, tl.full([], 1, tl.int32)
        else:
            high_gap = tl.where(before == 0, high_gap / 2, high_gap)
            low, low_gap, before = middle, gap, tl.full([], 0, tl.int32)
    g = high.to(tl.float32)
    _, covered = _sums(
        target, draft, tl.log2(g), 1.0, V, token, order < 0, FILTERED, DRAFT_FILTERED, HIDDEN, DRAFT_HIDDEN
    )
    accepting = _accepting(g.to(tl.float64), covered, children).to(tl.float32)
    share = tl.minimum(accepting / tl.maximum(covered, 2.0**-126), 1.0)
    accepted = tl.min(tl.where(here & (coin < tl.exp2(log_p - log_q) / g), order, _NONE))
    index = tl.arange(0, order.shape[0])
    found = tl.sum(tl.where((order == accepted) & here, index, 0))
    choice = tl.where((choice == -1) & (accepted < _NONE), found, choice)
    return choice, tl.log2(g), share


class Decided(NamedTuple):
    """What _chain_kernel leaves for the walk, as its arguments say."""

    choice: Tensor
    left_out: Tensor
    facts: Tensor
    marks: Tensor


def leaves_out(method: str, draft_filters: Filters) -> bool:
    """Whether a chain may restrict P to the tokens that no rejected child carries."""
    return method == "without_replacement" or (method == "with_replacement" and draft_filters.temperature == 0)


def launch_chain(
    tokens: Tensor,
    parents: Tensor,
    ranks: Tensor | None,
    rows: Tensor | None,
    target: Tensor,
    draft: Tensor | None,
    method: str,
    target_filters: Filters,
    draft_filters: Filters,
    seed: int,
) -> Decided:
    """Decide for every node of [B, N] at once; logits [B, N, V], contiguous in V; without a draft there is one node."""
    batch, nodes = tokens.shape
    device, vocab_size = tokens.device, target.shape[-1]
    cut, draft_cut = cut_of(target_filters, vocab_size), cut_of(draft_filters, vocab_size)
    chunks = triton.cdiv(vocab_size, CHUNK.value)
    ints = torch.empty(batch * nodes * (2 + FACTS.value), dtype=torch.int32, device=device)
    numbers = torch.empty(batch * nodes * (FACTS.value + 4 * chunks), device=device)
    choice, left_out, marks = ints.split([batch * nodes, batch * nodes, batch * nodes * FACTS.value])
    facts, parts = numbers.split([batch * nodes * FACTS.value, batch * nodes * 4 * chunks])
    source = target if draft is None else draft
    with torch.cuda.device_of(tokens):
        _chain_kernel[(batch * nodes * chunks,)](
            tokens, parents, ranks, rows, target, source, choice, left_out, facts, marks, parts,
            tickets(batch * nodes, device), nodes, vocab_size,
            parents.stride(0), 0 if ranks is None else ranks.stride(0),
            *target.stride()[:2], *source.stride()[:2], *seed_words(seed), *cut.numbers, *draft_cut.numbers,
            REPLACEMENT=method != "without_replacement", K_SEQ=method == "kseq",
            POINT_MASSES=draft_filters.temperature == 0, HAS_DRAFT=draft is not None, HAS_RANKS=ranks is not None,
            HAS_ROWS=rows is not None, FILTERED=cut.filtered, HAS_TOP_K=cut.has_top_k, HAS_TOP_P=cut.has_top_p,
            DRAFT_FILTERED=draft_cut.filtered, DRAFT_HAS_TOP_K=draft_cut.has_top_k,
            DRAFT_HAS_TOP_P=draft_cut.has_top_p, HIDDEN=HIDDEN_BITS[target.dtype],
            DRAFT_HIDDEN=HIDDEN_BITS[source.dtype], CHUNKS=chunks, BLOCK=max(16, triton.next_power_of_2(nodes)),
            num_warps=LANES.value // 32, enable_fp_fusion=True, maxnreg=255,  # or ptxas spills for occupancy
        )  # fmt: skip
    return Decided(choice, left_out, facts, marks)
