"""RSD-C's trees, one number of children for each level: the best of all vectors, found by building every tree."""

import math
from itertools import product

import pytest
import torch
from tiny_models import tiny_llama

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.methods import DEFAULT_ACCEPTANCE
from heavypath.speculative.tree_choice import best_plan
from heavypath.speculative.trees.branching import branching_tree, select_branching
from heavypath.speculative.trees.planning import expected_tokens
from heavypath.speculative.trees.tree import TokenTree

BY_DEPTH = [[0.6, 0.2, 0.1], [0.5, 0.3, 0.1], [0.4, 0.1, 0.3]]


def every_tree(children, depth, size):
    """The tree of each vector that does not rise, by the definition of both."""
    for levels in range(1, depth + 1):
        for vector in product(range(1, children + 1), repeat=levels):
            nodes = 1 + sum(math.prod(vector[:level]) for level in range(1, levels + 1))
            if list(vector) == sorted(vector, reverse=True) and nodes <= size:
                yield TokenTree.from_branching(vector)


@pytest.mark.parametrize("acceptance", [[0.5, 0.3, 0.1], [0.9, 0.05], [0.2, 0.2, 0.2, 0.2], BY_DEPTH])
def test_the_best_vectors_tree_is_found(acceptance):
    depth = 3 if acceptance is BY_DEPTH else 4
    for size in (2, 3, 5, 8, 14, 40):
        tree = branching_tree(acceptance, size, 4)
        best = max(expected_tokens(each, acceptance) for each in every_tree(len(acceptance[0:4]), depth, size))
        assert len(tree) <= size
        assert expected_tokens(tree, acceptance) == pytest.approx(best)
    # Of equally good trees the one of fewest nodes is taken: a chain of two, where second children are never accepted.
    assert len(branching_tree([0.5, 0.0, 0.0], 9, 2)) == 3


@pytest.mark.parametrize("level", [0.0, 0.05, 0.3])
def test_the_fastest_tree_by_costs_is_found(level):
    costs = {nodes: 1 + 0.04 * (nodes - 1) for nodes in range(1, 20)}
    plan = select_branching(BY_DEPTH, costs, level)
    best = max(expected_tokens(tree, BY_DEPTH) / (costs[len(tree)] + tree.depth * level)
               for tree in every_tree(3, 3, 19))  # fmt: skip
    assert plan.speedup == pytest.approx(best)
    assert plan.expected_tokens == pytest.approx(expected_tokens(plan.tree, BY_DEPTH))
    assert best_plan("rsd-c", torch.tensor(BY_DEPTH, dtype=torch.float64), costs, level, None) == plan
    alone = select_branching([0.1], {1: 1.0, 2: 1.2}, 0.1)  # where no tree pays
    assert (len(alone.tree), alone.speedup, alone.expected_tokens) == (1, 1.0, 1.0)


def test_rsd_c_takes_a_vector_a_width_or_plans():
    pair = tiny_llama(1), tiny_llama(2)

    def tree_of(**options):
        return SpeculativeDecoder(*pair, "rsd-c", **options).tree

    assert tree_of(branching=[3, 1, 1]) == TokenTree.from_branching([3, 1, 1]).reordered("heavy_path")[0]
    assert tree_of(tree_size=7, width=2) == TokenTree.k_ary(2, 2)
    assert tree_of(tree_size=7, width=2, max_depth=1) == TokenTree.k_ary(2, 1)
    assert tree_of(tree_size=12) == branching_tree(DEFAULT_ACCEPTANCE, 12, 3)
    assert tree_of(tree_size=12, acceptance=[0.9], max_depth=5) == TokenTree.chain(5)


@pytest.mark.parametrize(("method", "options", "message"), [
    ("rsd-c", {"branching": [2, 2], "tree_size": 9}, "branching says all of the tree's shape; leave out tree_size"),
    ("rsd-c", {"branching": [2, 2], "width": 3, "max_depth": 1}, "leave out max_depth, width"),
    ("rsd-c", {"branching": [2, 0]}, r"branching factors must be at least 1, got \[2, 0\]"),
    ("rsd-c", {"width": 2, "acceptance": [0.5]}, "with acceptance the number of children is planned"),
    ("rsd-c", {"tree_size": 5, "max_depth": 0}, "max_depth 0"),
    ("sequoia", {"branching": [2, 2]}, "method 'sequoia' has no option 'branching'"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(method, options, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder(tiny_llama(1), tiny_llama(2), method, **options)


@pytest.mark.parametrize("method", ["sequoia", "dyspec", "top-k"])
def test_more_levels_than_nodes_are_as_many_as_there_are(method):
    trees = [SpeculativeDecoder(tiny_llama(1), tiny_llama(2), method, tree_size=5, max_depth=most).tree
             for most in (4, 1_000_000)]  # fmt: skip
    assert trees[0] == trees[1]
