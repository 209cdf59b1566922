"""Acceptance beyond the counts, and the tokens that trees bring of texts whose ranks are known."""

import math
from itertools import product

import numpy as np
import pytest

from heavypath.speculative import TokenTree, expected_tokens
from heavypath.speculative.trees.counted import falling
from heavypath.speculative.trees.growth import DEFAULT_ACCEPTANCE
from heavypath.speculative.trees.ranks import NONE, UNKNOWN, steps_of
from heavypath.speculative.trees.tails import CHILDREN, of_any_pair, with_tail

TREE = TokenTree([-1, 0, 0, 1, 1, 3])  # of two children, the first of which has two and a grandchild


def test_the_power_law_by_hand():
    power = math.log(0.5 / 0.3) / math.log(3 / 2)
    third, fourth = 0.3 * (3 / 4) ** power, 0.3 * (3 / 5) ** power
    assert with_tail([0.5, 0.2], 4).tolist() == pytest.approx([0.5, 0.2, 0.3 - third, third - fourth])
    assert with_tail([0.1, 0.3, 0.05], 4)[3] == pytest.approx(0.05), "none is above the last that was counted"
    assert with_tail([0.4], 2).tolist() == pytest.approx([0.4, 0.6 - 0.6 ** (math.log(3) / math.log(2))])


def test_there_is_no_tail_where_the_last_children_are_never_accepted():
    assert with_tail([0.5, 0.2, 0.0, 0.0], 6).tolist() == [0.5, 0.2, 0.0, 0.0, 0.0, 0.0]
    assert with_tail([0.6, 0.4], 4).tolist() == [0.6, 0.4, 0.0, 0.0]
    assert with_tail([0.6, 0.2], 1).tolist() == [0.6, 0.2]


def test_what_rises_by_chance_is_pooled():
    assert falling(np.array([0.5, 0.1, 0.3, 0.05])).tolist() == pytest.approx([0.5, 0.2, 0.2, 0.05])
    assert falling(np.array([0.1, 0.2, 0.3])).tolist() == pytest.approx([0.2] * 3)


def test_the_default_acceptance_falls_with_the_child_and_rises_with_the_depth():
    rates = of_any_pair()
    assert rates[0, : len(DEFAULT_ACCEPTANCE)].tolist() == pytest.approx(DEFAULT_ACCEPTANCE)
    assert (np.diff(rates, axis=1) <= 0).all()
    assert (np.diff(rates[:, 0]) > 0).all()
    assert (np.diff(rates.sum(1)) > 0).all()
    assert rates.shape[1] == CHILDREN
    assert 0.9 < rates[0].sum() < rates[-1].sum() < 1


def plainly(tree, text):
    """Where steps begin, and what each brings, one token after the other."""
    child = {(int(p), int(r)): node for node, (p, r) in enumerate(zip(tree.parents, tree.ranks, strict=True)) if node}
    node, steps = 0, []
    for place, rank in enumerate(text):
        if node == 0:
            steps.append([place, 0])
        steps[-1][1] += 1
        node = child.get((node, rank), 0)
    return steps


def test_steps_are_those_that_begin_early_enough():
    generator = np.random.default_rng(0)
    texts = [generator.choice([0, 0, 1, 2, NONE, UNKNOWN], size).tolist() for size in (1, 2, 5, 30, 31)]
    for tree in (TREE, TokenTree.chain(2), TokenTree.k_ary(3, 1), TokenTree([-1])):
        for text, (steps, tokens) in zip(texts, steps_of(tree, texts), strict=True):
            begun = [step for step in plainly(tree, text) if step[0] < max(1, len(text) - tree.depth)]
            assert (steps, tokens) == (len(begun), sum(brought for _, brought in begun))


def test_short_texts_have_no_bias():
    """Over all texts of six tokens, tokens by steps are just what the acceptance promises."""
    shares = {0: 0.5, 1: 0.3, NONE: 0.2}
    texts = [list(text) for text in product(shares, repeat=6)]
    weights = np.array([math.prod(shares[rank] for rank in text) for text in texts])
    steps, tokens = weights @ steps_of(TREE, texts)
    assert tokens / steps == pytest.approx(expected_tokens(TREE, [0.5, 0.3]))
