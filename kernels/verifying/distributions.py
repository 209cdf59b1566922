"""The distributions P (target) and Q (draft) of a node, computed from rows of logits; and the overlap of P and l Q.

For a row of logits x with the largest m, at temperature T, and with all logarithms to base 2:

    log_total    log sum_v 2^((x(v) - m) log(e) / T)         over the tokens v that the filters keep
    log P(v)     (x(v) - m) log(e) / T - log_total           -inf for other tokens
    F(l)         sum_v max(P(v) - l Q(v), 0)
    C(l)         sum_v min(P(v), l Q(v))

No row of probabilities is stored on a GPU. Kernels pass a row of logits with the numbers that turn it into a
distribution, and compute P and Q when they read x. Each of the programs that share a row finds the largest logit and
the sum of its chunk, and the last of them to finish combines these.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

import math

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.filter_cuts import filtered
from heavypath.kernels.filtering import LOWEST, Filters, filtered_scores, raised, softmax_scale, sum_of_products
from heavypath.kernels.language import tl, triton
from heavypath.kernels.nodes import Verified, VerifyInputs, as_verified, no_maximum
from heavypath.kernels.noise import Stream, gumbels
from heavypath.kernels.sharing import finish_chunks, open_pass, take_chunk, wait_for_all


def used_row(logits: Tensor, side: str, sequence: int, node: int) -> np.ndarray:
    """Return the row [V] of one node in fp32; on a CPU ValueError if it has no finite maximum."""
    row = logits[sequence, node].detach().float().cpu().numpy()
    if logits.device.type == "cpu" and not np.isfinite(row.max()):
        raise no_maximum(side, sequence, node, row.max())
    return row


def log_weights(row: np.ndarray, filters: Filters) -> np.ndarray:
    """Return log2 P up to a constant, with largest element 0: fp32 [V] from fp32 logits [V]; temperature > 0."""
    if filters.drop(len(row)):
        return filtered_scores(row, row.max(keepdims=True), filters) * np.float32(math.log2(math.e))
    return (row - row.max()) * np.float32(math.log2(math.e) / raised(filters.temperature))


def best_tokens(keys: np.ndarray) -> np.ndarray:
    """Return the token with the largest key in each row [A, V], ties to the first; -1 if no key is above -inf."""
    token = keys.argmax(-1)
    return np.where(keys[np.arange(len(keys)), token] > -np.inf, token, -1)


def verified_by_draws(given: VerifyInputs, ends: list[tuple[list[int], np.ndarray]]) -> Verified:
    """Draw the token after each sequence's path; ends: per sequence a path, and the weights [V] of the next token."""
    (seed, rows), count = given.noise, given.nodes.tokens.shape[1]
    last = torch.tensor([path[-1] for path, _ in ends], device="cpu")[:, None]
    row = last + count * torch.arange(len(ends), device="cpu")[:, None] if rows is None else rows.cpu().gather(1, last)
    keys = np.log(np.stack([weights for _, weights in ends]).astype(np.float64))
    keys += gumbels(int(seed), Stream.TARGET, row[:, 0].numpy(), keys.shape[1])
    return as_verified([path for path, _ in ends], best_tokens(keys), given)


LANES = tl.constexpr(256)  # threads of a program; each holds eight adjacent tokens of a tile
TILE = tl.constexpr(8 * 256)
CHUNK = tl.constexpr(4 * 8 * 256)
PIECE = tl.constexpr(8 * 256)  # tokens of a piece of a shared pass; more would take registers from the first pass
FACTS = tl.constexpr(8)  # fp32 numbers stored for each node (facts), and the same number of integers (marks)
NONE = tl.constexpr(2**31 - 1)  # above every child's index in draw order: there is no child


# A row with the numbers that turn its logits into a filtered distribution, as kernels pass it:
#     side = (row_ptr, largest, log_total, temperature, cut, end)
# largest is the largest logit; all logarithms here, as log_total, are to base 2. For cut and end see `filter_cuts`.


@triton.jit
def unread(row_ptr, temperature, cut_ptr, end_ptr, place, V, FILTERED: tl.constexpr):
    """Return the side of a row before its logits are read. place: the row's index in cut_ptr and end_ptr."""
    cut, end = tl.full([], float("-inf"), tl.float32), V + tl.full([], 0, tl.int32)
    if FILTERED:
        cut, end = tl.load(cut_ptr + place), tl.load(end_ptr + place)
    return (row_ptr, 0.0, 0.0, temperature, cut, end)


@triton.jit
def softmax_part(side, begin, end, V, child_token, left_out, FILTERED: tl.constexpr):
    """Return the largest logit of tokens begin .. end - 1, and the sum of their exponentials relative to it.

    Tokens that the filters drop do not count, nor do tokens of left_out children.
    """
    row_ptr, _, _, temperature, cut, end_of_ties = side
    scale = softmax_scale(temperature)
    largest = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for start in range(begin, end, 2 * TILE):
        token = start + tl.arange(0, LANES)[:, None] * 16 + tl.arange(0, 16)[None, :]
        x = tl.load(row_ptr + token, mask=token < end, other=float("-inf")).to(tl.float32)
        if FILTERED:
            x = filtered(x, token, cut, end_of_ties)
        x = without(x, token, start, start + 2 * TILE, child_token, left_out, V)
        higher = tl.maximum(largest, tl.max(x, 1))
        total = total * tl.exp2((largest - higher) * scale) + tl.sum(tl.exp2((x - higher[:, None]) * scale), 1)
        largest = higher
    highest = tl.max(largest)
    return highest, sum_of_products(total, tl.exp2((largest - highest) * scale))


@triton.jit
def store_part(side, part_ptr, chunk, V, token, left_out, FILTERED: tl.constexpr, CHUNKS: tl.constexpr):
    """Store `softmax_part` of one chunk of a row, for `normalized`."""
    begin = chunk * CHUNK
    largest, total = softmax_part(side, begin, tl.minimum(begin + CHUNK, V), V, token, left_out, FILTERED)
    tl.store(part_ptr + chunk, largest)
    tl.store(part_ptr + CHUNKS + chunk, total)


@triton.jit
def normalized(
    side, part_ptr, V, token, left_out, LEAVES_OUT: tl.constexpr, FILTERED: tl.constexpr, CHUNKS: tl.constexpr
):
    """Return the side with its numbers set, log2 of its mass outside left_out children, and if it is a distribution."""
    row_ptr, _, _, temperature, cut, end = side
    scale = softmax_scale(temperature)
    chunk = tl.arange(0, triton.next_power_of_2(CHUNKS))
    parts = tl.load(part_ptr + chunk, mask=chunk < CHUNKS, other=LOWEST, cache_modifier=".cg")
    totals = tl.load(part_ptr + CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0, cache_modifier=".cg")
    outside_largest = tl.max(parts)
    outside = sum_of_products(totals, tl.exp2((parts - outside_largest) * scale))
    largest, total = outside_largest, outside
    if LEAVES_OUT:
        x = tl.load(row_ptr + token, mask=left_out, other=float("-inf")).to(tl.float32)
        if FILTERED:
            x = filtered(x, token, cut, end)
        largest = tl.maximum(largest, tl.max(x))
        total = outside * tl.exp2((outside_largest - largest) * scale) + tl.sum(tl.where(x != x, x, 0.0))  # or NaN
        out = tl.min(tl.where(left_out, token, V))
        while out < V:  # token by token, so that a token of several children counts once
            total += tl.exp2((tl.max(tl.where(left_out & (token == out), x, float("-inf"))) - largest) * scale)
            out = tl.min(tl.where(left_out & (token > out), token, V))
    usable = total > 0
    log_total = tl.log2(tl.where(usable, total, 1.0))
    log_outside = (outside_largest - largest) * scale + tl.log2(outside) - log_total
    return (row_ptr, largest, log_total, temperature, cut, end), log_outside, usable


@triton.jit
def log_prob(side, x, token, FILTERED: tl.constexpr):
    """Return log2 of the probabilities of tokens with logits x."""
    _, largest, log_total, temperature, cut, end = side
    if FILTERED:
        x = filtered(x, token, cut, end)
    return (x - largest) * softmax_scale(temperature) - log_total


@triton.jit
def without(values, token, start, end, child_token, left_out, V):
    """Return the values [...] of tokens start <= token < end, with -inf for tokens of left_out children."""
    here = left_out & (child_token >= start) & (child_token < end)
    out = tl.min(tl.where(here, child_token, V))
    while out < V:
        values = tl.where(token == out, float("-inf"), values)
        out = tl.min(tl.where(here & (child_token > out), child_token, V))
    return values


@triton.jit
def shares(
    target, draft, log_multiple, uniform, token, start, end, V, child_token, left_out,
    FILTERED: tl.constexpr, DRAFT_FILTERED: tl.constexpr,
):  # fmt: skip
    """Return P and min(P, l Q) of tokens start <= token < end.

    log_multiple is log2 l. uniform is log2 Q of each token left after a restart, and 1 if Q is the draft's.
    """
    x = tl.load(target[0] + token, mask=token < end, other=float("-inf")).to(tl.float32)
    log_p = log_prob(target, x, token, FILTERED)
    if uniform > 0:
        y = tl.load(draft[0] + token, mask=token < end, other=float("-inf")).to(tl.float32)
        log_q = log_prob(draft, y, token, DRAFT_FILTERED)
    else:
        log_q = tl.zeros_like(log_p) + uniform
        log_p = without(log_p, token, start, end, child_token, left_out, V)
    p = tl.exp2(log_p)
    return p, tl.minimum(p, tl.exp2(log_q + log_multiple))


# Facts and marks stored for each node, by index:
#
#     facts, fp32    0  the target's largest logit      2  the draft's      4  log2 l    6  share, 1 unless K-SEQ
#                    1  the target's log_total          3  the draft's      5  uniform   7  p_offset
#     marks, int32   0  the bits of the target's cut    2  the draft's      4  the node whose draft row is Q
#                    1  the target's end                3  the draft's      5, 6, 7  unused
#
# For K-SEQ l is its g. Otherwise l is 0, and a token is drawn by P, if no child was rejected at all or since the chain
# restarted (see `residual`). After a restart, uniform is log2 Q of each token left, and p_offset is log2 of the sum of
# P over these tokens. Without a restart uniform is 1, which no such logarithm can be, and p_offset is 0.


@triton.jit
def store_sides(facts_ptr, marks_ptr, target, draft, source):
    """Store the numbers that are final once both rows are normalised. source: the node whose draft row is Q."""
    tl.store(facts_ptr, target[1])
    tl.store(facts_ptr + 1, target[2])
    tl.store(facts_ptr + 2, draft[1])
    tl.store(facts_ptr + 3, draft[2])
    tl.store(marks_ptr, target[4].to(tl.int32, bitcast=True))
    tl.store(marks_ptr + 1, target[5])
    tl.store(marks_ptr + 2, draft[4].to(tl.int32, bitcast=True))
    tl.store(marks_ptr + 3, draft[5])
    tl.store(marks_ptr + 4, source)


@triton.jit
def stored_sides(facts_ptr, marks_ptr, target_row, draft_ptr, draft_stride, temperature, draft_temperature):
    """Load both sides of a node that `store_sides` stored. draft_ptr: row 0 of the node's tree."""
    target = (
        target_row, tl.load(facts_ptr, cache_modifier=".cg"), tl.load(facts_ptr + 1, cache_modifier=".cg"), temperature,
        tl.load(marks_ptr, cache_modifier=".cg").to(tl.float32, bitcast=True),
        tl.load(marks_ptr + 1, cache_modifier=".cg"),
    )  # fmt: skip
    source = tl.load(marks_ptr + 4, cache_modifier=".cg").to(tl.int64)
    draft = (
        draft_ptr + source * draft_stride, tl.load(facts_ptr + 2, cache_modifier=".cg"),
        tl.load(facts_ptr + 3, cache_modifier=".cg"), draft_temperature,
        tl.load(marks_ptr + 2, cache_modifier=".cg").to(tl.float32, bitcast=True),
        tl.load(marks_ptr + 3, cache_modifier=".cg"),
    )  # fmt: skip
    return target, draft


@triton.jit
def offset(side, p_offset):
    """Return the side with its distribution divided by 2^p_offset."""
    return (side[0], side[1], side[2] + p_offset, side[3], side[4], side[5])


# One node's pass over both rows, which free programs share (see `sharing`):
#     job = (counters_ptr, rows, row, facts_ptr, sums_ptr)
# rows are all nodes of the launch, row is this one; facts_ptr and sums_ptr, fp32 [PIECES], are this node's.


@triton.jit
def sum_pieces(
    job, piece, target, draft, log_multiple, uniform, V, child_token, left_out,
    FILTERED: tl.constexpr, DRAFT_FILTERED: tl.constexpr,
):  # fmt: skip
    """Store F(l) over this piece of the rows, and over each further piece that no program has taken yet."""
    counters_ptr, rows, row, _, sums_ptr = job
    count = tl.full([], 0, tl.int32)
    while piece >= 0:
        start = piece * PIECE
        p, cover = shares(
            target, draft, log_multiple, uniform, start + tl.arange(0, PIECE), start, tl.minimum(start + PIECE, V), V,
            child_token, left_out, FILTERED, DRAFT_FILTERED,
        )  # fmt: skip
        tl.store(sums_ptr + piece, tl.sum(p - cover))
        count += 1
        piece = take_chunk(counters_ptr, row)
    finish_chunks(counters_ptr, rows, row, count)


@triton.jit
def shared_sum(
    job, target, draft, log_multiple, uniform, p_offset, V, child_token, left_out,
    FILTERED: tl.constexpr, DRAFT_FILTERED: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Return F(l) = sum max(P - l Q, 0) of a node whose sides and left_out children are stored."""
    counters_ptr, rows, row, facts_ptr, sums_ptr = job
    tl.store(facts_ptr + 4, log_multiple)
    tl.store(facts_ptr + 5, uniform)
    tl.store(facts_ptr + 7, p_offset)
    open_pass(counters_ptr, row, PIECES)
    piece = take_chunk(counters_ptr, row)
    if piece >= 0:
        sum_pieces(
            job, piece, offset(target, p_offset), draft, log_multiple, uniform, V, child_token, left_out,
            FILTERED, DRAFT_FILTERED,
        )  # fmt: skip
    wait_for_all(counters_ptr, rows, row, PIECES)
    pieces = tl.arange(0, triton.next_power_of_2(PIECES))
    return tl.sum(tl.load(sums_ptr + pieces, mask=pieces < PIECES, other=0.0, cache_modifier=".cg"))
