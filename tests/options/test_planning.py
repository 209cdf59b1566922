"""The planners against every tree there is, against each other and against a plain recursion."""

import math
from functools import cache, partial
from itertools import compress, product

import pytest
import torch
from counting import lines_run

from heavypath.speculative import METHODS, TokenTree
from heavypath.speculative.trees.planning import (
    expected_tokens,
    greedy_tree,
    node_probabilities,
    select_tree,
    sequoia_tree,
)

SIZES = range(1, 8)


@cache
def every_tree(size: int) -> list[TokenTree]:
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


@cache
def paths_of(tree: TokenTree) -> list[tuple[int, ...]]:
    """The child indices that lead to each node."""
    paths = [()]
    for parent, rank in list(zip(tree.parents.tolist(), tree.ranks.tolist(), strict=True))[1:]:
        paths.append((*paths[parent], rank))
    return paths


def yielded(tree: TokenTree, acceptance) -> float:
    """expected_tokens, a path at a time."""
    rows = None if callable(acceptance) else torch.as_tensor(acceptance).tolist()

    def rate(path):
        row = acceptance(path[:-1]) if rows is None else rows[len(path) - 1] if isinstance(rows[0], list) else rows
        return row[path[-1]]

    return sum(math.prod(rate(path[:end]) for end in range(1, len(path) + 1)) for path in paths_of(tree))


def random_rates(*shape: int, seed: int, falling: bool = False, zeros: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.rand(shape, generator=generator, dtype=torch.float64)
    raw = raw * (torch.rand(shape, generator=generator) >= zeros)
    raw = raw / raw.sum(-1, keepdim=True).clamp(min=1e-9) * torch.rand(shape[:-1], generator=generator)[..., None]
    return raw.sort(-1, descending=True).values if falling else raw


@cache
def depth_and_branching(tree: TokenTree) -> tuple[int, int]:
    paths = paths_of(tree)
    return max(map(len, paths)), max((path[-1] + 1 for path in paths[1:]), default=0)


def possible(acceptance, size, max_depth=None, max_branching=None) -> list[TokenTree]:
    """All trees of `size` nodes within the bounds."""
    shape = torch.as_tensor(acceptance).shape
    depth = min(max_depth if max_depth is not None else size, shape[0] if len(shape) == 2 else size)
    branching = min(max_branching or size, shape[-1])
    fits = [(found[0] <= depth and found[1] <= branching) for found in map(depth_and_branching, every_tree(size))]
    return [*compress(every_tree(size), fits)]


def check_best(plan, acceptance, size: int, **bounds) -> None:
    """That `plan` finds a best tree, or says that there is none."""
    trees = possible(acceptance, size, **bounds)
    if not trees:
        with pytest.raises(ValueError, match=rf"at most \d+ nodes fit .* not {size}"):
            plan(acceptance, size, **bounds)
        return
    tree = plan(acceptance, size, **bounds)
    assert tree in in_order(trees)
    assert yielded(tree, acceptance) == pytest.approx(max(yielded(one, acceptance) for one in trees), abs=1e-9)


def in_order(trees) -> set[TokenTree]:
    """As planners return them."""
    return {*map(heavy_path_first, trees)}


@cache
def heavy_path_first(tree: TokenTree) -> TokenTree:
    return tree.reordered("heavy_path")[0]


FALLING = {
    "[child]": random_rates(6, seed=1, falling=True),
    "[child], few": random_rates(2, seed=2, falling=True),
    "[depth, child]": random_rates(3, 4, seed=3, falling=True),
    "[depth, child], deep": random_rates(8, 2, seed=4, falling=True),
    "nothing accepted": torch.zeros(3),
    "ties": torch.full((10,), 0.1),  # whose sum rounding puts above 1
}
RISING = {
    "[child]": random_rates(6, seed=5),
    "[child], the last is best": torch.tensor([0.05, 0.1, 0.7]),
    "[child], the first is worthless": torch.tensor([0.0, 0.9]),
    "[child], zeros": random_rates(5, seed=6, zeros=0.5),
    "[depth, child]": random_rates(3, 4, seed=7),
    "[depth, child], deep": random_rates(8, 3, seed=8, zeros=0.3),
    "[depth, child], one row": random_rates(1, 5, seed=9),
    "[depth, child], better below": torch.tensor([[0.1, 0.6], [0.0, 0.9], [0.9, 0.0]]),
}


def test_expected_tokens_by_hand():
    by_depth = [[0.5, 0.25], [0.4, 0.1]]
    assert expected_tokens(TokenTree.k_ary(2, 2), by_depth) == pytest.approx(1 + 0.75 + 0.75 * 0.5)
    assert node_probabilities(TokenTree.chain(2), by_depth).tolist() == pytest.approx([1, 0.5, 0.2])
    swapped = TokenTree([-1, 0, 0, 1, 1], [0, 1, 0, 0, 1])  # node 1 is the second child
    assert expected_tokens(swapped, lambda path: [[0.5, 0.3], [0.4, 0.2]][len(path)]) == pytest.approx(1.8 + 0.3 * 0.6)


@pytest.mark.parametrize("acceptance", [[0.6, 0.3, 0.05], random_rates(7, 3, seed=0), random_rates(2, 2, seed=0)])
def test_expected_tokens_are_the_sum_over_paths(acceptance):
    rows = torch.as_tensor(acceptance, dtype=torch.float64)
    padded = torch.zeros(8, 8, dtype=torch.float64)
    padded[: len(rows) if rows.dim() == 2 else 8, : rows.shape[-1]] = rows
    for tree in every_tree(7):
        assert expected_tokens(tree, acceptance) == pytest.approx(yielded(tree, padded), abs=1e-12)
        assert expected_tokens(tree, lambda path: padded[len(path)].tolist()) == pytest.approx(yielded(tree, padded))


@pytest.mark.parametrize("max_depth", [None, 0, 1, 2, 3, 6])
def test_planned_trees_are_the_best_of_all_trees(max_depth):
    for acceptance, size in product(FALLING.values(), SIZES):
        check_best(greedy_tree, acceptance, size, max_depth=max_depth)
    for acceptance, size, branching in product((*FALLING.values(), *RISING.values()), SIZES, (None, 1, 2, 3)):
        check_best(sequoia_tree, acceptance, size, max_depth=max_depth, max_branching=branching)


def memoised(acceptance, size: int, max_depth: int) -> float:
    """What the best tree yields, by recursion over its nodes."""
    rows = torch.as_tensor(acceptance).tolist()

    @cache
    def forest(nodes: int, rank: int, depth: int) -> float:
        row = rows[depth] if isinstance(rows[0], list) and depth < len(rows) else rows
        if nodes == 0:
            return 0.0
        if depth == max_depth or rank == len(row):
            return -math.inf
        return max(  # a child alone is always possible
            row[rank] * (1 + below) + forest(nodes - child, rank + 1, depth)
            for child in range(1, nodes + 1)
            if (below := forest(child - 1, 0, depth + 1)) > -math.inf
        )

    return 1 + forest(size - 1, 0, 0)


@pytest.mark.parametrize(("acceptance", "max_depth"), [
    (random_rates(5, seed=10), 30), (random_rates(3, seed=11, zeros=0.3), 5), ([0.02, 0.95, 0.01], 8),
    (random_rates(9, 3, seed=13), 4), (random_rates(5, seed=14, falling=True), 30),
    (random_rates(9, 3, seed=15, falling=True), 9), ([0.9, 0.05], 30),
])  # fmt: skip
def test_large_trees_are_as_good_as_a_plain_recursions(acceptance, max_depth):
    rows = torch.as_tensor(acceptance)
    falls = bool((rows.diff(dim=-1) <= 0).all())
    for plan, size in product((sequoia_tree, greedy_tree) if falls else (sequoia_tree,), (17, 30)):
        tree = plan(acceptance, size, max_depth)
        assert len(tree) == size
        assert tree.depth <= max_depth
        assert yielded(tree, acceptance) == pytest.approx(memoised(acceptance, size, max_depth), abs=1e-9)


def test_of_equally_good_trees_the_shallowest_is_taken():
    assert sequoia_tree([0.5, 0.25], 3) == TokenTree.k_ary(2, 1)
    assert sequoia_tree([0.0, 0.0], 7) == TokenTree.k_ary(2, 2)
    assert sequoia_tree([0.25] * 4, 6) == TokenTree([-1, 0, 1, 0, 0, 0])
    for size, acceptance in product(SIZES, ([0.5, 0.25], [0.5, 0.25, 0.125], [0.25, 0.5])):
        for max_depth in (None, 2, 3, 4):
            trees = possible(acceptance, size, max_depth)
            if trees:
                best = max(yielded(tree, acceptance) for tree in trees)
                least = min(tree.depth for tree in trees if yielded(tree, acceptance) > best - 1e-12)
                assert sequoia_tree(acceptance, size, max_depth).depth == least


@pytest.mark.parametrize("max_depth", [None, 2, 3])
def test_greedy_trees_know_acceptance_that_depends_on_the_path(max_depth):
    for seed, size in product(range(4), (2, 4, 7)):
        rates = cache(lambda path, seed=seed: random_rates(6, seed=hash((seed, path)) % 2**31, falling=True).tolist())
        asked = []

        def acceptance(path, rates=rates, asked=asked):
            asked.append(path)
            return rates(path)

        tree = greedy_tree(acceptance, size, max_depth)
        assert len(asked) == len(set(asked)) < size + (size == 1)
        fitting = [one for one in every_tree(size) if max_depth is None or one.depth <= max_depth]
        assert tree in in_order(fitting)
        assert yielded(tree, rates) == pytest.approx(max(yielded(one, rates) for one in fitting), abs=1e-9)


def by_markov(path):
    """Acceptance that depends on the last child index and the one before."""
    sure = 0.8 if path[-2:] == (0, 0) else 0.5
    return [sure, 0.6 * (1 - sure), 0.3 * (1 - sure)]


def check_fastest(acceptance, draft_cost: float, max_depth: int | None) -> None:
    """That a fastest tree is selected, or it is said that there is none."""
    for verify_cost in ({size: 1 + 0.03 * size for size in SIZES}, {2: 1.1, 5: 1.2, 7: 1.9}, {7: 1, 1: 1.0}):
        shape = torch.zeros(3) if callable(acceptance) else acceptance
        candidates = [
            (yielded(tree, acceptance) / (cost + tree.depth * draft_cost), tree)
            for size, cost in verify_cost.items()
            for tree in possible(shape, size, max_depth)
        ]
        if not candidates:
            with pytest.raises(ValueError, match=rf"at most \d nodes fit .* got sizes \[{min(verify_cost)}, "):
                select_tree(acceptance, verify_cost, draft_cost, max_depth)
            continue
        plan = select_tree(acceptance, verify_cost, draft_cost, max_depth)
        drafting = plan.tree.depth * draft_cost
        assert plan.speedup == pytest.approx(max(speedup for speedup, _ in candidates), abs=1e-9)
        assert plan.tree in in_order(tree for _, tree in candidates)
        assert plan.expected_tokens == pytest.approx(yielded(plan.tree, acceptance))
        assert plan.speedup == pytest.approx(plan.expected_tokens / (verify_cost[len(plan.tree)] + drafting))


@pytest.mark.parametrize("max_depth", [None, 0, 1, 3])
@pytest.mark.parametrize("draft_cost", [0, 0.02, 0.3])
def test_the_selected_tree_is_the_fastest_of_all(draft_cost, max_depth):
    for acceptance in (*FALLING.values(), *RISING.values(), by_markov):
        check_fastest(acceptance, draft_cost, max_depth)


def test_selection_by_hand():
    # Two levels bring 1.75 / (1.2 + 2 * 0.1), one brings 1.5 / (1.1 + 0.1): 1.25 each, and the shallower tree is taken.
    plan = select_tree([0.5], {2: 1.1, 3: 1.2}, draft_cost=0.1)
    assert plan.tree == TokenTree.chain(1)
    assert (plan.expected_tokens, plan.speedup) == pytest.approx((1.5, 1.25))
    assert select_tree([0.5], {2: 1.1, 3: 1.2}, draft_cost=0.09).tree == TokenTree.chain(2)
    # Drafting that costs more than it brings is left out where a tree of one node is allowed.
    assert select_tree([0.5], {1: 1.0, 2: 1.1}, draft_cost=0.5).tree == TokenTree([-1])
    assert select_tree([0.5], {2: 1.1}, draft_cost=0.5).speedup < 1


def test_selection_among_all_sizes_takes_as_many_steps_for_each_of_256_as_of_64():
    for acceptance in ([[0.2, 0.5, 0.05]] * 20, [0.001, 0.98]):
        costs = [{size: 1 + size / 400 for size in range(1, most + 1)} for most in (64, 256)]
        few, many = (lines_run(partial(select_tree, acceptance, each, 0.02)) for each in costs)
        assert many < 4.5 * few
        plan = select_tree(acceptance, {size: 1 + size / 400 for size in range(1, 257)}, 0.02)
        assert plan.speedup > 2
        assert select_tree(acceptance, {len(plan.tree): 1 + len(plan.tree) / 400}, 0.02) == plan


LONG = 0.75 ** torch.arange(32) * 0.249


@pytest.mark.parametrize(("acceptance", "max_depth"), [
    pytest.param(LONG, None, id="falls"),
    pytest.param(LONG.flip(0), 18, id="rises"),
    pytest.param(torch.tensor([0.01, 0.9] + [0.002] * 30), None, id="deep"),
    pytest.param(torch.tensor([0.999, 0.0005]), None, id="deeper"),  # which takes no pass a level
    pytest.param(random_rates(18, 32, seed=0), 18, id="by depth"),
])  # fmt: skip
def test_each_of_768_nodes_takes_as_many_steps_as_each_of_192(acceptance, max_depth):
    """Each step is over the children and nodes at once, as the programme's O(children * size^2) has it."""
    few, many = (lines_run(lambda size=size: sequoia_tree(acceptance, size, max_depth, 32)) for size in (192, 768))
    assert many < 4.5 * few
    tree = sequoia_tree(acceptance, 768, max_depth, 32)
    assert len(tree) == 768
    assert tree.is_depth_first
    assert tree.depth <= (max_depth or 768)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 12, 64, 200])
@pytest.mark.parametrize("acceptance", [[0.7], [0.5, 0.1, 0.1, 0.05]])
def test_the_methods_trees_have_at_most_the_size_asked_for(size, acceptance):
    for name, method in METHODS.items():
        given = {"acceptance": acceptance} if "acceptance" in method.options else {}
        assert 2 <= len(method.tree_of(size, **given)) <= size or name == "autoregressive"


@pytest.mark.parametrize(("call", "message"), [
    (lambda: greedy_tree([0.2, 0.3], 4), "falls with the child index"),
    (lambda: greedy_tree(lambda path: [0.9][len(path) // 3 :], 5), "at most 4 nodes fit this acceptance"),
    (lambda: greedy_tree(lambda path: [0.5, 0.6], 9), r"sum to at most 1, got \[0.5, 0.6\] at path \(\)"),
    (lambda: greedy_tree(lambda path: [0.5, [0.3, -1][len(path)]], 9), r"got \[0.5, -1.0\] at path \(0,\)"),
    (lambda: greedy_tree([1.5], 4), r"acceptance must lie in \[0, 1\]"),
    (lambda: greedy_tree([0.5, 0.2], 8, max_depth=1), "at most 3 nodes fit 2 children and depth 1, not 8"),
    (lambda: sequoia_tree([0.7, 0.6], 4), "rows that sum to at most 1"),
    (lambda: sequoia_tree([[[0.5]]], 4), r"\[child\] or \[depth, child\], not empty, got shape \[1, 1, 1\]"),
    (lambda: sequoia_tree(lambda path: [0.5], 4), "not a function"),
    (lambda: sequoia_tree([[0.2, 0.5]] * 3, 16), "at most 15 nodes fit 2 children and depth 3, not 16"),
    (lambda: sequoia_tree([0.5], 0), "must be at least 1, got 0"),
    (lambda: sequoia_tree([0.5], 2, max_branching=0), "max_branching must be at least 1, got 0"),
    (lambda: select_tree([0.5], {}, 0.1), "at least one tree size"),
    (lambda: select_tree([0.5], {0: 1.0}, 0.1), "an integer >= 1"),
    (lambda: select_tree([0.5], {2: float("nan")}, 0.1), "finite costs above 0"),
    (lambda: select_tree([0.5], {2: 1.0}, -0.1), "draft_cost must be finite and at least 0, got -0.1"),
    (lambda: select_tree([0.5], {2: 1.0}, 0.1, max_depth=-2), "max_depth must be at least 0, got -2"),
    (lambda: select_tree([[0.2, 0.3]], {9: 1.0, 4: 1.0}, 0.1), r"at most 3 nodes fit .* got sizes \[4, 9\]"),
    (lambda: expected_tokens(TokenTree.chain(1), lambda path: [2.0]), "acceptance must lie in"),
])  # fmt: skip
def test_bad_plans_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
