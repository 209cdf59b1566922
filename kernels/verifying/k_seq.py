"""K-SEQ (SpecTr, Sun et al. 2023): accept at most one of a node's children, which are independent draws.

At a node with target distribution P and draft distribution Q let K children be independent draws from Q. With

    F(g) = sum_v max(P(v) - g Q(v), 0)      the part of P that g Q does not cover
    R(g) = (1 - (1 - F(g)) / g)^K           the probability that all children are rejected

the algorithm is

    g in [1, K]      the least g with R(g) >= F(g)
    accept x_k  iff  coin_k < P(x_k) / (g Q(x_k))
    all rejected     recovered token ~ P - min(P, g Q) (1 - R(g)) / (1 - F(g))

The paper has C = 1 - F and A = 1 - R. Both are close to 1 if the draft is good, and fp32 could not distinguish them.
The method is lossless for every g with R(g) >= F(g), so the search for the least one may stop anywhere above it. It
begins between 1 and

    1 + x + .. + x^(K-1),      x = F(1)^(1/K)

where R(g) >= F(g): for this g, R^(1/K) - F^(1/K) is 0 at F = 1 and at F = F(1). As a function of F it is convex, a
linear function minus a concave one. So it is not negative for F(g) <= F(1). The search is regula falsi with the
Illinois rule. A child that the draft could not have drawn is skipped, as if absent.

On a GPU the last of a node's programs to finish tries its children (see `decision`). Each step of the search is a pass
over both rows, which free programs share (see `sharing`). It ends when the bounds of g are equal in fp32.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

import numpy as np

from heavypath.kernels.language import tl, triton
from heavypath.kernels.verifying.distributions import NONE, shared_sum

SEARCH_STEPS = tl.constexpr(12)  # of the search for g


def k_seq(log_target: np.ndarray, log_draft: np.ndarray, drawn: list[int]) -> tuple[list[float | None], np.ndarray]:
    """Return the thresholds P / (g Q) of one node's children, and the weights by which the recovered token is drawn.

    log_target, log_draft: log2 P and log2 Q up to constants, [V]
    drawn:                 the children's tokens

    A threshold is None for a child that the draft could not have drawn.
    """
    log_target, log_draft = (logs - np.log2(np.exp2(logs).sum()) for logs in (log_target, log_draft))
    target = np.exp2(log_target)
    draft = np.exp2(log_draft)
    children = sum(log_draft[token] > -np.inf for token in drawn)

    def measured(g: float) -> tuple[float, float]:
        """Return F(g) and R(g)."""
        uncovered = min(float(np.maximum(target - target.dtype.type(g) * draft, 0).sum()), 1.0)
        return uncovered, (1 - (1 - uncovered) / g) ** children

    def gap_at(g: float) -> float:
        uncovered, refusing = measured(g)
        return refusing - uncovered

    # Regula falsi with the Illinois rule: the least g is in [low, high], and high always has R >= F.
    low = 1.0
    before = None
    root = measured(low)[0] ** (1 / max(children, 1))
    high = sum((root**power for power in range(1, children)), 1.0)
    low_gap = gap_at(low)
    high_gap = gap_at(high)
    for _ in range(SEARCH_STEPS.value if high > low else 0):
        slope = high_gap - low_gap
        middle = min(max(high - high_gap * (high - low) / (slope or 1.0), low), high)
        gap = gap_at(middle)
        if gap >= 0:
            low_gap = low_gap / 2 if before == "enough" else low_gap
            high = middle
            high_gap = gap
            before = "enough"
        else:
            high_gap = high_gap / 2 if before == "too little" else high_gap
            low = middle
            low_gap = gap
            before = "too little"
    uncovered, refusing = measured(high)
    share = min((1 - refusing) / max(1 - uncovered, np.finfo(np.float64).tiny), 1.0)
    ratios = (np.exp2(float(log_target[token]) - float(log_draft[token])) / high for token in drawn)
    thresholds = [ratio if log_draft[token] > -np.inf else None for token, ratio in zip(drawn, ratios, strict=True)]
    covered = np.minimum(target, target.dtype.type(high) * draft)
    return thresholds, np.maximum(target - target.dtype.type(share) * covered, 0)


@triton.jit
def _refusing(g, uncovered, children):
    """Return R(g) in fp64."""
    refuse = tl.maximum(1 - (1 - uncovered.to(tl.float64)) / g, 1e-300)
    return tl.exp(children * tl.log(refuse))


@triton.jit
def try_k_seq(
    passes,
    target,
    draft,
    V,
    token,
    order,
    coin,
    log_p,
    log_q,
    choice,
    FILTERED: tl.constexpr,
    DRAFT_FILTERED: tl.constexpr,
    PIECES: tl.constexpr,
):
    """K-SEQ at one node: return the accepted child (`choice` if there is none), log2 g, and (1 - R) / (1 - F).

    passes: the node's `SharedPass`
    """
    here = (order < NONE) & (log_q > float("-inf"))
    count = tl.sum(here.to(tl.int32))
    children = count.to(tl.float64)
    low = tl.full([], 1.0, tl.float64)
    high = tl.maximum(children, 1.0)
    low_gap = tl.full([], 0.0, tl.float64)
    high_gap = tl.full([], 0.0, tl.float64)
    missing = tl.full([], 0.0, tl.float32)  # F(high); with a single child only (1 - R) / (1 - F) = 1 is used
    before = tl.full([], -1, tl.int32)
    step = tl.full([], 0, tl.int32)
    while (choice == -1) & (step < SEARCH_STEPS + 2) & (high - low > high * 2.0**-24):
        slope = high_gap - low_gap
        middle = high - high_gap * (high - low) / tl.where(slope == 0, 1.0, slope)
        middle = tl.minimum(tl.maximum(middle, low), high)
        middle = tl.where(step == 0, low, tl.where(step == 1, high, middle))  # the first two steps are the two ends
        uncovered = shared_sum(
            passes,
            target,
            draft,
            tl.log2(middle.to(tl.float32)),
            1.0,
            0.0,
            V,
            token,
            order < 0,
            FILTERED,
            DRAFT_FILTERED,
            PIECES,
        )
        uncovered = tl.minimum(uncovered, 1.0)
        gap = _refusing(middle, uncovered, children) - uncovered.to(tl.float64)
        enough = gap >= 0
        if step == 0:
            low_gap = gap
            root = tl.exp(tl.log(tl.maximum(uncovered.to(tl.float64), 1e-300)) / children)
            high = low
            for _ in range(1, tl.where(uncovered > 0, count, 1)):
                high = 1 + root * high
        elif step == 1:
            high_gap = gap
        elif enough:
            low_gap = tl.where(before == 1, low_gap / 2, low_gap)
            high = middle
            high_gap = gap
            before = tl.full([], 1, tl.int32)
        else:
            high_gap = tl.where(before == 0, high_gap / 2, high_gap)
            low = middle
            low_gap = gap
            before = tl.full([], 0, tl.int32)
        missing = tl.where(enough | (step <= 1), uncovered, missing)
        step += 1
    g = high.to(tl.float32)
    accepting = 1 - _refusing(g.to(tl.float64), missing, children).to(tl.float32)
    share = tl.minimum(accepting / tl.maximum(1 - missing, 2.0**-126), 1.0)
    accepted = tl.min(tl.where(here & (coin < tl.exp2(log_p - log_q) / g), order, NONE))
    index = tl.arange(0, order.shape[0])
    found = tl.sum(tl.where((order == accepted) & here, index, 0))
    choice = tl.where((choice == -1) & (accepted < NONE), found, choice)
    return choice, tl.log2(g), share
