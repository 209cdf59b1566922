"""Held siblings: a child that rejection sampling would accept is held back, and later children are tried first.

At a node with target distribution P and draft distribution Q let x_1, x_2, ... be its children in draw order, R_j the
mass of Q outside the children before x_j (1 for independent draws), and F(l) = sum_v max(P(v) - l Q(v), 0). W_i is the
weight of child i, the probability that it is the accepted one, and h the sum of the weights so far. From l = 0, c = 1:

    t_j = min(1, c max(P(x_j) - l Q(x_j), 0) R_j / Q(x_j))
    l  += 1 / (c R_j)
    s_j = (1 - t_j) / (h + c F(l))                            with the new l
    W_i *= s_j for all i < j;  W_j = t_j;  c *= s_j           so that h becomes t_j + s_j h
    at the end: x_j is accepted with probability W_j, none with 1 - h; then the recovered token ~ max(P - l Q, 0)

Recursive rejection (`residual`) tries x_j only if all children before it were rejected. Here children that would have
been accepted are held back, and x_j is compared with all mass that is still to be emitted. With h = 0 and c = 1 / F(l)
throughout, t and l are those of `residual`. We know of no paper with this rule.

**The output has the target's distribution.** Suppose that before x_j is drawn the token is emitted by

    M = sum_{i<j} W_i [x_i] + c max(P - l Q, 0)               [x] is a mass of 1 on x; together it is a mass of 1

which is P for j = 1. Let q be the distribution of x_j: Q / R_j outside the children before it, or Q. With the common
part m = min(q, c max(P - l Q, 0)) of both, t_j = m(x_j) / q(x_j). Emit x_j with probability t_j, else a token by
(M - m) / (1 - sum m): on average over x_j this is m + (1 - sum m) (M - m) / (1 - sum m) = M. Now

    M - m = sum_{i<j} W_i [x_i] + c max(P - (l + 1 / (c R_j)) Q, 0)    of mass 1 - sum m = h + c F(new l)

because max(a, 0) - min(b, max(a, 0)) = max(a - b, 0) for b >= 0. So M after x_j, with the weights above, is on average
M before x_j, and in the end P on average, whatever was drawn. (A token drawn before without replacement has q = 0. No
mass of P is left on it: t < 1 implies P < l Q there with the new l. If t = 1, then s = 0, and it has all the weight.)
The number of children may depend on those drawn so far. Below the accepted child the same is done again.

**It accepts at least as much as rejection**, for independent draws. Let H_0 = F and H_k(l) = H_{k-1}(l + F(l)):
rejection accepts none of k children with probability H_k(0). H_k falls with l, because F does and l + F(l) rises. Here
none is accepted with probability c F(l), for the last l and c. From any l and c on this is at most c H_k(l) on average
after k children, by induction. The first child changes l to l + 1 / c, and c to some c' that is c on average. So it is
at most

    E[c'] H_{k-1}(l + 1 / c) <= c H_{k-1}(l + F(l)) = c H_k(l)                    h + c F(l) = 1, so 1 / c >= F(l)

The proof does not hold without replacement; `tests/kernels/test_held.py` enumerates cases instead.

For a single child, and for point masses (draft temperature 0, where all s_j are 1), the rule equals rejection. If the
draft's support is used up, the offers restart as in `residual`, with c such that c F(l) stays. A token that is drawn
again changes l and c, though its t is 0. A child that the draft could not have drawn is skipped.

One coin decides at a node, that of its first child: x_j is accepted if W_1 + ... + W_{j-1} <= coin < W_1 + ... + W_j.
So single children get the decisions of `residual`, whose `Offers.hold` is the reference. On a GPU every child, except a
single one, takes a pass over both rows. This is one pass more than rejection takes if it rejects all children.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

from heavypath.kernels.language import tl, triton
from heavypath.kernels.verifying.distributions import NONE, shared_sum
from heavypath.kernels.verifying.residual import add_logs, offer_at_node


@triton.jit
def hold_at_node(weights, held, is_child, chance, kept):
    """Return the new weights of all children, their sum, and s.

    held: the sum before; is_child: where the offered child is; chance: t; kept: c F(l) with the new l
    """
    whole = held + kept
    scale = tl.where(whole > 0, (1 - chance) / whole, 0.0)
    return tl.where(is_child, chance, weights * scale), chance + held * scale, scale


@triton.jit
def held_child_at_node(weights, order, coin, choice, N):
    """Return the child whose interval of weights holds the first child's coin; `choice` if there is none."""
    upto = tl.full([], 0.0, tl.float32)
    next_order = tl.where(choice == -1, tl.min(order), NONE)
    node_coin = tl.sum(tl.where(order == next_order, coin, 0.0))
    while next_order < NONE:
        upto += tl.sum(tl.where(order == next_order, weights, 0.0))
        if node_coin < upto:
            choice = next_order % N
            next_order = NONE
        else:
            next_order = tl.min(tl.where(order > next_order, order, NONE))
    return choice


@triton.jit
def try_held(
    passes,
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
    coin,
    log_p,
    log_q,
    choice,
    REPLACEMENT: tl.constexpr,
    FILTERED: tl.constexpr,
    DRAFT_FILTERED: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Held siblings at one node. Arguments and results are those of `try_rejection`."""
    log_multiple = tl.full([], float("-inf"), tl.float32)
    log_p_mass = tl.full([], 0.0, tl.float32)
    uniform_log_q = tl.full([], 1.0, tl.float32)
    inverse_c = tl.full([], 1.0, tl.float32)
    emitted = tl.full([], 1.0, tl.float32)  # c F(l), the mass that is still to be emitted
    weights = tl.zeros_like(coin)
    held = tl.full([], 0.0, tl.float32)
    passed = tl.zeros_like(index)
    left_out = tl.zeros_like(index)
    tokens_at_restart = tl.full([], 0.0, tl.float32) + V  # V is not a tensor if it is 1
    next_order = tl.where(choice == -1, tl.min(order), NONE)
    while next_order < NONE:
        is_child, alike, drawable, ratio, log_q_mass, restarts, log_p_mass, rest = offer_at_node(
            next_order,
            left_out_ptr,
            target_outside,
            draft_outside,
            V,
            N,
            token,
            index,
            order,
            first,
            log_p,
            log_q,
            passed,
            log_p_mass,
            (log_multiple, uniform_log_q, tokens_at_restart, left_out),
            REPLACEMENT,
            False,
        )
        log_multiple, uniform_log_q, tokens_at_restart, left_out = rest
        inverse_c = tl.where(restarts, 1 / emitted, inverse_c)
        chance = ratio / inverse_c
        child = next_order % N
        next_order = tl.min(tl.where(order > next_order, order, NONE))
        if drawable & (chance >= 1):
            choice = child
            next_order = NONE
        elif drawable:
            passed = tl.where(alike, 1, passed)
            weights = tl.where(is_child, chance, weights)
            log_multiple = add_logs(log_multiple, tl.log2(inverse_c) - log_q_mass)
            if (next_order < NONE) | (held > 0):
                kept = (
                    shared_sum(
                        passes,
                        target,
                        draft,
                        log_multiple,
                        uniform_log_q,
                        log_p_mass,
                        V,
                        token,
                        left_out > 0,
                        FILTERED,
                        DRAFT_FILTERED,
                        PIECES,
                    )
                    / inverse_c
                )
                weights, held, scale = hold_at_node(weights, held, is_child, chance, kept)
                emitted = scale * kept
                inverse_c /= scale
                next_order = tl.where(emitted > 0, next_order, NONE)
    choice = held_child_at_node(weights, order, coin, choice, N)
    return choice, log_multiple, log_p_mass, uniform_log_q, left_out
