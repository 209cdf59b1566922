"""expected_tokens by hand, and greedy_tree against every tree there is."""

import pytest
import torch

from heavypath.speculative import METHODS, TokenTree, expected_tokens, greedy_tree


def every_tree(size: int):
    """All ordered trees of `size` nodes."""

    def grow(parents):
        if len(parents) == size:
            yield parents
            return
        # In preorder the next node hangs below the last one or one of its ancestors.
        node = len(parents) - 1
        while node >= 0:
            yield from grow([*parents, node])
            node = parents[node]

    return [TokenTree(parents) for parents in grow([-1])]


def test_expected_tokens_by_hand():
    acceptance = [0.5, 0.25]
    assert expected_tokens(TokenTree([-1]), acceptance) == 1
    assert expected_tokens(TokenTree.chain(2), acceptance) == pytest.approx(1 + 0.5 + 0.25)
    assert expected_tokens(TokenTree.k_ary(2, 2), acceptance) == pytest.approx(1 + 0.75 + 0.75**2)
    assert expected_tokens(TokenTree.k_ary(3, 1), acceptance) == pytest.approx(1.75)  # the third child counts 0
    by_depth = [[0.5, 0.25], [0.4, 0.1]]
    assert expected_tokens(TokenTree.k_ary(2, 2), by_depth) == pytest.approx(1 + 0.75 + 0.75 * 0.5)
    assert expected_tokens(TokenTree.chain(3), by_depth) == pytest.approx(1 + 0.5 + 0.2)


def test_there_are_as_many_ordered_trees_as_catalan_numbers():
    assert [len(every_tree(size)) for size in range(1, 8)] == [1, 1, 2, 5, 14, 42, 132]


@pytest.mark.parametrize("max_depth", [None, 1, 2, 3])
@pytest.mark.parametrize("size", range(1, 8))
def test_greedy_trees_are_the_best_of_all_trees(size, max_depth):
    generator = torch.Generator().manual_seed(size)
    for _ in range(5):
        raw = torch.rand(6, generator=generator, dtype=torch.float64).sort(descending=True).values
        acceptance = raw / raw.sum() * torch.rand(1, generator=generator, dtype=torch.float64)
        best = max(
            expected_tokens(tree, acceptance)
            for tree in every_tree(size)
            if max_depth is None or tree.depth <= max_depth
        )
        tree = greedy_tree(acceptance, size, max_depth)
        assert len(tree) == size
        assert max_depth is None or tree.depth <= max_depth
        assert expected_tokens(tree, acceptance) == pytest.approx(best, abs=1e-9)


def test_greedy_trees_know_acceptance_that_changes_with_depth():
    acceptance = torch.tensor([[0.6, 0.3], [0.2, 0.1], [0.9, 0.05]], dtype=torch.float64)
    for size in range(1, 8):
        candidates = [tree for tree in every_tree(size) if tree.depth <= 3 and int(tree.ranks.max()) < 2]
        best = max(expected_tokens(tree, acceptance) for tree in candidates)
        assert expected_tokens(greedy_tree(acceptance, size), acceptance) == pytest.approx(best, abs=1e-9)


def test_rounded_acceptance_is_taken():
    assert len(greedy_tree(torch.full((10,), 0.1), 5)) == 5


@pytest.mark.parametrize("size", [2, 3, 4, 7, 12, 64])
@pytest.mark.parametrize("acceptance", [[0.7], [0.5, 0.2], [0.5, 0.1, 0.1, 0.05]])
def test_the_methods_trees_have_at_most_the_size_asked_for(size, acceptance):
    for name, method in METHODS.items():
        assert 2 <= len(method.shape(size, acceptance)) <= size or name == "autoregressive"


def test_the_planned_tree_is_in_heavy_path_order():
    tree = greedy_tree([0.6, 0.2, 0.1], 40)
    assert tree.is_depth_first
    assert tree.reordered("heavy_path")[0] == tree


@pytest.mark.parametrize(("call", "message"), [
    (lambda: greedy_tree([0.2, 0.3], 4), "falls with the child index"),
    (lambda: greedy_tree([0.7, 0.6], 4), "rows that sum to at most 1"),
    (lambda: greedy_tree([1.5], 4), r"acceptance must lie in \[0, 1\]"),
    (lambda: greedy_tree([], 4), "not empty"),
    (lambda: greedy_tree([0.5, 0.2], 8, max_depth=1), "at most 3 nodes fit 2 children and depth 1, not 8"),
    (lambda: greedy_tree([[0.5, 0.2]], 8), "at most 3 nodes fit"),
    (lambda: greedy_tree([0.5], 0), "must be at least 1, got 0"),
    (lambda: expected_tokens(TokenTree.chain(1), [float("nan")]), "acceptance must lie in"),
])  # fmt: skip
def test_bad_plans_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
