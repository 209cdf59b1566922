"""What steps cost, from timings of machines that are made up: idle ones, busy ones, and one that was met."""

import random

import pytest

from heavypath.speculative.costs.table import Costs
from heavypath.speculative.costs.timing import AGREE, MOST_ROUNDS, ROUNDS, Ratio, Timed, rising_fit, time_costs

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def linear(size):
    return 5 * (1 + 0.05 * (size - 1))


class Machine:
    """Takes cost(nodes) milliseconds for a step, times what the load makes of it, and has a clock of its own."""

    def __init__(self, cost=linear, load=lambda machine, number: 1.0):
        self.cost, self.load, self.now, self.visits, self.lines = cost, load, 0.0, [], []
        self.random = random.Random(1)

    def visit(self, size, number):
        step = 1e-3 * self.cost(size) * self.load(self, number) * self.random.uniform(0.98, 1.02)
        self.visits.append((number, size))
        self.now += 10 * step
        return Timed(step, 0.1 * step * self.cost(1) / self.cost(size) if size > 1 else None)

    def costs(self, worth=lambda costs: {1, 2, 4, 8}, limit=60.0, sizes=SIZES):
        return time_costs(self.visit, sizes, worth, limit=limit, clock=lambda: self.now, report=self.lines.append)


def test_the_rising_fit_is_that_of_its_formula():
    """max over a <= i of min over b >= i of the weighted mean of a .. b (Robertson, Wright and Dykstra)."""
    assert rising_fit([1, 3, 2, 5], [1, 1, 1, 1]) == [1, 2.5, 2.5, 5]
    assert rising_fit([4, 1], [1, 3]) == [1.75, 1.75]
    draw = random.Random(0)
    for length in range(1, 9):
        values, weights = ([draw.uniform(0.1, 2) for _ in range(length)] for _ in range(2))

        def mean(first, last, values=values, weights=weights):
            part = range(first, last + 1)
            return sum(weights[i] * values[i] for i in part) / sum(weights[i] for i in part)

        expected = [max(min(mean(a, b) for b in range(i, length)) for a in range(i + 1)) for i in range(length)]
        assert rising_fit(values, weights) == pytest.approx(expected)


LOADS = {
    "none": (0.03, lambda machine, number: 1.0),
    "every third round": (0.06, lambda machine, number: 4.0 if number % 3 == 0 else 1.0),
    "a quarter of the visits": (0.1, lambda machine, number: 5.0 if machine.random.random() < 0.25 else 1.0),
    "a slow drift": (0.06, lambda machine, number: 1 + machine.now / 5),
    "the first visit to a size": (0.06, lambda machine, number: 100.0 if number == 0 else 1.0),
}


@pytest.mark.parametrize(("within", "load"), LOADS.values(), ids=LOADS)
def test_ratios_of_costs_are_right_whatever_the_load(within, load):
    machine = Machine(load=load)
    costs = machine.costs()
    for size, ratio in costs.steps_of([1, 2, 4, 8]).items():
        assert ratio == pytest.approx(linear(size) / linear(1), rel=within)
    assert costs.level / costs.step[1] == pytest.approx(0.1, rel=within)
    first = {size: number for number, size in reversed(machine.visits)}
    assert set(first.values()) == {0}, "a size is warmed up first"


def test_an_idle_machine_is_timed_in_a_few_rounds():
    costs = Machine().costs()
    assert costs.rounds == ROUNDS
    assert {*costs.step} == {1, 2, 4, 8}, "sizes that are not worth it are not timed"
    assert all(error <= AGREE * costs.step[size] for size, error in costs.step_error.items())


def test_a_limit_ends_it_after_a_few_rounds_and_the_errors_say_so():
    """Without one it goes on until the figures agree. Progress has an estimate of the time left."""

    def load(machine, number):
        return machine.random.uniform(1, 1.5)

    hurried, patient = Machine(load=load), Machine(load=load)
    short, long = hurried.costs(limit=0.1), patient.costs(limit=1e9)
    assert short.rounds == 3 < ROUNDS < long.rounds <= MOST_ROUNDS
    assert max(short.step_error[size] / short.step[size] for size in (2, 4, 8)) > AGREE
    assert patient.lines[0] == "timing trees of 1 to 8 nodes, round 1"
    assert "round 3, about " in patient.lines[2]
    assert patient.lines[2].endswith(" s left")


def test_costs_that_fall_with_the_size_are_refused_with_the_figures():
    """Milliseconds that were met on a busy machine: a calibration of 27 minutes, then plans of one node."""
    met = {1: 32, 2: 150, 6: 65, 128: 157}
    with pytest.raises(ValueError, match=r"costs are noise: .* 2 nodes took 2\..* \+- 2\..*2: 4\.6.* 6: 2\.0.*idle"):
        Machine(met.__getitem__).costs(sizes=met, worth=lambda costs: {1, 2, 6})


def test_a_library_that_is_faster_with_a_few_rows_more_is_no_noise():
    """Ratios of a processor whose products of 6 and 8 rows take less time than those of 1 to 4."""
    met = {1: 5.0, 2: 5.2, 4: 5.05, 6: 3.95, 8: 4.0, 12: 4.8}
    costs = Machine(met.__getitem__).costs(lambda costs: {1, *met}, sizes=met)
    rising = [costs.step[size] for size in (2, 4, 6, 8, 12)]
    assert rising == sorted(rising)
    assert costs.steps_of([6])[6] == pytest.approx(0.9, abs=0.05)
    assert costs.step_error[6] / costs.step[1] > 0.05, "the error says that the figure was moved"


def test_a_machine_too_busy_to_time_anything_is_refused_in_time():
    machine = Machine(load=lambda machine, number: 12.0 if machine.random.random() < 0.5 else 1.0)
    with pytest.raises(ValueError, match=r"costs are noise.*OMP_NUM_THREADS"):
        machine.costs(limit=10.0)
    assert machine.now < 14


def test_larger_trees_are_timed_while_they_could_be_planned():
    """Steps that cost the same up to 16 nodes, as on a GPU: 8, 16 and 32 follow one after the other, 64 does not."""

    def worth(costs):
        known = costs.steps_of(sorted(costs.step))
        worthwhile = max(size for size, steps in known.items() if steps < 1.5)
        return {1, worthwhile, 2 * worthwhile}

    machine = Machine(lambda size: 5.0 * max(1.0, size / 16) ** 2)
    costs = machine.costs(worth, sizes=(1, 2, 4, 8, 12, 16, 24, 32, 64, 128))
    assert {16, 32} <= {*costs.step}
    assert max(costs.step) == 32
    machine.visits.clear()
    machine.costs(lambda costs: {4, 6, 8}, sizes=SIZES)
    assert 6 in {size for _, size in machine.visits}, "between sizes that were timed, too"


def test_the_error_of_a_median_is_about_what_it_varies_by():
    draw = random.Random(2)
    ratios = [Ratio.of([draw.gauss(1, 0.1) for _ in range(25)]) for _ in range(300)]
    spread = (sum((ratio.value - 1) ** 2 for ratio in ratios) / len(ratios)) ** 0.5
    said = sum(ratio.error for ratio in ratios) / len(ratios)
    assert spread == pytest.approx(said, rel=0.25)


def test_errors_lie_on_straight_lines_like_costs():
    costs = Costs({1: 0.01, 3: 0.02, 5: 0.04}, 0.005, {1: 0.0, 3: 0.002, 5: 0.004}, 0.001)
    assert costs.steps_of([1, 2, 3, 4, 5, 6]) == pytest.approx({1: 1.0, 2: 1.5, 3: 2.0, 4: 3.0, 5: 4.0})
    assert costs.relative_error(4, 0) == pytest.approx(0.003 / 0.03)
    assert costs.relative_error(4, 2) == pytest.approx((0.003**2 + 0.002**2) ** 0.5 / 0.04)
    assert Costs({1: 0.01}, 0.0).relative_error(1, 0) == 0
