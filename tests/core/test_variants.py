"""Which variants of a test run by default: as many as it has time for, as different from each other as can be."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest


class Variant:
    """What is looked at of one: its name, its values, and its marks."""

    def __init__(self, name, marks=(), **values):
        self.nodeid = f"{name}[{'-'.join(map(str, values.values()))}]"
        self.callspec = SimpleNamespace(params=values)
        self.marks = {mark.name: mark for mark in marks}

    def get_closest_marker(self, name):
        return self.marks.get(name)

    def add_marker(self, name):
        self.marks[name] = name


@pytest.fixture
def conftest(pytestconfig):
    return pytestconfig.pluginmanager.get_plugin(str(Path(__file__).parents[1] / "conftest.py"))


@pytest.fixture
def mark(conftest):
    """The function that marks them: of a test that takes so many times the budget."""

    def marked(variants, times, name="file::test"):
        conftest.mark_variants(variants, {name: times * conftest.BUDGET})

    return marked


def by_default(variants):
    return [variant.callspec.params for variant in variants if "slow" not in variant.marks]


def table(**options):
    return [Variant("file::test", **options, a=a, b=b) for a, b in product(range(3), range(4))]


def test_of_a_long_test_variants_with_all_values_run(mark):
    variants = table()
    mark(variants, 3)
    chosen = by_default(variants)
    assert len(chosen) == 4
    assert {each["b"] for each in chosen} == {*range(4)}
    assert {each["a"] for each in chosen} == {*range(3)}


def test_one_variant_runs_however_long_it_takes(mark):
    variants = table()
    mark(variants, 1000)
    assert len(by_default(variants)) == 1


def test_short_and_new_tests_run_with_all_variants(mark):
    for times, name in ((1, "file::test"), (0.1, "file::test"), (9, "file::another")):
        variants = table()
        mark(variants, times, name)
        assert len(by_default(variants)) == 12


def test_a_mark_gives_a_test_more_time(mark, conftest):
    variants = table(marks=[pytest.mark.budget(3 * conftest.BUDGET)])
    mark(variants, 6)
    assert len(by_default(variants)) == 6


def test_variants_that_are_slow_anyway_are_not_counted(mark):
    variants = [*table(), *table(marks=[pytest.mark.slow])]
    mark(variants, 2)
    assert len(by_default(variants)) == 6
