"""Measure the costs of steps on this machine, robustly against other processes that disturb the timings.

Trees of all sizes are timed in turn, in rounds. Planning needs ratios, not seconds. So each time is divided by the time
of the step with one node in the same round: a disturbance that slows both by the same factor does not change the ratio.
Let x[r, n] be the seconds of a step over n nodes in round r. Then

    ratio(n) = median over r of x[r, n] / x[r, 1]        error(n) = 0.93 (upper - lower quartile) / sqrt(rounds)

The median is better here than the minimum, which is usual for timing single programs. If another process is busy, a
short step sometimes runs undisturbed and a long one never, so that the ratio of the minima is too large. Disturbances
in fewer than half of the rounds hardly move a median. 0.93 = 1.253 / 1.349 is the factor of a median's standard error
for nearly normal errors.

A larger tree should not cost less. So the ratios are replaced by the nearest non-decreasing sequence, with weights of
1 / error^2 (isotonic regression, by pooling adjacent violators). The distance by which a ratio was moved counts as an
error, too. Some of it is real, because a BLAS may multiply 6 rows a fifth faster than 2. Most of it means that the
timings contradict each other. The step with one node is not part of the sequence: products with one row use other
routines.
"""

import math
from collections.abc import Callable, Collection, Sequence
from statistics import median, quantiles
from typing import NamedTuple

from heavypath.speculative.costs.table import Costs

AGREE = 0.03  # relative standard error below which a size is not timed further
MOST = 0.2  # relative standard error above which a figure is refused as noise
MOST_MOVED = 1 / 3  # relative distance: a figure that was moved by more contradicts the others
ROUNDS = 5  # the default of `Pace.rounds`
LEAST_ROUNDS = 3  # the default of `Pace.least`
MOST_ROUNDS = 60
EXACT = 0.005  # the smallest relative error that is assumed for a ratio's weight
BEGIN = 4  # number of sizes in the first rounds


class Timed(NamedTuple):
    """One timing of a tree: seconds of a step without drafting, and of drafting a level (None without levels)."""

    step: float
    level: float | None = None


class Pace(NamedTuple):
    """How many rounds `time_costs` times.

    rounds: minimal number of rounds for each size, within the time limit
    least: number of rounds that are always made, even if the time limit is reached before
    """

    rounds: int = ROUNDS
    least: int = LEAST_ROUNDS


PACE = Pace()


class Ratio(NamedTuple):
    """A median over rounds and its standard error, in the unit of the values."""

    value: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Ratio":
        """The median of the values of some rounds, and its error, which is infinite for a single value."""
        if len(values) < 2:
            return cls(values[0], math.inf)
        low, middle, high = quantiles(values, n=4, method="inclusive")
        return cls(middle, 0.93 * (high - low) / math.sqrt(len(values)))


class Timings:
    """Rounds of timings. Each round maps numbers of nodes to a `Timed`; every round has timed 1 node."""

    def __init__(self) -> None:
        self.rounds: list[dict[int, Timed]] = []

    def of(self, size: int) -> Ratio:
        """The cost of a step over `size` nodes, divided by the same round's cost of a step over one node."""
        return Ratio.of([found[size].step / found[1].step for found in self.rounds if size in found])

    def rounds_of(self, size: int) -> int:
        """The number of rounds that have timed this size."""
        return sum(size in found for found in self.rounds)

    @property
    def level(self) -> Ratio:
        """The cost of drafting a level, in steps of one node; 0 if no level was timed.

        A round's value is the median over the sizes that it timed.
        """
        shares = []
        for found in self.rounds:
            levels = [timed.level for timed in found.values() if timed.level is not None]
            if levels:
                shares.append(median(levels) / found[1].step)
        return Ratio.of(shares) if shares else Ratio(0.0, 0.0)

    def costs(self, least_rounds: int = 1) -> Costs:
        """Seconds of a step by number of nodes, fitted so that they never fall, and of a level, with their errors.

        Only sizes that at least `least_rounds` rounds have timed are included; 1 node always is.
        """
        sizes = sorted({size for found in self.rounds for size in found})
        sizes = [size for size in sizes if size > 1 and self.rounds_of(size) >= least_rounds]
        ratios = [self.of(size) for size in sizes]
        weights = [max(ratio.error, EXACT * ratio.value) ** -2 for ratio in ratios]
        rising = rising_fit([ratio.value for ratio in ratios], weights)
        unit = Ratio.of([found[1].step for found in self.rounds])
        step = {1: unit.value}
        errors = {1: unit.error}
        for size, ratio, value in zip(sizes, ratios, rising, strict=True):
            step[size] = unit.value * value
            errors[size] = unit.value * math.hypot(ratio.error, ratio.value - value)
        level = self.level
        return Costs(step, unit.value * level.value, errors, unit.value * level.error, len(self.rounds))


def rising_fit(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence f with the least sum of weight * (value - f)^2.

    Neighbours that fall are replaced by their weighted mean, until none fall (pool adjacent violators). A weight of 0,
    for an infinite error, counts as a very small one.
    """
    blocks: list[tuple[float, float, int]] = []  # mean, weight, number of values
    for value, weight in zip(values, weights, strict=True):
        block = (value, max(weight, 1e-12), 1)
        while blocks and blocks[-1][0] > block[0]:
            mean, heavy, count = blocks.pop()
            total = heavy + block[1]
            block = ((mean * heavy + block[0] * block[1]) / total, total, count + block[2])
        blocks.append(block)
    return [mean for mean, _, count in blocks for _ in range(count)]


def time_costs(
    visit: Callable[[int, int], Timed],
    sizes: Collection[int],
    worth: Callable[[Costs], set[int]],
    *,
    limit: float,
    clock: Callable[[], float],
    report: Callable[[str], object],
    of: str = "",
    pace: Pace = PACE,
) -> Costs:
    """Time trees in rounds until the figures are exact enough, or the time limit is reached.

    visit: visit(nodes, round) times a tree of this number of nodes; round 0 is a warm-up
    sizes: numbers of nodes that may be timed. The first rounds time a few small trees, of doubling sizes
    worth: worth(costs) returns the sizes that are worth timing, given the costs known so far. Sizes above the largest
        timed one are reached by doubling
    limit: seconds by `clock`, checked after each round; `pace.least` rounds are always made
    report: called with a line of progress before each round
    of: a phrase for reports and errors that describes the timings, such as the number of sequences
    pace: how many rounds to time

    Raises ValueError if figures are too inexact, or contradict each other, at the end.
    """
    candidates = sorted({1, *sizes})
    doubling = [1]
    for size in candidates:
        if size >= 2 * doubling[-1] or size == candidates[-1] > doubling[-1]:
            doubling.append(size)
    active = doubling[:BEGIN]
    timings = Timings()
    begin = clock()
    number = 0
    for size in active:
        visit(size, 0)
    left = ""
    while True:
        number += 1
        report(f"timing trees of 1 to {max(active)} nodes{of}, round {number}{left}")
        turn = number % len(active)
        timings.rounds.append({size: visit(size, number) for size in active[turn:] + active[:turn]})
        known = timings.costs()
        wanted = {1} | worth(known)
        beyond = max(known.step)
        further = [size for size in doubling if size > beyond][:1] if max(wanted) > beyond else []
        missing = [size for size in (*sorted(wanted), *further) if size not in known.step and size <= beyond] + further
        few = {size for size in known.step if timings.rounds_of(size) < pace.rounds}
        unsure = {size for size in wanted if size in known.step and not _agrees(timings.of(size))}
        level = timings.level
        done = not missing and not few and not unsure and level.error <= AGREE
        spent = clock() - begin
        if done or number >= MOST_ROUNDS or (spent >= limit and number >= pace.least):
            break
        for size in missing:
            visit(size, 0)
        keep = few | {size for size in wanted if size in known.step} | {*missing}
        active = sorted({1} | keep)
        left = f", about {_seconds_left(timings, active, spent, limit, pace):.0f} s left"
    costs = timings.costs(pace.least)
    _check(
        timings,
        costs,
        {size for size in costs.step if size <= max(wanted)},
        f"{of} in {number} rounds of {spent:.0f} s",
    )
    return costs


def _agrees(ratio: Ratio) -> bool:
    return ratio.error <= AGREE * ratio.value


def _seconds_left(timings: Timings, active: Sequence[int], spent: float, limit: float, pace: Pace) -> float:
    """An estimate of the seconds until timing ends, which assumes that errors fall with the square root of the rounds.

    active: the sizes that are timed in each round; spent: seconds so far; limit: the most seconds
    """
    rounds = len(timings.rounds)
    needed = 0.0
    for size in active:
        have = timings.rounds_of(size)
        if have < pace.rounds:
            needed = max(needed, pace.rounds - have)
        elif not _agrees(ratio := timings.of(size)):
            needed = max(needed, have * ((ratio.error / ratio.value / AGREE) ** 2 - 1))
    needed = max(1.0, needed)
    return max(0.0, min(limit - spent, needed * spent / rounds))


def _check(timings: Timings, costs: Costs, sizes: set[int], how: str) -> None:
    """Raise ValueError if figures are too inexact to plan by.

    That is if the error of one of these sizes, or of a level, exceeds `MOST`, or if the fit that makes costs rise moved
    a size's cost by more than `MOST_MOVED`. how: a description of the timings, for the message.
    """
    unit = costs.step[1]

    def share(size: int) -> float:
        ratio = timings.of(size)
        fitted = costs.step[size] / unit
        return max(ratio.error / MOST, abs(ratio.value - fitted) / MOST_MOVED) / fitted

    worst = max(sizes - {1}, key=share, default=None)
    rounds = f"{how} together".lstrip()
    advice = (
        "Nothing was written. Calibrate while the machine is idle, with fewer threads than it has free cores "
        "(OMP_NUM_THREADS=1 if one core is free), for longer (limit=, --limit), or for fewer sequences "
        "(batch_sizes=[1], --batch-sizes 1)"
    )
    if worst is not None and not share(worst) <= 1:
        raw = ", ".join(f"{size}: {timings.of(size).value:.2f}" for size in sorted(sizes))
        raise ValueError(
            f"the costs are noise: a step over {worst} nodes took {costs.step[worst] / unit:.2f} +- "
            f"{costs.step_error[worst] / unit:.2f} steps of plain decoding {rounds}, expected a standard error below "
            f"{MOST:.0%} and at most {MOST_MOVED:.0%} from a sequence that rises (medians by nodes: {raw}). {advice}"
        )
    if not costs.level_error <= MOST * unit:
        raise ValueError(
            f"the costs are noise: drafting a level took {costs.level / unit:.2f} +- "
            f"{costs.level_error / unit:.2f} steps of plain decoding {rounds}, expected an error below "
            f"{MOST:.2f}. {advice}"
        )
