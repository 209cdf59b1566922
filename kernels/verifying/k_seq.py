"""K-SEQ (SpecTr, Sun et al. 2023): accept one of a node's independent children.

At a node with target distribution P and draft distribution Q let K children be independent draws from Q. With

    C(g) = sum_v min(P(v), g Q(v))      the part of P that g Q covers
    A(g) = 1 - (1 - C(g) / g)^K         the probability that any child is accepted

the algorithm is

    g in [1, K]      the least g with C(g) >= A(g), which g = K always satisfies
    accept x_k  iff  coin_k < P(x_k) / (g Q(x_k))
    all rejected     recovered token ~ P - min(P, g Q) A(g) / C(g)

The target's law is kept for every g with C(g) >= A(g), so the search for the least one may stop anywhere above it. The
search is regula falsi with the Illinois rule. A child that the draft could not have drawn is skipped, as if absent.

On a GPU the last of a node's programs tries its children (see `decision`); each step of the search is a pass over both
rows, which is shared by programs that are free (see `sharing`). It ends once fp32 cannot tell the bounds of g apart.
"""

# A type checker does not understand Triton kernels.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

import numpy as np
import triton
import triton.language as tl

from heavypath.kernels.verifying.distributions import NONE, shared_sum

SEARCH_STEPS = tl.constexpr(12)  # of the search for g


@np.errstate(all="ignore")
def k_seq(
    log_target: np.ndarray, log_draft: np.ndarray, drawn: np.ndarray, coins: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Try the children of one node in each of A sequences, by the algorithm above.

    log_target, log_draft: log2 P and log2 Q, [A, V]
    drawn:                 int64 [A, K], the children's tokens; -1 for no child
    coins:                 fp64 [A, K]

    Returns the index of the accepted child or -1, [A]; and for the A' sequences without an accepted child the weights
    [A', V] that their recovered tokens are drawn by.
    """
    sequence, tokens = np.arange(len(drawn))[:, None], np.maximum(drawn, 0)
    log_p, log_q = (rows[sequence, tokens].astype(np.float64) for rows in (log_target, log_draft))
    here = (drawn >= 0) & (log_q > -np.inf)
    children = here.sum(1)
    target, draft = np.exp2(log_target), np.exp2(log_draft)
    share_of = np.empty_like(draft)

    def covered(g: np.ndarray) -> np.ndarray:
        np.multiply(draft, g[:, None].astype(draft.dtype), out=share_of)
        return np.minimum(target, share_of, out=share_of).sum(-1).astype(np.float64)

    def accepting(g: np.ndarray, cover: np.ndarray) -> np.ndarray:
        return 1 - np.maximum(1 - cover / g, 0) ** children

    # Regula falsi with the Illinois rule: the least g is in [low, high], and high always satisfies the condition.
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

    accepted = here & (coins < np.exp2(log_p - log_q) / high[:, None])
    choice = np.where(accepted.any(1), accepted.argmax(1) if drawn.shape[1] else -1, -1)
    cover = covered(high)
    share = np.minimum(accepting(high, cover) / np.maximum(cover, np.finfo(np.float64).tiny), 1)
    weights = np.maximum(target - share[:, None].astype(target.dtype) * share_of, 0)[choice < 0]
    return choice, np.where((weights > 0).any(-1, keepdims=True), weights, target[choice < 0])


@triton.jit
def _accepting(g, covered, children):
    """A(g), in fp64."""
    refuse = tl.maximum(1 - covered.to(tl.float64) / g, 1e-300)
    return 1 - tl.exp(children * tl.log(refuse))


@triton.jit
def try_k_seq(
    job, target, draft, V, token, order, coin, log_p, log_q, choice,
    FILTERED: tl.constexpr, DRAFT_FILTERED: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """`k_seq` at one node, in a kernel: the accepted child (`choice` where there is none), log2 g, and A(g) / C(g).

    job is as in `distributions`.
    """
    here = (order < NONE) & (log_q > float("-inf"))
    children = tl.sum(here.to(tl.int32)).to(tl.float64)
    low = tl.full([], 1.0, tl.float64)
    high = tl.maximum(children, 1.0)
    low_gap, high_gap = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    covered = tl.full([], 1.0, tl.float32)  # C(high); of a single child only A / C = 1 counts
    before = tl.full([], -1, tl.int32)
    step = tl.full([], 0, tl.int32)
    while (choice == -1) & (step < SEARCH_STEPS + 2) & (high - low > high * 2.0**-24):
        slope = high_gap - low_gap
        middle = high - high_gap * (high - low) / tl.where(slope == 0, 1.0, slope)
        middle = tl.minimum(tl.maximum(middle, low), high)
        middle = tl.where(step == 0, low, tl.where(step == 1, high, middle))  # the first two steps are at both ends
        cover = shared_sum(
            job, target, draft, tl.log2(middle.to(tl.float32)), 1.0, 0.0, V, token, order < 0,
            True, FILTERED, DRAFT_FILTERED, PIECES,
        )  # fmt: skip
        gap = cover.to(tl.float64) - _accepting(middle, cover, children)
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
        covered = tl.where(enough | (step == 1), cover, covered)
        step += 1
    g = high.to(tl.float32)
    accepting = _accepting(g.to(tl.float64), covered, children).to(tl.float32)
    share = tl.minimum(accepting / tl.maximum(covered, 2.0**-126), 1.0)
    accepted = tl.min(tl.where(here & (coin < tl.exp2(log_p - log_q) / g), order, NONE))
    index = tl.arange(0, order.shape[0])
    found = tl.sum(tl.where((order == accepted) & here, index, 0))
    choice = tl.where((choice == -1) & (accepted < NONE), found, choice)
    return choice, tl.log2(g), share
