"""One node of traversal verification on a GPU: the weights of its children, and the chance that the walk ends there.

`traversal` has the formulas and the reference. Here all children are offered, since nodes are visited in parallel;
results for nodes after the accepted one are not used. As soon as a child's weight is known, its own chain may begin. A
child takes a pass over both rows, which free programs share (see `sharing`). So does the last child, unless no mass
leaves the subtree or is held. Then the walk ends at the node with all mass that is left, as at the root.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

from typing import Any, NamedTuple

from heavypath.kernels.language import tl, triton
from heavypath.kernels.sharing import call_leader
from heavypath.kernels.verifying.distributions import NONE, shared_sum
from heavypath.kernels.verifying.residual import add_logs, log_sum, undrawn

# Stored for each node in addition to the facts and marks of `distributions`: STATES fp32 and TRAITS int32 numbers.
STATES = tl.constexpr(4)
STATE_WEIGHT = tl.constexpr(0)  # 0 if no weight reaches the node
STATE_ENDING = tl.constexpr(1)  # the chance that the walk ends at the node
STATE_TARGET_OUTSIDE = tl.constexpr(2)  # log2 of the target's mass outside a node's children
STATE_DRAFT_OUTSIDE = tl.constexpr(3)  # log2 of the draft's mass there
TRAITS = tl.constexpr(4)
TRAIT_STAGE = tl.constexpr(0)  # of the node's chain: TO_BEGIN or BEGUN; 0 for a node without one
TRAIT_CONTEXT = tl.constexpr(1)  # the first node whose path has the same tokens; unset if children are distinct
TRAIT_DRAFT_USABLE = tl.constexpr(2)  # whether the draft's row is a distribution
TO_BEGIN = tl.constexpr(1)
BEGUN = tl.constexpr(2)


class Below(NamedTuple):
    """The nodes that a node's chain reaches: counters of `sharing`, the index of the tree's root, its nodes' states."""

    counters_ptr: Any
    root: Any
    states_ptr: Any


@triton.jit
def _reach(below, child, weight, has_chain):
    """Store a child's weight, also as its chance to end the walk until its chain computes that; start this chain."""
    tl.store(below.states_ptr + child * STATES + STATE_WEIGHT, weight)
    tl.store(below.states_ptr + child * STATES + STATE_ENDING, weight)
    if has_chain & (weight > 0):
        call_leader(below.counters_ptr, below.root + child)


@triton.jit
def weigh_children(
    passes,
    below,
    left_out_ptr,
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
    chained,
    log_p,
    log_q,
    weight,
    REPLACEMENT: tl.constexpr,
    HELD: tl.constexpr,
    POINT_MASSES: tl.constexpr,
    FILTERED: tl.constexpr,
    DRAFT_FILTERED: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Offer all children of a node of this weight.

    passes: the node's `SharedPass`; first: as `first_of_token`; chained: whether a child has a chain. The children's
    weights are stored as soon as they are known. Returns the chance to end at the node, log2 l, `uniform_log_q` as in
    `distributions`, and which children's tokens are no longer part of P. The last is also stored at left_out_ptr, for
    programs that share a pass.
    """
    leaves_out: tl.constexpr = POINT_MASSES or not REPLACEMENT
    log_multiple = tl.full([], float("-inf"), tl.float32)
    uniform_log_q = tl.full([], 1.0, tl.float32)
    factor = weight  # c
    ending = weight  # n
    leaving = 1 - weight  # 1 - n minus the held weights
    weights = tl.zeros_like(log_p)  # of held children
    held = tl.full([], 0.0, tl.float32)  # the sum of these weights
    passed = tl.zeros_like(index)
    left_out = tl.zeros_like(index)
    tokens_at_restart = tl.full([], 0.0, tl.float32) + V  # V is not a tensor if it is 1
    next_order = tl.min(order)
    while next_order < NONE:
        this = next_order % N
        one = index == this
        this_token = tl.sum(tl.where(one, token, 0))
        this_p = tl.sum(tl.where(one, log_p, 0.0))
        this_q = tl.sum(tl.where(one, log_q, 0.0))
        alike = (order < NONE) & (token == this_token)
        again = tl.sum(tl.where(one, passed, 0)) > 0  # an earlier sibling has the same token
        log_mass = tl.full([], 0.0, tl.float32)
        here = this_q > float("-inf")
        if leaves_out:
            log_mass, _, rest = undrawn(
                left_out_ptr,
                V,
                index,
                order,
                first,
                passed,
                log_q,
                draft_outside,
                (log_multiple, uniform_log_q, tokens_at_restart, left_out),
                POINT_MASSES,
            )
            log_multiple, uniform_log_q, tokens_at_restart, left_out = rest
            if uniform_log_q <= 0:
                this_q = uniform_log_q
            here = (this_q > float("-inf")) & (again == 0)
        ratio = tl.exp2(this_p - this_q + log_mass) - tl.exp2(log_multiple + log_mass)
        taken = tl.minimum(factor * tl.maximum(ratio, 0.0), 1.0)
        taken = tl.where(again | (taken < 2.0**-126), 0.0, taken)
        next_order = tl.min(tl.where(order > next_order, order, NONE))
        if here:
            if not HELD:
                _reach(below, this, taken, tl.max(tl.where(one, chained, 0)) > 0)
            if taken >= 1:
                weights = tl.where(one, 1.0, 0.0)
                ending = tl.full([], 0.0, tl.float32)
                leaving = tl.full([], 0.0, tl.float32)
                next_order = NONE
            else:
                passed = tl.where(alike, 1, passed)
                share = 1 - taken if HELD else tl.full([], 1.0, tl.float32)
                emitted = tl.full([], 1.0, tl.float32)  # S; its value does not matter if nothing else is left
                if POINT_MASSES:
                    left_out = passed
                    open = first & (passed == 0)
                    emitted = factor * tl.exp2(log_sum(log_p, open, target_outside))
                else:
                    log_multiple = add_logs(log_multiple, -tl.log2(factor) - log_mass)
                    if (next_order < NONE) | (leaving + held > 0):
                        emitted = factor * shared_sum(
                            passes,
                            target,
                            draft,
                            log_multiple,
                            uniform_log_q,
                            0.0,
                            V,
                            token,
                            left_out > 0,
                            FILTERED,
                            DRAFT_FILTERED,
                            PIECES,
                        )
                total = leaving + held + emitted
                ending *= share  # where rounding has left nothing
                if total > 0:
                    ending = tl.div_rn(emitted, total) * share  # exactly 1 if nothing is leaving or held
                    share = share / total
                    factor = tl.minimum(factor * share, 2.0**120)
                    leaving *= share
                    held *= share
                if HELD:
                    weights = tl.where(one, taken, weights * tl.where(total > 0, share, 1.0))
                    held += taken
    if HELD:  # each child's weight, as a share of its own, those of later children, and the rest
        rest = ending + leaving
        if rest > 0:
            ending = tl.div_rn(ending, rest)
        last = tl.max(tl.where((weights > 0) & (order < NONE), order, -1))
        while last >= 0:
            one = index == last % N
            this_weight = tl.sum(tl.where(one, weights, 0.0))
            rest += this_weight
            _reach(below, last % N, tl.div_rn(this_weight, rest), tl.max(tl.where(one, chained, 0)) > 0)
            last = tl.max(tl.where((weights > 0) & (order < last), order, -1))
    return ending, log_multiple, uniform_log_q, left_out
