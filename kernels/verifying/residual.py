"""Recursive rejection at one node: try its children in draw order, and find the distribution of the recovered token.

At a node with target distribution P and draft distribution Q, let x_1, x_2, ... be its children in draw order,
F(l) = sum_v max(P(v) - l Q(v), 0), l_1 = 0, and R_k the mass of Q outside the children before x_k. Then

    accept x_k  iff  coin_k < max(P(x_k) - l_k Q(x_k), 0) / F(l_k) * R_k / Q(x_k)
    if rejected      l_{k+1} = l_k + F(l_k) / R_k
    all rejected     recovered token ~ max(P - l Q, 0)

which is Sequoia's algorithm 2 (Chen et al. 2024) and RSD's recursive rejection sampling (Jeon et al. 2024), but no
residual distribution is stored; with R = 1 it is SpecInfer's multi-step speculative sampling (Miao et al. 2023), and
with one child standard speculative sampling (Leviathan et al. 2023). The factor of Q stays in the log domain, and R_k
is summed over the tokens not yet drawn, so nothing cancels or underflows.

If the children so far have used up the draft's support, the next child was drawn uniformly from the tokens left. The
offers restart with P and Q restricted to those tokens. A child drawn at draft temperature 0 is the same case, with the
child's token as the only one left. A child that the draft could not have drawn is skipped like an absent one.

`Offers` is the reference, for all rules that offer children one after the other. On a GPU the last of a node's programs
to finish tries its children (see `decision`). The first child takes two loads, since F(0) = 1; each later child takes a
pass over both rows, which free programs share (see `sharing`).
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

import math

import numpy as np

from heavypath.kernels.filtering import LOWEST
from heavypath.kernels.language import tl, triton
from heavypath.kernels.verifying.distributions import NONE, shared_sum

_LITTLE = 2.0**-60  # of a row's largest weight: below it the row's rest is rescaled, before fp32 loses digits
_LEAST = -126  # log2 of the least weight that does not count as 0, as in the kernels


class Offers:
    """The mass still to be emitted at one node, while its children are offered one after the other.

    The symbols are those of `traversal`. Recursive rejection is the case of weight 1, where 1 / c is F.

    left:    c max(P - l Q, 0) up to a factor, [V]
    ending:  n, the sum of c max(P - l Q, 0)
    leaving: the chance to leave the subtree, 1 - n minus the held weights
    held:    the weights W of held siblings so far, see `held`
    """

    def __init__(self, log_target: np.ndarray, log_draft: np.ndarray | None, weight: float, independent: bool):
        """log_target, log_draft: log2 P and log2 Q up to constants, [V]; without log_draft, Q is a point mass on each
        child in turn. weight: of the node. independent: whether the children are independent draws."""
        self.left = np.exp2(log_target)
        self.factor = weight / float(self.left.sum())  # c, for the weights in `left`
        self.ending = weight
        self.leaving = 1 - weight
        self.held: list[float] = []
        self.undrawn = None if independent and log_draft is not None else np.ones(len(log_target), dtype=bool)
        self.log_draft = log_draft
        if log_draft is not None:
            self.draw_from(log_draft)

    def draw_from(self, log_draft: np.ndarray) -> None:
        """Set the distribution from which the next children are drawn; log_draft: log2 Q up to a constant, [V]."""
        self.log_draft = log_draft
        self.largest = float(np.float32(log_draft.max()))
        self.draft = np.exp2(log_draft - np.float32(self.largest))  # Q up to a factor, whose log2 is `largest`
        self.mass = float(self.draft.sum())  # R

    def offer(self, token: int) -> float | None:
        """Return the probability to take the next child; None if the draft could not have drawn it."""
        if self.undrawn is not None and not self.undrawn[token]:
            return None
        log_ratio = math.log2(self.factor)
        if self.log_draft is not None:
            if self.undrawn is not None and self.mass < _LITTLE:
                logs = np.where(self.undrawn, self.log_draft, -np.inf)
                self.draw_from(logs if logs.max() > -np.inf else np.where(self.undrawn, np.float32(0), -np.inf))
            log_q = float(self.log_draft[token])
            if log_q == -math.inf:
                return None
            log_ratio += math.log2(self.mass) - (log_q - self.largest)
        if self.left[token] == 0:
            return 0.0
        log_ratio += math.log2(self.left[token])
        return 0.0 if log_ratio < _LEAST else 2.0 ** min(0.0, log_ratio)

    def pass_over(self, token: int, share: float = 1.0) -> None:
        """Pass over the child that was offered last; share: 1, or 1 - its weight if it is held."""
        if self.log_draft is not None:
            covered = np.float32(min(1 / (self.factor * self.mass), 2.0**120))
            np.maximum(self.left - covered * self.draft, 0, out=self.left)
        self.left[token] = 0
        if self.undrawn is not None:
            self.undrawn[token] = False
            if self.log_draft is not None:
                self.draft[token] = 0
                self.mass = float(self.draft.sum())
        emitted = self.factor * float(self.left.sum())  # S
        total = self.leaving + sum(self.held) + emitted
        self.ending = (emitted / total if total > 0 else self.ending) * share  # 1 if nothing is leaving or held
        if total > 0:  # otherwise the mass is 0 by rounding, and the walk ends at the node
            share /= total
            self.factor *= share
            self.leaving *= share
            self.held = [weight * share for weight in self.held]

    def hold(self, children: list[int], tokens: list[int]) -> list[tuple[int, float]]:
        """Offer all children; tokens: of all nodes, indexed by child. Returns the children that the draft could have
        drawn, with their weights W."""
        offered = []
        for child in children:
            taken = self.offer(tokens[child])
            if taken is None:
                continue
            offered.append(child)
            if taken == 1:  # nothing is left for the others
                self.ending = 0.0
                self.leaving = 0.0
                self.held = [*(0.0 for _ in self.held), 1.0]
                break
            self.pass_over(tokens[child], 1 - taken)
            self.held.append(taken)
        return [*zip(offered, self.held, strict=True)]


@triton.jit
def add_logs(a, b):
    """Return log2(2^a + 2^b)."""
    larger = tl.maximum(tl.maximum(a, b), LOWEST)
    return larger + tl.log2(tl.exp2(a - larger) + tl.exp2(b - larger))


@triton.jit
def log_sum(logs, where, also):
    """Return log2 of the sum of 2^also and of 2^logs over the elements that `where` marks."""
    logs = tl.where(where, logs, float("-inf"))
    larger = tl.maximum(tl.maximum(tl.max(logs), also), LOWEST)
    return larger + tl.log2(tl.sum(tl.exp2(logs - larger)) + tl.exp2(also - larger))


@triton.jit
def undrawn(left_out_ptr, V, index, order, first, passed, log_q, draft_outside, rest, POINT_MASSES: tl.constexpr):
    """Return log2 R before the next child. Restart if the children `passed` have used up the draft's support.

    first: as `first_of_token`, so that a token of several children counts once. A child that is passed over is `passed`
    with all that have its token.
    rest: (log2 l, `uniform_log_q` as in `distributions`, the number of tokens left at the last restart, the children
    passed before it). Returns log2 R, whether the offers restart, and the new `rest`. At a restart the passed children
    are also stored at left_out_ptr, for programs that share a pass.
    """
    log_multiple, uniform_log_q, tokens_at_restart, left_out = rest
    tokens_left = V - tl.sum(tl.where(first, passed, 0)).to(tl.float32)
    log_q_mass = tl.full([], 0.0, tl.float32)
    if POINT_MASSES:
        log_q_mass = tl.full([], float("-inf"), tl.float32)
    elif tl.max(passed) > 0:
        open = first & (passed == 0)
        if uniform_log_q > 0:
            log_q_mass = log_sum(log_q, open, draft_outside)
        else:
            log_q_mass = tl.log2(tokens_left / tokens_at_restart)
    restarts = log_q_mass == float("-inf")
    if restarts:
        log_multiple = tl.full([], float("-inf"), tl.float32)
        log_q_mass = tl.full([], 0.0, tl.float32)
        left_out = passed
        tl.store(left_out_ptr + index, left_out, mask=order < NONE)
        tokens_at_restart = tl.where(POINT_MASSES, 1.0, tokens_left)
        uniform_log_q = -tl.log2(tokens_at_restart)
    return log_q_mass, restarts, (log_multiple, uniform_log_q, tokens_at_restart, left_out)


@triton.jit
def offer_at_node(
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
    rest,
    REPLACEMENT: tl.constexpr,
    POINT_MASSES: tl.constexpr,
):
    """Offer the child at `next_order`, after the children `passed`; log_p_mass is as in `distributions`.

    rest: as in `undrawn`, which also says what `first` is and what is stored at left_out_ptr. Returns where the child
    is, which children have its token, whether the draft could have drawn it, max(P - l Q, 0) R / Q with P over the
    tokens left, log2 R, whether the offers restart, and the new log_p_mass and `rest`.
    """
    is_child = index == next_order % N
    child_p = tl.sum(tl.where(is_child, log_p, 0.0))
    child_q = tl.sum(tl.where(is_child, log_q, 0.0))
    log_q_mass = tl.full([], 0.0, tl.float32)
    restarts = tl.full([], 0, tl.int1)
    is_new = tl.full([], 1, tl.int32)  # no sibling that was passed has the same token
    alike = is_child
    if POINT_MASSES or not REPLACEMENT:
        alike = (order < NONE) & (token == tl.sum(tl.where(is_child, token, 0)))
        is_new = 1 - tl.sum(tl.where(is_child, passed, 0))
        log_q_mass, restarts, rest = undrawn(
            left_out_ptr, V, index, order, first, passed, log_q, draft_outside, rest, POINT_MASSES
        )
        if restarts:
            open = first & (passed == 0)
            log_p_mass = tl.maximum(log_sum(log_p, open, target_outside), LOWEST)
        _, uniform_log_q, _, _ = rest
        if uniform_log_q <= 0:
            child_q = uniform_log_q
    drawable = (child_q > float("-inf")) & (is_new > 0)
    log_multiple, _, _, _ = rest
    # In an order in which nothing overflows.
    ratio = tl.exp2(child_p - log_p_mass - child_q + log_q_mass) - tl.exp2(log_multiple + log_q_mass)
    return is_child, alike, drawable, tl.maximum(ratio, 0.0), log_q_mass, restarts, log_p_mass, rest


@triton.jit
def try_rejection(
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
    POINT_MASSES: tl.constexpr,
    FILTERED: tl.constexpr,
    DRAFT_FILTERED: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Recursive rejection at one node.

    passes: the node's `SharedPass`; first: as `first_of_token`. Returns the accepted child (`choice` if there is
    none); log2 l, log_p_mass and uniform_log_q, as in `distributions`; and which children were rejected before the last
    restart. The last is also stored at left_out_ptr, for programs that share a pass.
    """
    log_multiple = tl.full([], float("-inf"), tl.float32)
    log_p_mass = tl.full([], 0.0, tl.float32)
    uniform_log_q = tl.full([], 1.0, tl.float32)
    uncovered = tl.full([], 1.0, tl.float32)  # F(l)
    rejected = tl.zeros_like(index)
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
            rejected,
            log_p_mass,
            (log_multiple, uniform_log_q, tokens_at_restart, left_out),
            REPLACEMENT,
            POINT_MASSES,
        )
        log_multiple, uniform_log_q, tokens_at_restart, left_out = rest
        uncovered = tl.where(restarts, 1.0, uncovered)
        accepted = drawable & (tl.sum(tl.where(is_child, coin, 0.0)) < ratio / uncovered)
        child = next_order % N
        next_order = tl.min(tl.where(order > next_order, order, NONE))
        if accepted:
            choice = child
            next_order = NONE
        elif drawable:
            rejected = tl.where(alike, 1, rejected)
            if POINT_MASSES:
                left_out = rejected
            else:
                log_multiple = add_logs(log_multiple, tl.log2(uncovered) - log_q_mass)
                if next_order < NONE:
                    uncovered = shared_sum(
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
    return choice, log_multiple, log_p_mass, uniform_log_q, left_out
