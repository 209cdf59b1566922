"""One node of a drafted tree: try its children in draw order, and find what a recovered token is drawn by.

At a node with target distribution P and draft distribution Q, let x_1, x_2, ... be its children in draw order,
F(l) = sum_v max(P(v) - l Q(v), 0), l_1 = 0, and R_k the mass of Q outside the children before x_k. Then

    accept x_k  iff  coin_k < max(P(x_k) - l_k Q(x_k), 0) / F(l_k) * R_k / Q(x_k)
    if rejected      l_{k+1} = l_k + F(l_k) / R_k
    all rejected     recovered token ~ max(P - l Q, 0)

which is Sequoia's algorithm 2 (Chen et al. 2024) and RSD's recursive rejection sampling (Jeon et al. 2024) without
a residual distribution ever being stored; with R = 1 it is SpecInfer's multi-step speculative sampling (Miao et al.
2023), and with one child standard speculative sampling (Leviathan et al. 2023). What multiplies Q stays in the log
domain, and R_k is summed over the tokens not yet drawn, so nothing cancels or underflows.

Where the children so far have used up the draft's support, the next child was drawn uniformly from the tokens left: the
chain restarts with P and Q restricted to those tokens. A child drawn at draft temperature 0 is the same case, with the
child's own token as the only one left. A child that the draft could not have drawn is skipped like an absent one.

On a GPU the last of a node's programs tries its children (see `decision`). The first child takes two loads, since
F(0) = 1; each later child takes a pass over both rows, which is shared by programs that are free (see `sharing`).
"""

# A type checker does not understand Triton kernels.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

import numpy as np
import triton
import triton.language as tl

from heavypath.kernels.filtering import LOWEST
from heavypath.kernels.verifying.distributions import NONE, shared_sum
from heavypath.kernels.verifying.held import held_child, held_child_at_node, hold, hold_at_node


@np.errstate(all="ignore")
def residual_chain(
    log_target: np.ndarray,
    log_draft: np.ndarray | None,
    drawn: np.ndarray,
    coins: np.ndarray,
    replacement: bool,
    held: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Try the children of one node in each of A sequences, in draw order, by the closed form above.

    log_target, log_draft: log2 P and log2 Q, [A, V]; without log_draft, Q is a point mass on each child in turn
    drawn:                 int64 [A, K], the children's tokens; -1 for no child
    coins:                 fp64 [A, K]
    replacement:           whether the children are independent draws
    held:                  whether elder children are held while later ones are tried, see `held`

    Returns the index of the accepted child or -1, [A]; and for the A' sequences without an accepted child the weights
    [A', V] that their recovered tokens are drawn by.
    """
    sequence, waiting = np.arange(len(drawn)), drawn >= 0
    choice = sequence * 0 - 1
    target = residual = None  # P and max(P - l Q, 0), once a child has been rejected
    total, log_lambda, log_mass = sequence * 0 + 1.0, sequence - np.inf, 0.0  # 1 / c, log l, log R
    held = held and log_draft is not None  # of point masses it is the same, and of a single child
    holding, mass_left = np.zeros(drawn.shape if held else 0), sequence * 0 + 1.0  # W, and c F(l), the mass besides
    draft = np.full_like(log_target, -np.inf) if log_draft is None else log_draft
    distinct = log_draft is None or not replacement
    undrawn = np.ones(draft.shape, dtype=bool) if distinct else None  # false at the tokens of rejected children
    for place in range(drawn.shape[1]):
        child, here = np.maximum(drawn[:, place], 0), waiting[:, place]
        if undrawn is not None and (place or log_draft is None):
            log_mass = _log_sums(np.where(undrawn, draft, -np.inf))
            restart = here & (log_mass == -np.inf)
            if restart.any():
                again, left = restart[:, None], undrawn
                if log_draft is None:
                    left = np.arange(draft.shape[1]) == child[:, None]
                target = np.exp2(log_target) if target is None else target
                target = np.where(again & ~undrawn, 0, target)
                target /= np.maximum(target.sum(-1, keepdims=True), np.finfo(target.dtype).tiny)
                residual = target if residual is None else np.where(again, target, residual)
                uniform = -np.log2(left.sum(-1, keepdims=True, dtype=draft.dtype))
                draft = np.where(again, np.where(left, uniform, -np.inf), draft)
                total = np.where(restart, target.sum(-1) / mass_left, total)
                log_lambda, log_mass = np.where(restart, -np.inf, log_lambda), np.where(restart, 0, log_mass)
            here = here & undrawn[sequence, child]

        log_q = draft[sequence, child].astype(np.float64)
        here = here & (log_q > -np.inf)
        if residual is None:  # l = 0 and F = 1
            ratio = np.exp2(log_target[sequence, child] - log_q)
        else:
            ratio = residual[sequence, child] / total * np.exp2(log_mass - log_q)
        if held:
            here = here & (total > 0)
            alone = (drawn >= 0).sum(1) == 1  # which needs no pass where it is accepted
            accepted = here & np.where(alone, coins[:, 0] < ratio, ratio >= 1)
        else:
            accepted = here & (coins[:, place] < ratio)
        rejected = here & ~accepted
        choice[accepted] = place
        waiting[accepted] = False
        if held:
            holding[accepted] = np.arange(drawn.shape[1]) == place
        if not waiting.any():
            break
        if not rejected.any():
            continue
        log_lambda = np.where(rejected, np.logaddexp2(log_lambda, np.log2(total) - log_mass), log_lambda)
        if undrawn is not None:
            undrawn[sequence[rejected], child[rejected]] = False
        target = np.exp2(log_target) if target is None else target
        residual = np.exp2(draft + log_lambda[:, None].astype(draft.dtype))
        residual = np.maximum(np.subtract(target, residual, out=residual), 0, out=residual)
        mass = residual.sum(-1).astype(np.float64)
        if held:
            scale = hold(holding, place, rejected, ratio, mass / total)
            mass_left = np.where(rejected, scale * mass / total, mass_left)
            waiting[mass_left <= 0] = False
            mass = np.where(rejected, np.where(mass_left > 0, total / scale, 0), total)
        total = mass

    if held:
        choice = held_child(holding, coins[:, 0])
    stopped = choice < 0
    if not stopped.any():
        return choice, log_target[:0]
    weights = np.exp2(log_target) if residual is None else residual
    if (total <= 0).any():  # by rounding, or for a child that neither model could draw
        weights = np.where(total[:, None] > 0, weights, np.exp2(log_target))
    return choice, weights if stopped.all() else weights[stopped]


def _log_sums(logs: np.ndarray) -> np.ndarray:
    """log2 of the sum of 2^logs in each row of [A, V], fp64 [A]; -inf for a row of -inf."""
    largest = np.maximum(logs.max(-1, keepdims=True), np.finfo(logs.dtype).min)
    return largest[:, 0] + np.log2(np.exp2(logs - largest).sum(-1)).astype(np.float64)


@triton.jit
def add_logs(a, b):
    """log2(2^a + 2^b)"""
    larger = tl.maximum(tl.maximum(a, b), LOWEST)
    return larger + tl.log2(tl.exp2(a - larger) + tl.exp2(b - larger))


@triton.jit
def log_sum(logs, where, also):
    """log2 of the sum of 2^logs over the places that `where` marks, and of 2^also."""
    logs = tl.where(where, logs, float("-inf"))
    larger = tl.maximum(tl.maximum(tl.max(logs), also), LOWEST)
    return larger + tl.log2(tl.sum(tl.exp2(logs - larger)) + tl.exp2(also - larger))


@triton.jit
def undrawn(left_out_ptr, V, index, order, passed, log_q, draft_outside, rest, POINT_MASSES: tl.constexpr):
    """log2 R before the next child; the chain restarts where the children `passed` have used up the draft's support.

    rest: log2 l, and since the last restart `uniform` as in `distributions`, 1 / 2^uniform, and the children passed
    before it. Returns log2 R, whether the chain restarts, and `rest` behind that; these children are stored at
    left_out_ptr, too, for programs that share a pass.
    """
    log_multiple, uniform, tokens_then, restricted = rest
    tokens_left = V - tl.sum(passed).to(tl.float32)
    log_mass = tl.full([], 0.0, tl.float32)
    if POINT_MASSES:
        log_mass = tl.full([], float("-inf"), tl.float32)
    elif tl.max(passed) > 0:
        open = (order < NONE) & (passed == 0)
        log_mass = log_sum(log_q, open, draft_outside) if uniform > 0 else tl.log2(tokens_left / tokens_then)
    restarts = log_mass == float("-inf")
    if restarts:
        log_multiple = tl.full([], float("-inf"), tl.float32)
        log_mass = tl.full([], 0.0, tl.float32)
        restricted = passed
        tl.store(left_out_ptr + index, restricted, mask=order < NONE)
        tokens_then = tl.where(POINT_MASSES, 1.0, tokens_left)
        uniform = -tl.log2(tokens_then)
    return log_mass, restarts, (log_multiple, uniform, tokens_then, restricted)


@triton.jit
def try_chain(
    job, left_out_ptr, target, draft, target_outside, draft_outside, V, N, token, index, order, coin, log_p, log_q,
    choice, REPLACEMENT: tl.constexpr, HELD: tl.constexpr, POINT_MASSES: tl.constexpr,
    FILTERED: tl.constexpr, DRAFT_FILTERED: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """`residual_chain` at one node, in a kernel.

    job is as in `distributions`. Returns the accepted child (`choice` where there is none), log2 l, log2 of the sum of
    P over the tokens left, `uniform` as there, and which children were rejected before the last restart. The last is
    stored at left_out_ptr, too, for programs that share a pass.
    """
    leaves_out: tl.constexpr = POINT_MASSES or not REPLACEMENT
    log_multiple = tl.full([], float("-inf"), tl.float32)
    left = tl.full([], 0.0, tl.float32)  # log2 of the sum of P over the tokens left
    uniform = tl.full([], 1.0, tl.float32)
    over = tl.full([], 1.0, tl.float32)  # 1 / c
    weight, elder = tl.zeros_like(coin), tl.full([], 0.0, tl.float32)  # of held children, and the sum of it
    mass_left = tl.full([], 1.0, tl.float32)  # c F(l)
    rejected, restricted = tl.zeros_like(index), tl.zeros_like(index)
    tokens_then = tl.full([], 0.0, tl.float32) + V  # V is not a tensor where it is 1
    next_order = tl.where(choice == -1, tl.min(order), NONE)
    while next_order < NONE:
        this = next_order % N
        one = index == this
        this_token = tl.sum(tl.where(one, token, 0))
        this_p = tl.sum(tl.where(one, log_p, 0.0))
        this_q = tl.sum(tl.where(one, log_q, 0.0))
        log_mass = tl.full([], 0.0, tl.float32)
        fresh = tl.full([], 1, tl.int32)
        if leaves_out:
            fresh = tl.min(tl.where((rejected > 0) & (token == this_token), 0, 1))
            log_mass, restarts, rest = undrawn(
                left_out_ptr, V, index, order, rejected, log_q, draft_outside,
                (log_multiple, uniform, tokens_then, restricted), POINT_MASSES,
            )  # fmt: skip
            log_multiple, uniform, tokens_then, restricted = rest
            if restarts:
                open = (order < NONE) & (rejected == 0)
                left = tl.maximum(log_sum(log_p, open, target_outside), LOWEST)
                over = 1 / mass_left if HELD else tl.full([], 1.0, tl.float32)
            if uniform <= 0:
                this_q = uniform
        # (P - l Q) R / (Q F), computed in an order in which nothing overflows.
        ratio = tl.exp2(this_p - left - this_q + log_mass) - tl.exp2(log_multiple + log_mass)
        ratio = tl.maximum(ratio, 0.0) / over
        here = (this_q > float("-inf")) & (fresh > 0)
        accepted = here & (ratio >= 1 if HELD else tl.sum(tl.where(one, coin, 0.0)) < ratio)
        next_order = tl.min(tl.where(order > next_order, order, NONE))
        if accepted:
            choice = this
            next_order = NONE
        elif here:
            rejected = tl.where(one, 1, rejected)
            if POINT_MASSES:
                restricted = rejected
            else:
                log_multiple = add_logs(log_multiple, tl.log2(over) - log_mass)
                needed = next_order < NONE
                if HELD:
                    weight = tl.where(one, ratio, weight)
                    needed |= elder > 0
                if needed:
                    total = shared_sum(
                        job, target, draft, log_multiple, uniform, left, V, token, restricted > 0,
                        False, FILTERED, DRAFT_FILTERED, PIECES,
                    )  # fmt: skip
                    if HELD:
                        kept = total / over
                        weight, elder, scale = hold_at_node(weight, elder, one, ratio, kept)
                        mass_left = scale * kept
                        over /= scale
                        next_order = tl.where(mass_left > 0, next_order, NONE)
                    else:
                        over = total
    if HELD:
        choice = held_child_at_node(weight, order, coin, choice, N)
    return choice, log_multiple, left, uniform, restricted
