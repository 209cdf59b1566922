"""Bounds on trees against every tree, races against their direct formula and against simulated arrivals."""

import math
from itertools import product

import pytest
import torch
from bench_scripts import script
from hypothesis import example, given, settings
from hypothesis import strategies as st
from statistical import SIGNIFICANCE, chi_square_p_value

from heavypath.speculative.trees.planning import expected_tokens, greedy_tree
from heavypath.speculative.trees.tree import TokenTree

bounds, races = script("bounds"), script("races")
TARGET = torch.tensor([0.05, 0.5, 0.15, 0.3], dtype=torch.float64)
DRAFT = torch.tensor([0.4, 0.25, 0.3, 0.05], dtype=torch.float64)
RANDOMISED = settings(deadline=None, derandomize=True, database=None, max_examples=50)

weights = st.floats(1e-6, 1)
acceptances = st.lists(weights, min_size=2, max_size=9).map(
    lambda each: [share / sum(each) for share in sorted(each[1:], reverse=True)]  # each[0] is left to "no child"
)


@st.composite
def pairs_of_laws(draw):
    """Half of them without zeros and without very small probabilities."""
    size = draw(st.integers(1, 7))
    entries = st.one_of(st.just(0.0), st.floats(1e-9, 1)) if draw(st.booleans()) else st.floats(1e-4, 1)
    laws = [
        torch.tensor(draw(st.lists(entries, min_size=size, max_size=size).filter(any)), dtype=torch.float64)
        for _ in range(2)
    ]
    return [law / law.sum() for law in laws]


ALL_OF_FIVE = [TokenTree([-1, *parents]) for parents in product(*(range(node) for node in range(1, 5)))]


def test_bounds_by_hand():
    for depth, nodes in ((1, 1), (2, 3), (3, 7), (10, 1023)):  # full binary trees of even odds meet theirs
        assert expected_tokens(TokenTree.k_ary(2, depth - 1), [0.5, 0.5]) == depth
        assert bounds.tree_bounds([0.5, 0.5], nodes).leaves == pytest.approx(depth)
    # X is always log 2, so c = log 2, and the renewal bound at n = 7 is (log(6 log 2 + 1) + log 2) / log 2.
    assert bounds.tree_bounds([0.5, 0.5], 7).renewal == pytest.approx(math.log2(6 * math.log(2) + 1) + 1)
    assert bounds.tree_bounds([0.5, 0.5], 1).renewal == pytest.approx(1)
    assert bounds.tree_bounds([0.9, 0.1], 1).renewal == math.inf  # n H < c
    assert bounds.tree_bounds([1.0], 9).least == 9  # a chain that is always accepted
    assert bounds.tree_bounds([0.3, 0.2], 10**9).least == pytest.approx(2)  # 1 + 0.5 + 0.25 + ...
    assert bounds.tree_bounds([0.0], 5).least == 1


def test_the_merged_bound_by_hand():
    # The best tree of 3 nodes is a chain of first children: I = 1 and r = 0.5, so that H_I is log 2.
    parts = range(1, 2000)
    by_hand = min(math.log(3 * parts + 1) / (math.log(2) + 0.5 * math.log(parts)) for parts in parts)
    assert bounds.tree_bounds([0.5, 0.2, 0.2, 0.1], 3).merged == pytest.approx(by_hand, rel=1e-3)
    # With few nodes and many children it says more than the bound that tells all children apart.
    found = bounds.tree_bounds([0.5, *[0.0025] * 200], 64)
    assert found.merged < found.leaves
    assert bounds.tree_bounds([0.5, 0.5], 10**9).merged < math.inf


@RANDOMISED
@given(acceptances, st.integers(1, 100))
@example([1 / 7] * 7, 57)
@example([0.999, 0.0005], 300)
def test_no_tree_exceeds_a_bound(acceptance, size):
    """The best of so many nodes, and all of five."""
    limits = bounds.tree_bounds(acceptance, size)
    best = expected_tokens(greedy_tree(acceptance, size), acceptance)
    assert all(best <= limit + 1e-9 for limit in limits)
    assert limits.least == min(limits) <= size
    limit = min(bounds.tree_bounds(acceptance, 5))
    assert max(expected_tokens(tree, acceptance) for tree in ALL_OF_FIVE) <= limit + 1e-9


def test_the_best_tree_grows_by_one_over_the_entropy_for_each_doubling_and_stays_near_the_bound():
    acceptance, sizes = [0.6 * 0.4**child for child in range(40)], [2**power for power in range(5, 13)]
    best = [expected_tokens(greedy_tree(acceptance, size), acceptance) for size in sizes]
    slope, entropy = (best[-1] - best[0]) / (len(sizes) - 1), -sum(each * math.log2(each) for each in acceptance)
    assert slope == pytest.approx(1 / entropy, rel=0.02)
    limits = [bounds.tree_bounds(acceptance, size) for size in sizes]
    gaps = [min(limit.leaves, limit.renewal) - tokens for limit, tokens in zip(limits, best, strict=True)]
    assert max(gaps) < 1
    assert abs(gaps[-1] - gaps[0]) < 0.1  # these bounds are off by a constant, not by a factor


def test_races_and_their_bounds_by_hand():
    # Token 0 is first in both where E(0) is the smallest of three.
    target, draft = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.5, 0.0, 0.5])
    assert float(races.overlap(target, draft)) == pytest.approx(1 / 2)
    assert float(races.race_acceptance(target, draft)) == pytest.approx(1 / 3)
    assert float(races.matching(target, draft)) == pytest.approx(1 / 4)
    far, near = torch.tensor([0.95, 0.05]), torch.tensor([0.05, 0.95])
    assert float(races.race_acceptance(far, near)) == pytest.approx(0.1)
    assert float(races.matching(far, near)) == pytest.approx(0.095)
    # What the draft never draws never arrives.
    target, draft = torch.tensor([0.25, 0.75]), torch.tensor([1.0, 0.0])
    assert races.race_index_beyond(target, draft, torch.tensor([1, 50])).tolist() == pytest.approx([0.75, 0.75])
    assert all(float(bits) == math.inf for bits in races.entropy_bounds(target, draft))
    assert [float(bits) for bits in races.entropy_bounds(target, target)] == pytest.approx([0, 3])


@RANDOMISED
@given(pairs_of_laws())
def test_a_race_is_the_double_sum_and_it_and_the_entropy_of_its_index_lie_between_their_bounds(laws):
    target, draft = laws
    direct = 0.0
    for p, q in zip(target.tolist(), draft.tolist(), strict=True):
        if p > 0 and q > 0:
            direct += 1 / sum(max(p2 / p, q2 / q) for p2, q2 in zip(target.tolist(), draft.tolist(), strict=True))
    exact, overlap = float(races.race_acceptance(target, draft)), float(races.overlap(target, draft))
    assert exact == pytest.approx(direct, abs=1e-9)
    assert float(races.matching(target, draft)) <= exact + 1e-9
    assert exact <= overlap + 1e-9
    assert float(races.race_index_beyond(target, draft, torch.ones(1))) == pytest.approx(1 - exact, abs=1e-9)
    assert len(target) != 2 or exact == pytest.approx(overlap, abs=1e-9)
    if min(*target, *draft) > 1e-5:
        entropy = float(races.race_index_entropy(target, draft))
        lower, upper = (float(bits) for bits in races.entropy_bounds(target, draft))
        assert lower - 1e-6 <= entropy <= upper + 1e-4
        assert lower == pytest.approx(float((target * (target / draft).log2()).sum()), abs=1e-9)


@pytest.mark.slow
def test_arrivals_drawn_one_by_one_follow_the_law_of_the_index():
    """A Poisson process of marks from the draft: the target's token is the mark of least time / w."""
    generator = torch.Generator().manual_seed(1)
    draws, arrivals = 20_000, 220  # none of them takes so many: w is at most 6, and the least time / w exponential
    times = torch.rand(draws, arrivals, generator=generator, dtype=torch.float64).log().neg().cumsum(1)
    marks = torch.multinomial(DRAFT, draws * arrivals, replacement=True, generator=generator).view(draws, arrivals)
    index = (times / (TARGET / DRAFT)[marks]).argmin(1)
    counts = index.clamp(max=30).bincount(minlength=31)
    beyond = races.race_index_beyond(TARGET, DRAFT, torch.arange(31).double())
    law = torch.cat([beyond, torch.zeros(1)]).diff().neg()
    assert chi_square_p_value(counts, law) > SIGNIFICANCE
    assert chi_square_p_value(marks.gather(1, index[:, None]).flatten().bincount(minlength=4), TARGET) > SIGNIFICANCE


@pytest.mark.parametrize(("call", "message"), [
    (lambda: bounds.tree_bounds([0.5], 0), "size"),
    (lambda: bounds.tree_bounds([0.5, 0.6], 3), "sum to at most 1"),
    (lambda: bounds.tree_bounds([-0.1], 3), "acceptance"),
])  # fmt: skip
def test_what_is_no_law_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
