"""One node of a drafted tree whose children were drawn from different distributions: each is weighed against its own.

At a node with target distribution P let x_1, x_2, ... be its children in draw order, and let x_k be drawn from Q_k,
whatever the others are: SpecInfer's trees of several drafts, and its multi-step speculative sampling (Miao et al. 2023,
algorithm 2),

    accept x_k  iff  coin_k < P_k(x_k) / Q_k(x_k)                  P_1 = P
    if rejected      P_{k+1} = norm(max(P_k - Q_k, 0))
    all rejected     recovered token ~ P_{k+1}

Since max(max(a, 0) - b, 0) = max(a - b, 0) for b >= 0, no residual needs to be normalised to find the next one. With
S_k, which is what the rejected children have taken away from P,

    S_1 = 0          F_k = sum_v max(P(v) - S_k(v), 0)             P_k = max(P - S_k, 0) / F_k
    if rejected      S_{k+1} = S_k + F_k Q_k

Where all Q_k are one Q this is the chain of `residual` with R = 1: there S_k = l_k Q, so that a number is enough. Here
it is a row. A child that its draft could not have drawn is skipped like an absent one.

On a GPU one program decides for a node. It reads the target's row once, for each child that it tries the row of its law
once, but for one of the same law as the child before, and for each rejected child both rows again, and S: it writes
log2 S, fp32, which the walk reads as the logits of a draft. Of 64 nodes and 128k tokens in bf16, S is 33 MB, of which
only rows of nodes with a rejected child are touched; a node that rejects two children of two drafts moves
0.26 MB x (1 + 2 + 2 x 2) of logits, and 0.5 MB x 3 of S.
"""

# A type checker does not understand Triton kernels.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from heavypath.kernels.filter_cuts import filter_cuts
from heavypath.kernels.filtering import Filters, raised
from heavypath.kernels.nodes import Laws, Nodes
from heavypath.kernels.noise import Noise, seed_arguments
from heavypath.kernels.verifying.decision import Decided
from heavypath.kernels.verifying.distributions import (
    FACTS,
    LANES,
    NONE,
    TILE,
    log_prob,
    softmax_part,
    store_sides,
    unread,
)
from heavypath.kernels.verifying.drafted_tree import coins_of, equal_contexts, nodes_of, ranks_of

LOGARITHMS = Filters(temperature=math.log2(math.e))  # under which a row of log2 S, taken for logits, stands for S


@np.errstate(all="ignore")
def laws_chain(
    log_target: np.ndarray, log_laws: Iterable[np.ndarray], drawn: np.ndarray, coins: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Try the children of one node in each of A sequences, in draw order, by the formula above.

    log_target: log2 P, [A, V]
    log_laws:   log2 Q_k, [A, V], for each of K children; read one after the other, as far as children are tried. Any
                distribution will do for a sequence without such a child
    drawn:      int64 [A, K], the children's tokens; -1 for no child
    coins:      fp64 [A, K]

    Returns the index of the accepted child or -1, [A]; and for the A' sequences without an accepted child the weights
    [A', V] that their recovered tokens are drawn by.
    """
    sequence, waiting = np.arange(len(drawn)), drawn >= 0
    choice, total = sequence * 0 - 1, sequence * 0 + 1.0  # total is F
    target = taken = residual = None  # P, S and max(P - S, 0), once a child has been rejected
    for place, log_draft in enumerate(log_laws):
        child, here = np.maximum(drawn[:, place], 0), waiting[:, place]
        log_q = log_draft[sequence, child].astype(np.float64)
        here = here & (log_q > -np.inf)
        if residual is None:  # S = 0 and F = 1
            ratio = np.exp2(log_target[sequence, child] - log_q)
        else:
            ratio = residual[sequence, child] / total * np.exp2(-log_q)
        accepted = here & (coins[:, place] < ratio)
        rejected = here & ~accepted
        choice[accepted] = place
        waiting[accepted] = False
        if rejected.any():
            more = np.exp2(log_draft) * np.where(rejected, total, 0)[:, None].astype(log_draft.dtype)
            taken = more if taken is None else taken + more
            target = np.exp2(log_target) if target is None else target
            residual = np.maximum(target - taken, 0)
            total = residual.sum(-1).astype(np.float64)
        if not waiting[:, place + 1 :].any():
            break

    stopped = choice < 0
    if residual is None:
        return choice, np.exp2(log_target[stopped])
    weights = np.where(total[:, None] > 0, residual, np.exp2(log_target))  # a total of 0 comes of rounding
    return choice, weights[stopped]


@triton.jit
def _normalized(side, V, token, FILTERED: tl.constexpr):
    """The side with its numbers filled in, and whether it is a distribution."""
    row_ptr, _, _, temperature, cut, end = side
    largest, total = softmax_part(side, 0, V, V, token, token < -1, FILTERED)
    usable = total > 0
    return (row_ptr, largest, tl.log2(tl.where(usable, total, 1.0)), temperature, cut, end), usable


@triton.jit
def _take(target, draft, taken_ptr, over, rejected, V, FILTERED: tl.constexpr, DRAFT_FILTERED: tl.constexpr):
    """Add F Q to S, of which log2 is stored; returns the next F. rejected: children, so whether there is an S."""
    tl.debug_barrier()  # before it, other threads have loaded what is stored anew
    log_over = tl.log2(over)
    stored = tl.where(rejected > 0, V, 0)
    left = tl.zeros([LANES], tl.float32)
    for start in range(0, V, TILE):
        token = start + tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
        here = token < V
        x = tl.load(target[0] + token, mask=here, other=float("-inf")).to(tl.float32)
        y = tl.load(draft[0] + token, mask=here, other=float("-inf")).to(tl.float32)
        before = tl.load(taken_ptr + token, mask=token < stored, other=float("-inf"))
        taken = tl.exp2(before) + tl.exp2(log_prob(draft, y, token, DRAFT_FILTERED) + log_over)
        left += tl.sum(tl.maximum(tl.exp2(log_prob(target, x, token, FILTERED)) - taken, 0.0), 1)
        log_taken = tl.where(taken > 0, tl.log2(tl.maximum(taken, 2.0**-126)), float("-inf"))
        tl.store(taken_ptr + token, log_taken, mask=here)
    tl.debug_barrier()  # behind it, they load what is stored
    return tl.sum(left)


@triton.jit(do_not_specialize=["seed_ptr", "seed_low", "seed_high", "temperature", "draft_temperature"])
def _laws_kernel(
    tokens_ptr,  # [B, N]
    parents_ptr,  # [B, N], rows parents_stride apart
    ranks_ptr,  # the same, if HAS_RANKS
    rows_ptr,  # [B, N] if HAS_ROWS
    laws_ptr,  # [B, N], rows laws_stride apart: which of a sequence's M laws each node was drawn from
    target_ptr,  # [B, N, V]
    draft_ptr,  # [B, M, V]
    cut_ptr,  # [B, N] if FILTERED, as end_ptr: where the target's rows are cut off, see `filter_cuts`
    end_ptr,
    draft_cut_ptr,  # [B, M] if DRAFT_FILTERED, as draft_end_ptr
    draft_end_ptr,
    choice_ptr,  # int32 [B, N]: the accepted child, -1 for none, -2 if a row has no distribution
    facts_ptr,  # fp32 [B, N, FACTS]
    marks_ptr,  # int32 [B, N, FACTS]
    taken_ptr,  # fp32 [B, N, V], log2 S
    N,
    M,
    V,
    parents_stride,
    ranks_stride,
    laws_stride,
    target_batch_stride,
    target_stride,
    draft_batch_stride,
    draft_stride,
    seed_ptr,
    seed_low,
    seed_high,
    temperature,
    draft_temperature,
    HAS_RANKS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    FILTERED: tl.constexpr,
    DRAFT_FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,  # nodes, rounded up to a power of two
):
    """A program for each node of each sequence."""
    batch, node = (tl.program_id(0) // N).to(tl.int64), tl.program_id(0) % N
    place = batch * N + node
    tokens_ptr += batch * N
    parents_ptr += batch * parents_stride
    taken_ptr += place * V
    index = tl.arange(0, BLOCK)
    parent, token, child = nodes_of(tokens_ptr, parents_ptr, index, N, V)
    law = tl.load(laws_ptr + batch * laws_stride + index, mask=index < N, other=-1).to(tl.int32)
    child &= (law >= 0) & (law < M) & equal_contexts(parent, token, node, parents_ptr, tokens_ptr)
    rank = ranks_of(parent, index, parents_ptr, ranks_ptr, batch * ranks_stride, N, HAS_RANKS)
    row = batch * N + parent
    if HAS_ROWS:
        row = tl.load(rows_ptr + row, mask=child, other=0)
    coin = coins_of(rank, row, seed_ptr, seed_low, seed_high)
    order = tl.where(child, rank * N + index, NONE)

    target_row = target_ptr + batch * target_batch_stride + node.to(tl.int64) * target_stride
    target = unread(target_row, temperature, cut_ptr, end_ptr, place, V, FILTERED)
    target, usable = _normalized(target, V, token, FILTERED)
    x = tl.load(target_row + token, mask=child, other=float("-inf")).to(tl.float32)
    log_p = log_prob(target, x, token, FILTERED)
    log_s = tl.full([BLOCK], float("-inf"), tl.float32)  # log2 S of the children's tokens

    choice = tl.where(usable, -1, -2)
    over = tl.full([], 1.0, tl.float32)  # F
    rejected = tl.full([], 0, tl.int32)
    law_before = tl.full([], -1, tl.int32)
    draft_largest, draft_log_total = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    draft_cut, draft_end_of_ties = tl.full([], float("-inf"), tl.float32), V + tl.full([], 0, tl.int32)
    next_order = tl.where(usable, tl.min(order), NONE)
    while next_order < NONE:
        this = next_order % N
        one = index == this
        this_law = tl.sum(tl.where(one, law, 0))
        draft_row = draft_ptr + batch * draft_batch_stride + this_law.to(tl.int64) * draft_stride
        if this_law != law_before:
            if DRAFT_FILTERED:
                draft_cut = tl.load(draft_cut_ptr + batch * M + this_law)
                draft_end_of_ties = tl.load(draft_end_ptr + batch * M + this_law)
            fresh, usable = _normalized(
                (draft_row, 0.0, 0.0, draft_temperature, draft_cut, draft_end_of_ties), V, token, DRAFT_FILTERED
            )
            draft_largest, draft_log_total = fresh[1], fresh[2]
            law_before = this_law
        draft = (draft_row, draft_largest, draft_log_total, draft_temperature, draft_cut, draft_end_of_ties)
        this_token = tl.sum(tl.where(one, token, 0))
        this_q = log_prob(draft, tl.load(draft_row + this_token).to(tl.float32), this_token, DRAFT_FILTERED)
        this_p, this_s = tl.sum(tl.where(one, log_p, 0.0)), tl.sum(tl.where(one, log_s, 0.0))
        ratio = tl.maximum(tl.exp2(this_p - this_q) - tl.exp2(this_s - this_q), 0.0) / over
        here = this_q > float("-inf")
        accepted = here & (tl.sum(tl.where(one, coin, 0.0)) < ratio)
        next_order = tl.min(tl.where(order > next_order, order, NONE))
        if not usable:
            choice, next_order = tl.full([], -2, tl.int32), tl.full([], NONE, tl.int32)
        elif accepted:
            choice, next_order = this, tl.full([], NONE, tl.int32)
        elif here:
            over = _take(target, draft, taken_ptr, over, rejected, V, FILTERED, DRAFT_FILTERED)
            log_s = tl.load(taken_ptr + token, mask=child, other=float("-inf"))
            rejected += 1

    tl.store(choice_ptr + place, choice)
    facts_ptr += place * FACTS
    taken = unread(taken_ptr, 1.0, None, None, place, V, False)
    store_sides(facts_ptr, marks_ptr + place * FACTS, target, taken, node)
    tl.store(facts_ptr + 4, tl.where(rejected > 0, 0.0, float("-inf")))
    tl.store(facts_ptr + 5, 1.0)
    tl.store(facts_ptr + 6, 1.0)
    tl.store(facts_ptr + 7, 0.0)


class DecidedByLaws(NamedTuple):
    """What was decided, as `launch_walk` takes it: with `taken` for the draft's logits, under LOGARITHMS as filters.

    taken: fp32 [B, N, V], log2 S; undefined where no child was rejected
    """

    decided: Decided
    taken: Tensor


def decide_by_laws(
    nodes: Nodes, target: Tensor, laws: Laws, *, target_filters: Filters, draft_filters: Filters, noise: Noise
) -> DecidedByLaws:
    """Decide for every node of [B, N] at once which child it accepts.

    Nodes, noise.rows and target as in `decide`; laws.logits [B, M, V] contiguous in V, laws.rows [B, N] in N. There is
    more than one node, and draft_filters.temperature > 0.
    """
    tokens, parents, ranks = nodes
    batch, count = tokens.shape
    device, vocab_size = tokens.device, target.shape[-1]
    draft = laws.logits
    choice, marks = torch.empty(batch * count * (1 + FACTS.value), dtype=torch.int32, device=device).split(
        [batch * count, batch * count * FACTS.value]
    )
    facts = torch.empty(batch * count * FACTS.value, device=device)
    taken = torch.empty(batch, count, vocab_size, device=device)
    cuts, draft_cuts = filter_cuts(target, target_filters), filter_cuts(draft, draft_filters)
    with torch.cuda.device_of(tokens):
        _laws_kernel[(batch * count,)](
            tokens_ptr=tokens, parents_ptr=parents, ranks_ptr=ranks, rows_ptr=noise.rows, laws_ptr=laws.rows,
            target_ptr=target, draft_ptr=draft,
            cut_ptr=None if cuts is None else cuts.cut, end_ptr=None if cuts is None else cuts.end,
            draft_cut_ptr=None if draft_cuts is None else draft_cuts.cut,
            draft_end_ptr=None if draft_cuts is None else draft_cuts.end,
            choice_ptr=choice, facts_ptr=facts, marks_ptr=marks, taken_ptr=taken,
            N=count, M=draft.shape[1], V=vocab_size,
            parents_stride=parents.stride(0), ranks_stride=0 if ranks is None else ranks.stride(0),
            laws_stride=laws.rows.stride(0),
            target_batch_stride=target.stride(0), target_stride=target.stride(1),
            draft_batch_stride=draft.stride(0), draft_stride=draft.stride(1), **seed_arguments(noise.seed),
            temperature=raised(target_filters.temperature), draft_temperature=raised(draft_filters.temperature),
            HAS_RANKS=ranks is not None, HAS_ROWS=noise.rows is not None,
            FILTERED=cuts is not None, DRAFT_FILTERED=draft_cuts is not None,
            BLOCK=max(16, triton.next_power_of_2(count)),
            num_warps=LANES.value // 32, enable_fp_fusion=True, maxnreg=255,
        )  # fmt: skip
    return DecidedByLaws(Decided(choice, left_out=None, facts=facts, marks=marks), taken)
