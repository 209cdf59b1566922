"""One node of a drafted tree whose children were drawn from different distributions. Each is weighed against its own.

At a node with target distribution P let x_1, x_2, ... be its children in draw order. Let x_k be drawn from Q_k,
independently of the others. These are SpecInfer's trees of several drafts, and its multi-step speculative sampling
(Miao et al. 2023, algorithm 2). The rule is

    accept x_k  iff  coin_k < P_k(x_k) / Q_k(x_k)                  P_1 = P
    if rejected      P_{k+1} = norm(max(P_k - Q_k, 0))
    all rejected     recovered token ~ P_{k+1}

Since max(max(a, 0) - b, 0) = max(a - b, 0) for b >= 0, no residual needs to be normalised to find the next one. With
S_k, which is the mass that the rejected children have
taken away from P,

    S_1 = 0          F_k = sum_v max(P(v) - S_k(v), 0)             P_k = max(P - S_k, 0) / F_k
    if rejected      S_{k+1} = S_k + F_k Q_k

Where all Q_k are one Q this is the chain of `residual` with R = 1: there S_k = l_k Q, so that a number is enough. Here
it is a row. A child that its draft could not have drawn is skipped like an absent one.

On a GPU one program decides for a node. It reads the target's row once. For each child that it tries it reads the row
of its law once, unless the child before has the same law. For each rejected child it reads both rows again, and S. It
writes log2 S, fp32, which the walk reads as the logits of a draft. The reference is `residual.Chain`, with another
draft for each child. Of 64 nodes and 128k tokens in bf16, S is 33 MB, but only rows of nodes with a rejected child are
touched. A node that rejects two children of two drafts moves 0.26 MB x (1 + 2 + 2 x 2) of logits, and 0.5 MB x 3 of S.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

import math

import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.kernels.language import tl, triton
from heavypath.kernels.nodes import Laws, VerifyInputs
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
from heavypath.kernels.verifying.drafted_tree import (
    coins_of,
    cut_arguments,
    equal_contexts,
    launch,
    nodes_of,
    ranks_of,
    tree_arguments,
)

LOGARITHMS = Filters(temperature=math.log2(math.e))  # under which a row of log2 S, taken for logits, stands for S


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


def decide_by_laws(given: VerifyInputs) -> tuple[Decided, Tensor]:
    """Decide for every node of [B, N] at once which child it accepts; and log2 S, fp32 [B, N, V], for `launch_walk`.

    log2 S stands for the draft's logits, under LOGARITHMS as filters, and is undefined where no child was rejected.

    They are `laid_out`. draft_logits are `Laws`, there is more than one node, and draft_filters.temperature > 0.
    """
    tokens, laws = given.nodes.tokens, given.draft_logits
    assert isinstance(laws, Laws)
    batch, count = tokens.shape
    device = tokens.device
    choice, marks = torch.empty(batch * count * (1 + FACTS.value), dtype=torch.int32, device=device).split(
        [batch * count, batch * count * FACTS.value]
    )
    facts = torch.empty(batch * count * FACTS.value, dtype=torch.float32, device=device)
    taken = torch.empty(given.target_logits.shape, dtype=torch.float32, device=device)
    with torch.cuda.device_of(tokens):
        launch(
            _laws_kernel, batch * count, tree_arguments(given) | cut_arguments(given),
            laws_ptr=laws.rows, laws_stride=laws.rows.stride(0), M=laws.logits.shape[1],
            choice_ptr=choice, facts_ptr=facts, marks_ptr=marks, taken_ptr=taken,
        )  # fmt: skip
    return Decided(choice, left_out=None, facts=facts, marks=marks), taken
