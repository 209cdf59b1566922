"""Held siblings: what recursive rejection would accept is held, and later children are tried before it is given out.

At a node with target distribution P and draft distribution Q, let x_1, x_2, ... be its children in draw order, R_j the
mass of Q outside the children before x_j (1 for independent draws), and F(l) = sum_v max(P(v) - l Q(v), 0). Each child
has a weight W, the probability that it is the one accepted; h is the sum of the weights so far. From l = 0, c = 1:

    t_j = min(1, c max(P(x_j) - l Q(x_j), 0) R_j / Q(x_j))
    l  += 1 / (c R_j)
    s_j = (1 - t_j) / (h + c F(l))                             with the new l
    W_i *= s_j for the elder i < j,  W_j = t_j,  c *= s_j      so that h becomes t_j + s_j h
    at last:  x_j is accepted with probability W_j, none with 1 - h; the recovered token ~ max(P - l Q, 0)

Recursive rejection (`residual`) tries x_j only if all elder children were rejected: it stops at the first success. Here
the elder ones that would be accepted, of weight h, are held back, and x_j is offered to the whole of what is still to be
emitted. So x_j is accepted with t_j where rejection accepts it with (1 - h) min(1, t_j / (1 - h)), which is never more.
The rule is our own; we have found it in no paper.

*Why the law is the target's.* Before x_j is drawn, let the token be emitted by the law

    M = sum_{i<j} W_i [x_i] + c max(P - l Q, 0)                of total mass 1; [x] is all mass on x

which is P itself for j = 1. Let q = Q / R_j be the law of x_j given the elder ones (q is 0 on these, or Q itself), and
m(v) = min(q(v), c max(P(v) - l Q(v), 0)), so that t_j = m(x_j) / q(x_j). Given x_j, emit x_j with probability t_j, else
a token by (M - m) / (1 - sum m). On average over x_j this is m + (1 - sum m) (M - m) / (1 - sum m) = M. But M - m is

    sum_{i<j} W_i [x_i] + c max(P - (l + 1 / (c R_j)) Q, 0)    of mass h + c F(new l) = 1 - sum m

since max(a, 0) - min(b, max(a, 0)) = max(a - b, 0) for b >= 0. So its parts, times s_j, are the weights of the next step,
and no child, drawn or not, changes the law on average: the weights of each token are a martingale that starts at P. At
draft tokens already drawn without replacement both q and what is left of P are 0, for t_j < 1 says P(x_j) < new l Q(x_j);
and t_j = 1 ends the series, with W_j = 1 alone. Nothing in this asks how many children there are, so this may depend on
all that was drawn for them. What hangs below x_j is verified in its turn, by the law after x_j, if x_j is accepted.

*Why it accepts at least as much.* Averaged over x_j, the mass that passes to it is sum m, and it is taken out of
c max(P - l Q, 0) alone; the elder keep theirs. Rejection takes sum_v min((1 - h) q, c max(P - l Q, 0)), which is less or
equal, out of the same measure as long as c agrees; `tests/test_held.py` checks node by node that the sum is never less.

Of a single child, and of point masses (draft temperature 0), where s_j = 1, the rule is recursive rejection itself. Where
the draft's support is used up the chain restarts as in `residual`: what is left of P is its part on tokens not drawn.

The node's coin is that of its first child: child j is accepted where it falls below W_1 + ... + W_j and not below the sum
before. So no further random number is named, and single children are decided exactly as by `residual`.
"""

# A type checker does not understand Triton kernels.
# pyright: reportOperatorIssue=false

import numpy as np
import triton
import triton.language as tl

from heavypath.kernels.verifying.distributions import NONE


def hold(weights: np.ndarray, place: int, tried: np.ndarray, chance: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Let child `place` of those sequences that tried one take its share t of what the elder ones hold.

    weights: fp64 [A, K], which is changed; tried: bool [A]; chance: t, fp64 [A]; left: c F(new l), fp64 [A]

    Returns s, fp64 [A], which is 1 where no child was tried.
    """
    whole = weights.sum(1) + left
    scale = np.where(tried, np.where(whole > 0, (1 - chance) / whole, 0), 1)
    weights *= scale[:, None]
    weights[tried, place] = chance[tried]
    return scale


def held_child(weights: np.ndarray, coin: np.ndarray) -> np.ndarray:
    """The child that is accepted by weights [A, K] and a node's coin [A]; -1 for none."""
    below = coin[:, None] < weights.cumsum(1)
    return np.where(below.any(1), below.argmax(1), -1)


@triton.jit
def hold_in_kernel(weight, elder, one, chance, left):
    """`hold` at one node: the new weights of its children, their sum, which was `elder`, and s. one: child x_j."""
    whole = elder + left
    scale = tl.where(whole > 0, (1 - chance) / whole, 0.0)
    return tl.where(one, chance, weight * scale), chance + elder * scale, scale


@triton.jit
def held_child_in_kernel(weight, order, coin, choice, N):
    """`held_child` at one node; `choice` where there is none."""
    upto = tl.full([], 0.0, tl.float32)
    next_order = tl.where(choice == -1, tl.min(order), NONE)
    node_coin = tl.sum(tl.where(order == next_order, coin, 0.0))
    while next_order < NONE:
        upto += tl.sum(tl.where(order == next_order, weight, 0.0))
        if node_coin < upto:
            choice = next_order % N
            next_order = NONE
        else:
            next_order = tl.min(tl.where(order > next_order, order, NONE))
    return choice
