"""What a model is given of a tree: by hand, and the kernels against their references on random trees."""

from functools import partial

import pytest
import torch
from devices import DEVICE, moved
from kernel_cases import NATIVE

from heavypath.kernels.step_kernels import StepKernels
from heavypath.kernels.trees.levels import CommonNodes, Drawn, Scored, Trees, place

on_device = partial(moved, device=DEVICE)
EACH = pytest.mark.parametrize("impl", ["torch", "triton", NATIVE])


def copied(part):
    """A copy whose tensors may change."""
    return type(part)(*(field if field is None else field.clone() for field in part))


def chosen(nodes, parents, depths):
    return CommonNodes(*map(torch.tensor, (nodes, parents, depths)))


@EACH
def test_a_level_and_a_tree_by_hand(impl):
    """Node 1 and node 3 are the root's children, node 2 that of node 1. The second text has room for one level."""
    tokens = torch.full((2, 4), 99)
    noise = torch.tensor([[100, 101, 102, 103], [200, 201, 202, 203]])
    trees = on_device(Trees(tokens, torch.tensor([4, 5]), noise, torch.tensor([10, 20]), torch.tensor([9, 2]), None))
    drawn = Drawn(torch.tensor([[7, 8], [-1, 9]]), torch.tensor([1, 3]), torch.tensor([1, 0]))
    fed = place(trees, on_device(drawn), on_device(chosen([1], [0], [1])), impl=impl)
    assert trees.tokens.tolist() == [[4, 8, 99, 7], [5, 9, 99, -1]]
    assert [field.tolist() for field in fed] == [[[8], [9]], [[11], [21]], [[11], [21]], [[10], [20]], [[101], [201]]]
    drawn = Drawn(torch.tensor([[1, 2], [1, 3]]), torch.tensor([2]), torch.tensor([1]))
    every = chosen([0, 1, 2, 3], [-1, 0, 1, 0], [0, 1, 2, 1])
    fed = place(trees, on_device(drawn), on_device(every), whole=True, impl=impl)
    assert trees.tokens.tolist() == [[4, 8, 2, 7], [5, 9, -1, -1]]
    assert fed.tokens.tolist() == [[4, 8, 2, 7], [5, 9, 0, 0]]
    assert fed.positions.tolist() == [[10, 11, 12, 11], [20, 21, 22, 21]]
    assert fed.cache_rows.tolist() == [[10, 11, 12, 13], [20, 21, 22, 23]]
    assert fed.noise_rows.tolist() == noise.tolist()


@EACH
def test_the_numbers_of_trees_and_draws_may_lie_apart_in_memory(impl):
    def apart(rows):
        return torch.stack([rows, -rows], -1)[..., 0]

    numbers = torch.tensor([[4, 5], [10, 20], [9, 2]])  # roots, lengths, left
    drawn = torch.tensor([[7, 8], [-1, 9]]), torch.tensor([1, 3]), torch.tensor([1, 0])
    nodes = torch.tensor([[0, 1, 2, 3], [-1, 0, 1, 0], [0, 1, 2, 1]])
    found = []
    for lay in (torch.clone, apart):
        room = on_device(torch.full((2, 9), 6))
        root, lengths, left = map(lay, numbers)
        trees = on_device(Trees(room[:, :4], root, lay(torch.arange(8).view(2, 4)), lengths, left, None))
        fed = place(
            trees, on_device(Drawn(*map(lay, drawn))), on_device(CommonNodes(*map(lay, nodes))), whole=True, impl=impl
        )
        found.append([field.tolist() for field in (*fed, room)])
    assert found[0] == found[1]
    assert found[0][-1] == [[4, 8, 6, 7, *[6] * 5], [5, 9, -1, -1, *[6] * 5]]


@pytest.mark.parametrize("impl", ["triton", NATIVE])
def test_rows_with_gaps_between_their_numbers_are_not_written_to(impl):
    one, gaps = torch.ones(1, dtype=torch.long), torch.zeros(1, 3, 2, dtype=torch.long)[..., 0]
    trees = Trees(gaps, one, torch.zeros(1, 3, dtype=torch.long), one, 9 * one, None)
    given = on_device(chosen([1], [0], [1]))
    with pytest.raises(ValueError, match=r"changes trees.tokens with a last stride of 1, got strides \[6, 2\]"):
        place(on_device(trees), None, given, impl=impl)
    scored = Scored(torch.zeros(1, 1, 4), torch.zeros(1, 3, 4, 2)[..., 0], 0 * one)
    drawn = Drawn(one[None], one, 0 * one, scored)
    trees = trees._replace(tokens=gaps.clone())
    with pytest.raises(ValueError, match=r"changes of_trees with a last stride of 1, got strides \[24, 8, 2\]"):
        place(on_device(trees), on_device(drawn), given, impl=impl)


@EACH
@pytest.mark.parametrize(("vocab", "dtype"), [(1, torch.float32), (2049, torch.bfloat16)])
def test_logits_that_tokens_were_drawn_from_are_stored_in_their_rows_and_nowhere_else(vocab, dtype, impl):
    """Of two sequences, each with two nodes of four; all other rows keep what they have. Logits may be a view."""
    of_trees = torch.full((2, 4, vocab), 9.0, dtype=dtype, device=DEVICE)
    logits = torch.randn(2, 5, vocab, generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE)[:, 1:4:2]
    one = torch.ones(2, dtype=torch.long)
    trees = on_device(Trees(torch.zeros(2, 4, dtype=torch.long), one, torch.zeros(2, 4).long(), one, 9 * one, None))
    drawn = on_device(Drawn(torch.tensor([[7], [8]]), torch.tensor([2]), torch.tensor([0])))
    scored = Scored(logits, of_trees, torch.tensor([3, 1], device=DEVICE))
    place(trees, drawn._replace(scored=scored), on_device(chosen([2], [0], [1])), impl=impl)
    assert torch.equal(of_trees[:, [3, 1]], logits)
    assert (of_trees[:, [0, 2]] == 9).all()
    assert trees.tokens.tolist() == [[1, 0, 7, 0], [1, 0, 8, 0]]
    shared = logits[:, :1].expand(-1, 2, -1)  # of a draft whose distributions depend on the depth alone
    drawn = drawn._replace(scored=scored._replace(logits=shared))
    place(trees, drawn, on_device(chosen([2], [0], [1])), impl=impl)
    assert torch.equal(of_trees[:, [3, 1]], shared)


@EACH
def test_nodes_of_one_text_are_told_by_the_first_of_them(impl):
    """Nodes 1, 2 and 3 have tokens 6, 6 and 7, and a child each: 8, 8 and 8. So the first two texts are equal."""
    tokens = torch.tensor([[0, 6, 6, 7, 8, 8, 8]])
    trees = on_device(Trees(tokens, tokens[:, 0], tokens, tokens[0, :1], tokens[0, :1], torch.zeros_like(tokens)))
    first = StepKernels(impl).alike(trees, on_device(chosen([1, 2, 3], [0, 0, 0], [1, 1, 1])))
    assert first.tolist() == [[0, 0, 2]]
    first = StepKernels(impl).alike(trees, on_device(chosen([4, 5, 6], [1, 2, 3], [2, 2, 2])))
    assert first.tolist() == [[0, 0, 2]]
    assert trees.texts.tolist() == [[0, 1, 1, 3, 4, 4, 6]]


@pytest.mark.parametrize("impl", ["triton", NATIVE])
@pytest.mark.parametrize("case", range(6))
def test_nodes_are_placed_and_fed_as_by_the_references(case, impl):
    generator = torch.Generator().manual_seed(case)

    def random(most, *shape):
        return torch.randint(most, shape, generator=generator)

    batch, nodes, children, draws, count = 1 + case % 3, *((300, 150, 200, 140) if case % 2 else (12, 4, 9, 5))
    tokens = random(4, batch, nodes) - 1
    trees = Trees(
        tokens, random(4, batch), random(1 << 40, batch, nodes), random(50, batch), random(5, batch), 0 * tokens
    )
    order = torch.randperm(nodes - 1, generator=generator) + 1
    drawn = Drawn(random(9, batch, draws) - 1, order[:children], random(draws, children))
    level, every = order[:count], torch.arange(nodes)
    given = [CommonNodes(level, 0 * level, 1 + 0 * level), CommonNodes(every, every - 1, random(6, nodes))]
    mine, theirs = on_device(copied(trees)), copied(trees)
    for whole, new in ((False, drawn), (True, drawn), (True, None)):
        found = place(mine, on_device(new), on_device(given[whole]), whole=whole, impl=impl)
        expected = place(theirs, new, given[whole], whole=whole, impl="torch")
        for name, one, other in zip(found._fields, found, expected, strict=True):
            assert torch.equal(one.cpu(), other), name
        assert torch.equal(mine.tokens.cpu(), theirs.tokens)
    found, expected = StepKernels(impl).alike(mine, on_device(given[0])), StepKernels("torch").alike(theirs, given[0])
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(mine.texts.cpu(), theirs.texts)
    found = StepKernels(impl).first_nodes(*[trees.left.to(DEVICE)] * 3, nodes)
    for one, other in zip(found, StepKernels("torch").first_nodes(*[trees.left] * 3, nodes), strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("case", [0, 1])
def test_nodes_are_placed_in_any_schedule(case, adversary):
    test_nodes_are_placed_and_fed_as_by_the_references(2 * adversary.seed + case, "triton")
    test_logits_that_tokens_were_drawn_from_are_stored_in_their_rows_and_nowhere_else(2049, torch.float32, "triton")
    adversary.met("_first_kernel", "_place_kernel", "_alike_kernel")
