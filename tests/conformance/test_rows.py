"""The covering array holds all pairs of values that go together, and no row that does not."""

from itertools import combinations

from conformance_rows import AXES, SHARE, at_random, covering, fits, name_of


def pairs_of(rows):
    return {pair for row in rows for pair in combinations(row.items(), 2)}


def test_rows_hold_every_pair_that_some_row_can_hold():
    """Rows at random find pairs that can be: none of theirs is missing."""
    missing = pairs_of(at_random(30, seed=1)) - pairs_of(covering())
    assert not missing
    every = sum(len(one) * len(other) for one, other in combinations(AXES.values(), 2))
    assert 0.9 * every < len(pairs_of(covering())) < every


def test_the_rows_of_the_default_run_hold_every_value_and_half_of_the_pairs():
    usual = covering()[: len(covering()) // SHARE]
    assert {pair for row in usual for pair in row.items()} == {
        (axis, value) for axis, values in AXES.items() for value in values
    }
    assert len(pairs_of(usual)) > 1 / 2 * len(pairs_of(covering()))


def test_no_row_has_values_that_do_not_go_together_and_each_has_a_name_of_its_own():
    rows = covering()
    assert all(fits(row) and [*row] == [*AXES] for row in rows)
    assert len({name_of(row) for row in rows}) == len(rows)
