"""Costs of steps on this machine, from timings that are disturbed by anything else that runs on it.

Trees of all sizes are timed in turn, in rounds. Planning needs ratios, not seconds. So each time is divided by that of
the step of one node in the same round: a disturbance that slows both alike leaves their ratio as it was. With x[r, n]
the seconds of a step over n nodes in round r,

    ratio(n) = median over r of x[r, n] / x[r, 1]        error(n) = 0.93 (upper - lower quartile) / sqrt(rounds)

Here the median is better than the least, by which single programs are usually timed. Beside a busy process a short step
is sometimes left alone and a long one never, so that the ratio of the least times is too large. A median does not
depend on fewer than half of the rounds. 0.93 is the factor of a median's standard error where errors are nearly normal
(1.253 / 1.349).

A larger tree should not cost less. So the ratios are replaced by the rising sequence nearest to them, with weights of
1 / error^2 (isotonic regression, by pooling adjacent violators). The distance that a ratio was moved counts as error,
too. Some of it is real, since a BLAS may multiply 6 rows a fifth faster than 2. Much of it says that the timings
contradict each other. A single node is not part of the sequence: products with one row have routines of their own.
"""

import math
from collections.abc import Callable, Collection, Sequence
from statistics import median, quantiles
from typing import NamedTuple

from heavypath.speculative.costs.table import Costs

AGREE = 0.03  # of a figure: when its standard error is below that, it is not timed further
MOST = 0.2  # of a figure: with a standard error above that it is no measurement
MOST_MOVED = 1 / 3  # of a figure: one that had to be moved by more contradicts the others
ROUNDS, LEAST_ROUNDS = 5, 3  # see `Pace`
MOST_ROUNDS = 60
EXACT = 0.005  # the least relative error that any ratio is believed to have, for its weight
BEGIN = 4  # sizes that the first rounds time


class Timed(NamedTuple):
    """The seconds of a step without its drafting, and those of drafting a level; None for a tree without levels."""

    step: float
    level: float | None = None


class Pace(NamedTuple):
    """The least number of rounds for each size; and `least` of them, where the time is over after fewer."""

    rounds: int = ROUNDS
    least: int = LEAST_ROUNDS


PACE = Pace()


class Ratio(NamedTuple):
    """A median over rounds, and its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Ratio":
        """The estimate of the values of some rounds; of a single one the error is not known, which is infinite."""
        if len(values) < 2:
            return cls(values[0], math.inf)
        low, middle, high = quantiles(values, n=4, method="inclusive")
        return cls(middle, 0.93 * (high - low) / math.sqrt(len(values)))


class Timings:
    """Rounds of timings. Each round is {nodes: `Timed`} and has one node among its sizes."""

    def __init__(self) -> None:
        self.rounds: list[dict[int, Timed]] = []

    def of(self, size: int) -> Ratio:
        """The step over `size` nodes, in steps of one node."""
        return Ratio.of([found[size].step / found[1].step for found in self.rounds if size in found])

    def rounds_of(self, size: int) -> int:
        """The number of rounds that have timed this size."""
        return sum(size in found for found in self.rounds)

    @property
    def level(self) -> Ratio:
        """Drafting a level, in steps of one node. A round's figure is the median over its sizes."""
        shares = []
        for found in self.rounds:
            levels = [timed.level for timed in found.values() if timed.level is not None]
            if levels:
                shares.append(median(levels) / found[1].step)
        return Ratio.of(shares) if shares else Ratio(0.0, 0.0)

    def costs(self, least_rounds: int = 1) -> Costs:
        """The costs that follow, of the sizes with so many rounds at least."""
        sizes = sorted({size for found in self.rounds for size in found})
        sizes = [size for size in sizes if size > 1 and self.rounds_of(size) >= least_rounds]
        ratios = [self.of(size) for size in sizes]
        weights = [max(ratio.error, EXACT * ratio.value) ** -2 for ratio in ratios]
        rising = rising_fit([ratio.value for ratio in ratios], weights)
        unit = Ratio.of([found[1].step for found in self.rounds])
        step, errors = {1: unit.value}, {1: unit.error}
        for size, ratio, value in zip(sizes, ratios, rising, strict=True):
            step[size] = unit.value * value
            errors[size] = unit.value * math.hypot(ratio.error, ratio.value - value)
        level = self.level
        return Costs(step, unit.value * level.value, errors, unit.value * level.error, len(self.rounds))


def rising_fit(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The sequence f that never falls with the least sum of weight * (value - f)^2; weights are positive, 0 for an
    infinite error counts as almost nothing.

    Neighbours that fall are pooled to their weighted mean, until none fall (pool adjacent violators).
    """
    blocks: list[tuple[float, float, int]] = []  # mean, weight, values
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
    """Time trees in rounds until the figures that count agree, or the time is over.

    visit: times a tree of so many nodes in round 0, 1, ...; round 0 is a warm-up
    sizes: nodes of the trees that may be timed. The rounds begin with a few small ones, of doubling sizes
    worth: which sizes are worth timing by what is known so far; those beyond the ones timed are reached by doubling
    limit: seconds by `clock`; looked at after each round, and a few rounds, by `pace`, are always made
    of: what is timed beside the trees, for reports and errors

    Raises ValueError if the figures still contradict each other at the end.
    """
    candidates = sorted({1, *sizes})
    doubling = [1]
    for size in candidates:
        if size >= 2 * doubling[-1] or size == candidates[-1] > doubling[-1]:
            doubling.append(size)
    active, timings, begin, number = doubling[:BEGIN], Timings(), clock(), 0
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
    """An estimate: errors fall with the square root of the rounds."""
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
    """Raise ValueError if figures of these sizes are off by more than `MOST`; how: they were timed, in words."""
    unit = costs.step[1]

    def share(size: int) -> float:
        """Of what is allowed."""
        ratio, fitted = timings.of(size), costs.step[size] / unit
        return max(ratio.error / MOST, abs(ratio.value - fitted) / MOST_MOVED) / fitted

    worst = max(sizes - {1}, key=share, default=None)
    rounds = f"{how} together".lstrip()
    advice = (
        "Nothing was written. Calibrate while the machine is idle, with fewer threads than it has free cores "
        "(OMP_NUM_THREADS=1 where one core is free), for longer (limit=, --limit), or for fewer sequences "
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
