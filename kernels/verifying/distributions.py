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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.filter_cuts import filtered
from heavypath.kernels.filtering import LOWEST, Filters, filtered_scores, softmax_scale, sum_of_products, within_fp32
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
    return (row - row.max()) * np.float32(math.log2(math.e) / within_fp32(filters.temperature))


def best_tokens(keys: np.ndarray) -> np.ndarray:
    """Return the token with the largest key in each row [A, V], ties to the first; -1 if no key is above -inf."""
    token = keys.argmax(-1)
    return np.where(keys[np.arange(len(keys)), token] > -np.inf, token, -1)


def verified_by_draws(inputs: VerifyInputs, ends: list[tuple[list[int], np.ndarray]]) -> Verified:
    """Draw the token after each sequence's path; ends: per sequence a path, and the weights [V] of the next token."""
    seed, rows = inputs.noise
    count = inputs.nodes.tokens.shape[1]
    last = torch.tensor([path[-1] for path, _ in ends], device="cpu")[:, None]
    row = last + count * torch.arange(len(ends), device="cpu")[:, None] if rows is None else rows.cpu().gather(1, last)
    keys = np.log(np.stack([weights for _, weights in ends]).astype(np.float64))
    keys += gumbels(int(seed), Stream.TARGET, row[:, 0].numpy(), keys.shape[1])
    return as_verified([path for path, _ in ends], best_tokens(keys), inputs)


LANES = tl.constexpr(256)  # threads of a program; each holds eight adjacent tokens of a tile
TILE = tl.constexpr(8 * 256)
CHUNK = tl.constexpr(4 * 8 * 256)
PIECE = tl.constexpr(8 * 256)  # tokens of a piece of a shared pass; more would take registers from the first pass
NONE = tl.constexpr(2**31 - 1)  # above every child's index in draw order: there is no child

# What is stored for each node: FACTS fp32 numbers (facts), and FACTS int32 numbers (marks), at these offsets. The last
# four facts are the residual, the distribution of the recovered token, with the weights
#
#     P(v) / 2^log_p_mass - share * min(P(v) / 2^log_p_mass, l Q(v))        share is 1 unless K-SEQ, where l is its g
#
# If no child was rejected at all, or none since the offers restarted (see `residual`), l is 0 and the token is drawn by
# P. After a restart uniform_log_q is log2 Q of each token left, and log_p_mass is log2 of the sum of P over these
# tokens. Without a restart uniform_log_q is 1, which no such logarithm can be: Q is the draft's, and log_p_mass is 0.
FACTS = tl.constexpr(8)
FACT_TARGET_LARGEST = tl.constexpr(0)
FACT_TARGET_LOG_TOTAL = tl.constexpr(1)
FACT_DRAFT_LARGEST = tl.constexpr(2)
FACT_DRAFT_LOG_TOTAL = tl.constexpr(3)
FACT_LOG_MULTIPLE = tl.constexpr(4)  # log2 l
FACT_UNIFORM_LOG_Q = tl.constexpr(5)
FACT_SHARE = tl.constexpr(6)
FACT_LOG_P_MASS = tl.constexpr(7)
MARK_TARGET_CUT = tl.constexpr(0)  # the bits of the cuts, as the next three
MARK_TARGET_END = tl.constexpr(1)
MARK_DRAFT_CUT = tl.constexpr(2)
MARK_DRAFT_END = tl.constexpr(3)
MARK_DRAFT_NODE = tl.constexpr(4)  # the node whose draft row is Q


class Distribution(NamedTuple):
    """A row of logits with the numbers that turn it into a filtered distribution, as kernels pass it.

    row_ptr:     the row, [V]
    largest:     the largest logit
    log_total:   see above
    temperature: as `softmax_scale` takes it
    cut, end:    see `filter_cuts`
    """

    row_ptr: Any
    largest: Any
    log_total: Any
    temperature: Any
    cut: Any
    end: Any


@triton.jit
def unread(row_ptr, temperature, cut_ptr, end_ptr, place, V, FILTERED: tl.constexpr):
    """Return the distribution of a row before its logits are read. place: the row's index in cut_ptr and end_ptr."""
    cut = tl.full([], float("-inf"), tl.float32)
    end = V + tl.full([], 0, tl.int32)
    if FILTERED:
        cut = tl.load(cut_ptr + place)
        end = tl.load(end_ptr + place)
    return Distribution(row_ptr, 0.0, 0.0, temperature, cut, end)


@triton.jit
def softmax_part(distribution, begin, end, V, child_token, left_out, FILTERED: tl.constexpr):
    """Return the largest logit of tokens begin .. end - 1, and the sum of their exponentials relative to it.

    Tokens that the filters drop do not count, nor do tokens of left_out children.
    """
    scale = softmax_scale(distribution.temperature)
    largest = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for start in range(begin, end, 2 * TILE):
        token = start + tl.arange(0, LANES)[:, None] * 16 + tl.arange(0, 16)[None, :]
        x = tl.load(distribution.row_ptr + token, mask=token < end, other=float("-inf")).to(tl.float32)
        if FILTERED:
            x = filtered(x, token, distribution.cut, distribution.end)
        x = without(x, token, start, start + 2 * TILE, child_token, left_out, V)
        higher = tl.maximum(largest, tl.max(x, 1))
        total = total * tl.exp2((largest - higher) * scale) + tl.sum(tl.exp2((x - higher[:, None]) * scale), 1)
        largest = higher
    highest = tl.max(largest)
    return highest, sum_of_products(total, tl.exp2((largest - highest) * scale))


@triton.jit
def store_part(distribution, part_ptr, chunk, V, token, left_out, FILTERED: tl.constexpr, CHUNKS: tl.constexpr):
    """Store `softmax_part` of one chunk of a row, for `normalized`."""
    begin = chunk * CHUNK
    largest, total = softmax_part(distribution, begin, tl.minimum(begin + CHUNK, V), V, token, left_out, FILTERED)
    tl.store(part_ptr + chunk, largest)
    tl.store(part_ptr + CHUNKS + chunk, total)


@triton.jit
def normalized(
    unnormalized, part_ptr, token, left_out, LEAVES_OUT: tl.constexpr, FILTERED: tl.constexpr, CHUNKS: tl.constexpr
):
    """Return the distribution of a row from its stored parts, log2 of its mass outside left_out children, and whether
    the row has a distribution. No two children that are left out have the same token."""
    scale = softmax_scale(unnormalized.temperature)
    chunk = tl.arange(0, triton.next_power_of_2(CHUNKS))
    parts = tl.load(part_ptr + chunk, mask=chunk < CHUNKS, other=LOWEST, cache_modifier=".cg")
    totals = tl.load(part_ptr + CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0, cache_modifier=".cg")
    outside_largest = tl.max(parts)
    outside = sum_of_products(totals, tl.exp2((parts - outside_largest) * scale))
    largest = outside_largest
    total = outside
    if LEAVES_OUT:
        x = tl.load(unnormalized.row_ptr + token, mask=left_out, other=float("-inf")).to(tl.float32)
        if FILTERED:
            x = filtered(x, token, unnormalized.cut, unnormalized.end)
        largest = tl.maximum(largest, tl.max(x))
        total = outside * tl.exp2((outside_largest - largest) * scale) + tl.sum(tl.exp2((x - largest) * scale))
    usable = total > 0
    log_total = tl.log2(tl.where(usable, total, 1.0))
    log_outside = (outside_largest - largest) * scale + tl.log2(outside) - log_total
    distribution = Distribution(
        unnormalized.row_ptr, largest, log_total, unnormalized.temperature, unnormalized.cut, unnormalized.end
    )
    return distribution, log_outside, usable


@triton.jit
def log_prob(distribution, x, token, FILTERED: tl.constexpr):
    """Return log2 of the probabilities of tokens with logits x."""
    if FILTERED:
        x = filtered(x, token, distribution.cut, distribution.end)
    return (x - distribution.largest) * softmax_scale(distribution.temperature) - distribution.log_total


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
def overlap(
    target,
    draft,
    log_multiple,
    uniform_log_q,
    token,
    start,
    end,
    V,
    child_token,
    left_out,
    FILTERED: tl.constexpr,
    DRAFT_FILTERED: tl.constexpr,
):
    """Return P and min(P, l Q) of tokens start <= token < end.

    log_multiple is log2 l; uniform_log_q is as stored, see above.
    """
    x = tl.load(target.row_ptr + token, mask=token < end, other=float("-inf")).to(tl.float32)
    log_p = log_prob(target, x, token, FILTERED)
    if uniform_log_q > 0:
        y = tl.load(draft.row_ptr + token, mask=token < end, other=float("-inf")).to(tl.float32)
        log_q = log_prob(draft, y, token, DRAFT_FILTERED)
    else:
        log_q = tl.zeros_like(log_p) + uniform_log_q
        log_p = without(log_p, token, start, end, child_token, left_out, V)
    p = tl.exp2(log_p)
    return p, tl.minimum(p, tl.exp2(log_q + log_multiple))


@triton.jit
def store_distributions(facts_ptr, marks_ptr, target, draft, draft_node):
    """Store the numbers that are final once both rows are normalised. draft_node: the node whose draft row is Q."""
    tl.store(facts_ptr + FACT_TARGET_LARGEST, target.largest)
    tl.store(facts_ptr + FACT_TARGET_LOG_TOTAL, target.log_total)
    tl.store(facts_ptr + FACT_DRAFT_LARGEST, draft.largest)
    tl.store(facts_ptr + FACT_DRAFT_LOG_TOTAL, draft.log_total)
    tl.store(marks_ptr + MARK_TARGET_CUT, target.cut.to(tl.int32, bitcast=True))
    tl.store(marks_ptr + MARK_TARGET_END, target.end)
    tl.store(marks_ptr + MARK_DRAFT_CUT, draft.cut.to(tl.int32, bitcast=True))
    tl.store(marks_ptr + MARK_DRAFT_END, draft.end)
    tl.store(marks_ptr + MARK_DRAFT_NODE, draft_node)


@triton.jit
def load_distributions(facts_ptr, marks_ptr, target_row, draft_ptr, draft_stride, temperature, draft_temperature):
    """Load what `store_distributions` stored for a node. draft_ptr: row 0 of the node's tree."""
    target = Distribution(
        target_row,
        tl.load(facts_ptr + FACT_TARGET_LARGEST, cache_modifier=".cg"),
        tl.load(facts_ptr + FACT_TARGET_LOG_TOTAL, cache_modifier=".cg"),
        temperature,
        tl.load(marks_ptr + MARK_TARGET_CUT, cache_modifier=".cg").to(tl.float32, bitcast=True),
        tl.load(marks_ptr + MARK_TARGET_END, cache_modifier=".cg"),
    )
    draft_node = tl.load(marks_ptr + MARK_DRAFT_NODE, cache_modifier=".cg").to(tl.int64)
    draft = Distribution(
        draft_ptr + draft_node * draft_stride,
        tl.load(facts_ptr + FACT_DRAFT_LARGEST, cache_modifier=".cg"),
        tl.load(facts_ptr + FACT_DRAFT_LOG_TOTAL, cache_modifier=".cg"),
        draft_temperature,
        tl.load(marks_ptr + MARK_DRAFT_CUT, cache_modifier=".cg").to(tl.float32, bitcast=True),
        tl.load(marks_ptr + MARK_DRAFT_END, cache_modifier=".cg"),
    )
    return target, draft


@triton.jit
def store_residual(facts_ptr, log_multiple, uniform_log_q, log_p_mass, share=None):
    """Store a node's residual. share: None if it is 1 and stored already, or if a pass, which needs none, begins."""
    tl.store(facts_ptr + FACT_LOG_MULTIPLE, log_multiple)
    tl.store(facts_ptr + FACT_UNIFORM_LOG_Q, uniform_log_q)
    if share is not None:
        tl.store(facts_ptr + FACT_SHARE, share)
    tl.store(facts_ptr + FACT_LOG_P_MASS, log_p_mass)


@triton.jit
def restricted(distribution, log_mass):
    """Return the distribution divided by 2^log_mass, as it is over tokens of this mass."""
    return Distribution(
        distribution.row_ptr,
        distribution.largest,
        distribution.log_total + log_mass,
        distribution.temperature,
        distribution.cut,
        distribution.end,
    )


class SharedPass(NamedTuple):
    """One node's passes over both rows, which free programs share (see `sharing`).

    counters_ptr: of `sharing`
    nodes:        the number of nodes of the launch, the rows of `sharing`
    place:        this node's index among them
    facts_ptr:    this node's facts
    sums_ptr:     this node's sums, fp32 [PIECES]
    """

    counters_ptr: Any
    nodes: Any
    place: Any
    facts_ptr: Any
    sums_ptr: Any


@triton.jit
def sum_pieces(
    passes,
    piece,
    target,
    draft,
    log_multiple,
    uniform_log_q,
    V,
    child_token,
    left_out,
    FILTERED: tl.constexpr,
    DRAFT_FILTERED: tl.constexpr,
):
    """Store F(l) over this piece of the rows, and over each further piece that no program has taken yet."""
    count = tl.full([], 0, tl.int32)
    while piece >= 0:
        start = piece * PIECE
        p, covered = overlap(
            target,
            draft,
            log_multiple,
            uniform_log_q,
            start + tl.arange(0, PIECE),
            start,
            tl.minimum(start + PIECE, V),
            V,
            child_token,
            left_out,
            FILTERED,
            DRAFT_FILTERED,
        )
        tl.store(passes.sums_ptr + piece, tl.sum(p - covered))
        count += 1
        piece = take_chunk(passes.counters_ptr, passes.place)
    finish_chunks(passes.counters_ptr, passes.nodes, passes.place, count)


@triton.jit
def shared_sum(
    passes,
    target,
    draft,
    log_multiple,
    uniform_log_q,
    log_p_mass,
    V,
    child_token,
    left_out,
    FILTERED: tl.constexpr,
    DRAFT_FILTERED: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Return F(l) = sum max(P - l Q, 0) of a node whose distributions and left_out children are stored."""
    store_residual(passes.facts_ptr, log_multiple, uniform_log_q, log_p_mass)
    open_pass(passes.counters_ptr, passes.place, PIECES)
    piece = take_chunk(passes.counters_ptr, passes.place)
    if piece >= 0:
        sum_pieces(
            passes,
            piece,
            restricted(target, log_p_mass),
            draft,
            log_multiple,
            uniform_log_q,
            V,
            child_token,
            left_out,
            FILTERED,
            DRAFT_FILTERED,
        )
    wait_for_all(passes.counters_ptr, passes.nodes, passes.place, PIECES)
    pieces = tl.arange(0, triton.next_power_of_2(PIECES))
    return tl.sum(tl.load(passes.sums_ptr + pieces, mask=pieces < PIECES, other=0.0, cache_modifier=".cg"))
