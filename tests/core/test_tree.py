"""TokenTree: a tree by hand, its orders and mask, and random trees against plain loops."""

from itertools import product
from random import Random

import pytest
import torch
from tree_cases import random_tree, shuffled_ranks, trees

from heavypath.speculative import TokenTree

#      0
#    / | \
#   1  2  5      node 2 has the largest subtree
#     / \
#    3   4
HAND = TokenTree([-1, 0, 0, 2, 2, 0])


def visited(tree: TokenTree, order: str, sizes: list[int]) -> list[int]:
    """The nodes in an order, one at a time."""
    parents, ranks = tree.parents.tolist(), tree.ranks.tolist()
    seen, waiting = [], [0]
    while waiting:
        seen.append(node := waiting.pop(0))
        children = [child for child, parent in enumerate(parents) if parent == node]
        children.sort(key=lambda child: (-sizes[child] if order == "heavy_path" else 0, ranks[child]))
        waiting = waiting + children if order == "breadth_first" else children + waiting
    return seen


def paths(tree: TokenTree) -> list[list[int]]:
    """Each node, its parent, and so on to the root."""
    found = [[0]]
    for node, parent in enumerate(tree.parents.tolist()[1:], 1):
        found.append([node, *found[parent]])
    return found


def test_a_tree_and_its_orders_by_hand():
    assert HAND.depths.tolist() == [0, 1, 1, 2, 2, 1]
    assert HAND.subtree_end.tolist() == [6, 2, 5, 4, 5, 6]
    assert str(HAND) == "6 nodes, depth 2\n0\n├─ 1\n├─ 2\n│  ├─ 3\n│  └─ 4\n└─ 5"
    tree, permutation = HAND.reordered("heavy_path")
    assert permutation.tolist() == [0, 2, 3, 4, 1, 5]
    assert tree.parents.tolist() == [-1, 0, 1, 1, 0, 0]
    assert tree.ranks.tolist() == [0, 1, 0, 1, 0, 2]


def test_constructors():
    assert TokenTree.chain(3).parents.tolist() == [-1, 0, 1, 2]
    assert len(TokenTree.chain(0)) == 1
    assert TokenTree.chain(4000).depth == 4000
    assert TokenTree.independent(2, 2).parents.tolist() == [-1, 0, 1, 0, 3]
    assert TokenTree.k_ary(2, 2).parents.tolist() == [-1, 0, 1, 1, 0, 4, 4]
    assert TokenTree.from_branching([3, 2, 1]).depths.bincount().tolist() == [1, 3, 6, 6]
    assert TokenTree(torch.tensor([-1, 0])) == TokenTree([-1, 0]) == TokenTree(torch.tensor([-1, 0]).numpy())
    assert hash(TokenTree(torch.tensor([-1, 0]))) == hash(TokenTree([-1, 0])) != hash(TokenTree([-1, 0, 0]))
    assert repr(TokenTree(torch.tensor([-1, 0]))) == "TokenTree(parents=[-1, 0], ranks=[0, 0])"


MEDUSA = [[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0], [0, 2], [0, 1, 0]]  # the beginning of mc_sim_7b_63


def test_a_tree_of_paths_by_hand():
    tree = TokenTree.from_paths(MEDUSA)
    assert tree.parents.tolist() == [-1, 0, 0, 0, 1, 1, 1, 2, 4, 5]
    assert tree.ranks.tolist() == [0, 0, 1, 2, 0, 1, 2, 0, 0, 0]
    assert TokenTree.from_paths([]) == TokenTree([-1])
    cartesian = {path[:depth] for depth in (1, 2, 3) for path in product(range(3), range(2), range(2))}
    assert TokenTree.from_paths(cartesian) == TokenTree.from_branching([3, 2, 2]).reordered("breadth_first")[0]


def test_a_tree_is_that_of_the_paths_to_its_nodes_in_any_order():
    parents = random_tree(20, seed=0).parents.tolist()
    tree = TokenTree(parents, shuffled_ranks(parents, seed=0))
    given = [[]]
    for parent, rank in zip(tree.parents.tolist()[1:], tree.ranks.tolist()[1:], strict=True):
        given.append([*given[parent], rank])
    Random(0).shuffle(given)
    assert TokenTree.from_paths(path for path in given if path) == tree.reordered("breadth_first")[0]


@pytest.mark.parametrize(("paths", "message"), [
    ([[0], [1, 0]], r"path \[1, 0\] has no parent: \[1\] is missing"),
    ([[0], [2]], r"path \[2\] is drawn after the one at \[1\], which is missing"),
    ([[0], [0, 0], [0]], r"given once, got \[0\] twice"),
    ([[0], []], r"at least one of them, got \[\]"),
    ([[0], [0, -1]], r"ranks of at least 0, .* got \[0, -1\]"),
    ([[0.5]], "a path must be a flat sequence of integers"),
    ([0, 1], "a path must be a sequence of ranks, got 0"),
])  # fmt: skip
def test_paths_that_are_no_tree_are_refused(paths, message):
    with pytest.raises(ValueError, match=message):
        TokenTree.from_paths(paths)


def test_a_tree_cannot_be_changed_through_its_properties():
    parents, ranks = torch.tensor([-1, 0, 0]), torch.tensor([0, 0, 1])
    tree = TokenTree(parents, ranks)
    for changed in (parents, ranks, tree.parents, tree.ranks, tree.depths, tree.subtree_size, tree.subtree_end):
        changed[1] = 99
    assert tree == TokenTree([-1, 0, 0])
    assert (tree.subtree_end.tolist(), tree.depths.tolist()) == ([3, 2, 3], [0, 1, 1])


@pytest.mark.parametrize("nodes", [1, 2, 3, 17, 150])
def test_trees_and_their_orders_agree_with_a_walk_over_their_nodes(nodes):
    for shape, tree in trees(nodes).items():
        above = paths(tree)
        sizes = [sum(node in path for path in above) for node in range(nodes)]
        assert tree.depths.tolist() == [len(path) - 1 for path in above], shape
        assert tree.depth == max(map(len, above)) - 1
        assert tree.subtree_size.tolist() == sizes
        assert [set(row.nonzero()[:, 0].tolist()) for row in tree.mask()] == list(map(set, above))
        first_stray = next((node for node in range(1, nodes) if above[node][1] not in above[node - 1]), None)
        assert tree.is_depth_first == (first_stray is None)
        if first_stray is None:
            assert tree.subtree_end.tolist() == [node + size for node, size in enumerate(sizes)]
        else:
            with pytest.raises(ValueError, match=f"but node {first_stray} breaks it"):
                _ = tree.subtree_end
        for block in (1, 2, 7, 32, 1000):
            pairs = {(node // block, other // block) for node, path in enumerate(above) for other in path}
            assert tree.occupied_blocks(block) == len(pairs)
        for order in ("breadth_first", "depth_first", "heavy_path"):
            new, permutation = tree.reordered(order)
            walk = visited(tree, order, sizes)
            assert permutation.tolist() == walk, shape
            assert new.parents.tolist() == [-1, *(walk.index(int(tree.parents[node])) for node in walk[1:])]
            assert torch.equal(new.ranks, tree.ranks[permutation])
            assert new.reordered(order)[0] == new


@pytest.mark.parametrize(("nodes", "most"), [(256, 23.5), (1024, 117)])
def test_heavy_path_order_leaves_few_blocks(nodes, most):
    """Blocks of 32 in random recursive trees; DySpec's table 5 has 22.5 and 119.3."""
    blocks = [random_tree(nodes, seed).reordered("heavy_path")[0].occupied_blocks(32) for seed in range(10)]
    assert sum(blocks) / len(blocks) <= most


def test_blocks_are_counted_beyond_64_columns():
    assert TokenTree.chain(199).occupied_blocks(1) == 200 * 201 / 2
    assert TokenTree([-1] + [0] * 199).occupied_blocks(1) == 1 + 2 * 199


def test_truncated_keeps_the_top_levels_and_their_names():
    tree, kept = HAND.truncated(1)
    assert (tree.parents.tolist(), kept.tolist()) == ([-1, 0, 0, 0], [0, 1, 2, 5])
    assert HAND.truncated(9)[0] == HAND
    assert len(HAND.truncated(0)[0]) == 1


@pytest.mark.parametrize(("arguments", "message"), [
    (([],), "must begin with -1"),
    (([-1, 1],), r"parents\[1\] must be in 0 .. 0, got 1"),
    (([-1, 0, -1],), r"parents\[2\] must be in 0 .. 1, got -1"),
    (([-1, 0.5],), "flat sequence of integers"),
    ((torch.zeros(2, 2).long(),), "flat sequence of integers"),
    (([-1, 0, 0], [0, 0]), "ranks must hold 3 values"),
    (([-1, 0, 0], [0, 0, 0]), r"children of node 0 must have ranks 0, 1, 2, ..., got \[0, 0\]"),
    (([-1, 0, 0, 1, 1], [0, 0, 1, 2, -1]), r"children of node 1 must have ranks 0, 1, 2, ..., got \[-1, 2\]"),
    (([-1, 0], [1, 0]), "0 for the root"),
    (([-1, True],), "flat sequence of integers"),
    ((torch.tensor([-1.0, 0.0]),), "flat sequence of integers"),
    (([-1, 2**64],), "integers of 64 bits"),
])  # fmt: skip
def test_what_is_no_tree_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TokenTree(*arguments)


@pytest.mark.parametrize(("request_", "message"), [
    (lambda: TokenTree([-1, 0, 0, 0, 1]).subtree_end, "depth-first order, but node 4"),
    (lambda: HAND.reordered("random"), "order must be 'breadth_first'"),
    (lambda: TokenTree.from_branching([2, 0]), "branching factors must be at least 1"),
    (lambda: TokenTree.chain(-1), "length must be at least 0, got -1"),
    (lambda: TokenTree.k_ary(2, -2), "depth must be at least 0, got -2"),
    (lambda: HAND.truncated(-1), "depth must be at least 0, got -1"),
    (lambda: HAND.occupied_blocks(0), "block_size must be at least 1"),
])  # fmt: skip
def test_bad_requests_are_refused(request_, message):
    with pytest.raises(ValueError, match=message):
        request_()
