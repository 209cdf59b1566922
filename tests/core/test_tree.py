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


def visited(tree: TokenTree, order: str) -> list[int]:
    """The nodes in an order, one at a time."""
    parents, ranks, sizes = tree.parents.tolist(), tree.ranks.tolist(), subtree_sizes(tree)
    children = [[] for _ in parents]
    for node in range(1, len(parents)):
        children[parents[node]].append(node)
    for siblings in children:
        siblings.sort(key=lambda node: (-sizes[node] if order == "heavy_path" else 0, ranks[node]))
    seen, waiting = [], [0]
    while waiting:
        seen.append(node := waiting.pop(0))
        waiting = waiting + children[node] if order == "breadth_first" else children[node] + waiting
    return seen


def subtree_sizes(tree: TokenTree) -> list[int]:
    sizes, parents = [1] * len(tree), tree.parents.tolist()
    for node in range(len(tree) - 1, 0, -1):
        sizes[parents[node]] += sizes[node]
    return sizes


def paths(tree: TokenTree) -> list[list[int]]:
    """Each node, its parent, and so on to the root."""
    parents, found = tree.parents.tolist(), [[0]]
    for node in range(1, len(tree)):
        found.append([node, *found[parents[node]]])
    return found


def test_a_tree_by_hand():
    assert len(HAND) == 6
    assert HAND.parents.tolist() == [-1, 0, 0, 2, 2, 0]
    assert HAND.ranks.tolist() == [0, 0, 1, 0, 1, 2]
    assert HAND.depths.tolist() == [0, 1, 1, 2, 2, 1]
    assert HAND.depth == 2
    assert HAND.is_depth_first
    assert HAND.subtree_end.tolist() == [6, 2, 5, 4, 5, 6]
    assert HAND.mask().int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 0, 1, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 0, 0, 0, 0, 1],
    ]
    assert str(HAND) == "6 nodes, depth 2\n0\n├─ 1\n├─ 2\n│  ├─ 3\n│  └─ 4\n└─ 5"


def test_orders_by_hand():
    tree, permutation = HAND.reordered("heavy_path")
    assert permutation.tolist() == [0, 2, 3, 4, 1, 5]
    assert tree.parents.tolist() == [-1, 0, 1, 1, 0, 0]
    assert tree.ranks.tolist() == [0, 1, 0, 1, 0, 2]
    tree, permutation = HAND.reordered("breadth_first")
    assert permutation.tolist() == [0, 1, 2, 5, 3, 4]
    assert not tree.is_depth_first
    assert tree.reordered("depth_first")[0] == HAND


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


@pytest.mark.parametrize("seed", range(5))
def test_a_tree_is_that_of_the_paths_to_its_nodes_in_any_order(seed):
    parents = random_tree(20, seed).parents.tolist()
    tree = TokenTree(parents, shuffled_ranks(parents, seed))
    paths = [[]]
    for parent, rank in zip(tree.parents.tolist()[1:], tree.ranks.tolist()[1:], strict=True):
        paths.append([*paths[parent], rank])
    given = paths[1:]
    Random(seed).shuffle(given)
    assert TokenTree.from_paths(given) == tree.reordered("breadth_first")[0]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [1, 0]], r"path \[1, 0\] has no parent: \[1\] is missing"),
        ([[0], [0, 0, 0]], r"path \[0, 0, 0\] has no parent: \[0, 0\] is missing"),
        ([[0], [2]], r"path \[2\] is drawn behind that at \[1\], which is missing"),
        ([[0], [0, 0], [0]], r"given once, got \[0\] twice"),
        ([[0], []], r"at least one of them, got \[\]"),
        ([[0], [0, -1]], r"ranks of at least 0, .* got \[0, -1\]"),
        ([[0.5]], "a path must be a flat sequence of integers"),
        ([0, 1], "a path must be a sequence of ranks, got 0"),
    ],
)
def test_paths_that_are_no_tree_are_refused(paths, message):
    with pytest.raises(ValueError, match=message):
        TokenTree.from_paths(paths)


def test_a_tree_cannot_be_changed_through_its_properties():
    parents, ranks = torch.tensor([-1, 0, 0]), torch.tensor([0, 0, 1])
    tree = TokenTree(parents, ranks)
    for changed in (parents, ranks, tree.parents, tree.ranks, tree.depths, tree.subtree_size, tree.subtree_end):
        changed[1] = 99
    tree.reordered("depth_first")[1][1] = 99
    assert tree == TokenTree([-1, 0, 0])
    assert tree.subtree_end.tolist() == [3, 2, 3]
    assert tree.parents.tolist() == [-1, 0, 0]
    assert tree.depths.tolist() == [0, 1, 1]


@pytest.mark.parametrize("nodes", [1, 2, 3, 17, 64, 150])
def test_trees_agree_with_a_walk_over_their_nodes(nodes):
    for shape, tree in trees(nodes).items():
        path = paths(tree)
        assert tree.depths.tolist() == [len(nodes_above) - 1 for nodes_above in path], shape
        assert tree.depth == max(map(len, path)) - 1
        assert tree.subtree_size.tolist() == subtree_sizes(tree)
        assert [set(row.nonzero()[:, 0].tolist()) for row in tree.mask()] == list(map(set, path))
        first_stray = next((node for node in range(1, nodes) if path[node][1] not in path[node - 1]), None)
        assert tree.is_depth_first == (first_stray is None)
        if first_stray is None:
            assert tree.subtree_end.tolist() == [node + size for node, size in enumerate(subtree_sizes(tree))]
        else:
            with pytest.raises(ValueError, match=f"but node {first_stray} breaks it"):
                _ = tree.subtree_end
        for block in (1, 2, 7, 32, 1000):
            pairs = {(node // block, above // block) for node, above_it in enumerate(path) for above in above_it}
            assert tree.occupied_blocks(block) == len(pairs)


@pytest.mark.parametrize("nodes", [1, 2, 3, 17, 64, 150])
@pytest.mark.parametrize("order", ["breadth_first", "depth_first", "heavy_path"])
def test_orders_agree_with_a_walk_over_the_nodes(nodes, order):
    for shape, tree in trees(nodes).items():
        new, permutation = tree.reordered(order)
        walk = visited(tree, order)
        assert permutation.tolist() == walk, shape
        assert new.parents.tolist() == [-1, *(walk.index(int(tree.parents[node])) for node in walk[1:])]
        assert torch.equal(new.ranks, tree.ranks[permutation])
        assert new.reordered(order)[0] == new


@pytest.mark.parametrize("seed", range(10))
def test_random_trees_keep_their_meaning_in_every_order(seed):
    tree = random_tree(40, seed)
    ancestors = [{node} for node in range(40)]
    for node in range(1, 40):
        ancestors[node] |= ancestors[int(tree.parents[node])]
    for order in ("breadth_first", "depth_first", "heavy_path"):
        new, permutation = tree.reordered(order)
        assert sorted(permutation.tolist()) == list(range(40))
        mask = new.mask()
        for i in range(40):
            seen = {int(permutation[j]) for j in mask[i].nonzero()[:, 0]}
            assert seen == ancestors[int(permutation[i])]
        assert torch.equal(new.ranks, tree.ranks[permutation])
        assert torch.equal(new.depths, tree.depths[permutation])
        assert new.is_depth_first or order == "breadth_first"
        for block in (1, 7, 64):
            blocks = {(int(i) // block, int(j) // block) for i, j in mask.nonzero()}
            assert new.occupied_blocks(block) == len(blocks)


def test_heavy_path_order_visits_the_largest_subtree_first():
    tree, _ = random_tree(60, 3).reordered("heavy_path")
    sizes, parents = tree.subtree_size, tree.parents
    for node in range(60):
        children = (parents == node).nonzero()[:, 0]
        assert (sizes[children].diff() <= 0).all()
        if len(children):
            assert children[0] == node + 1


@pytest.mark.parametrize(("nodes", "most"), [(256, 23.5), (512, 54), (1024, 117), (2048, 250)])
def test_heavy_path_order_leaves_few_blocks(nodes, most):
    """Blocks of 32 in random recursive trees; DySpec's table 5 has 22.5, 52.8, 119.3 and 278.7."""
    blocks = [random_tree(nodes, seed).reordered("heavy_path")[0].occupied_blocks(32) for seed in range(10)]
    assert sum(blocks) / len(blocks) <= most


def test_blocks_are_counted_beyond_64_columns():
    assert TokenTree.chain(199).occupied_blocks(1) == 200 * 201 / 2
    assert TokenTree([-1] + [0] * 199).occupied_blocks(1) == 1 + 2 * 199


def test_truncated_keeps_the_top_levels_and_their_names():
    tree, kept = HAND.truncated(1)
    assert tree.parents.tolist() == [-1, 0, 0, 0]
    assert kept.tolist() == [0, 1, 2, 5]
    assert HAND.truncated(9)[0] == HAND
    assert len(HAND.truncated(0)[0]) == 1


@pytest.mark.parametrize(("arguments", "message"), [
    (([],), "must begin with -1"),
    (([0, 0],), "must begin with -1"),
    (([-1, 1],), r"parents\[1\] must be in 0 .. 0, got 1"),
    (([-1, 0, -1],), r"parents\[2\] must be in 0 .. 1, got -1"),
    (([-1, 0.5],), "flat sequence of integers"),
    ((torch.zeros(2, 2).long(),), "flat sequence of integers"),
    (([-1, 0, 0], [0, 0]), "ranks must hold 3 values"),
    (([-1, 0, 0], [0, 0, 0]), r"children of node 0 must have ranks 0, 1, 2, ..., got \[0, 0\]"),
    (([-1, 0, 0], [0, 0, 2]), "children of node 0"),
    (([-1, 0, 0, 1, 1], [0, 0, 1, 2, -1]), r"children of node 1 must have ranks 0, 1, 2, ..., got \[-1, 2\]"),
    (([-1, 0, 0, 1], [0, 0, -1, -1]), r"children of node 0 must have ranks 0, 1, 2, ..., got \[-1, 0\]"),
    (([-1, 0], [1, 0]), "0 for the root"),
    (([-1, True],), "flat sequence of integers"),
    ((torch.tensor([-1.0, 0.0]),), "flat sequence of integers"),
    (([-1, 2**64],), "integers of 64 bits"),
])  # fmt: skip
def test_what_is_no_tree_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TokenTree(*arguments)


def test_bad_requests_are_refused():
    with pytest.raises(ValueError, match="depth-first order, but node 4"):
        _ = TokenTree([-1, 0, 0, 0, 1]).subtree_end
    with pytest.raises(ValueError, match="order must be 'breadth_first'"):
        HAND.reordered("random")
    with pytest.raises(ValueError, match="branching factors must be at least 1"):
        TokenTree.from_branching([2, 0])
    with pytest.raises(ValueError, match="length must be at least 0, got -1"):
        TokenTree.chain(-1)
    with pytest.raises(ValueError, match="depth must be at least 0, got -2"):
        TokenTree.k_ary(2, -2)
    with pytest.raises(ValueError, match="depth must be at least 0, got -1"):
        HAND.truncated(-1)
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        HAND.occupied_blocks(0)
