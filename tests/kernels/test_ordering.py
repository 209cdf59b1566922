"""heavy_path_order: by hand, and PyTorch and kernel against TokenTree.reordered("heavy_path")."""

import pytest
import torch
from devices import DEVICE
from kernel_cases import captured, parents_of

from heavypath.kernels import ordering
from heavypath.kernels.ordering import Ordering, heavy_path_order
from heavypath.speculative import TokenTree

SHAPES = ("random", "young", "chain", "star", "binary")
IMPLS = pytest.mark.parametrize("impl", ["torch", "triton"])


def order(parents, ranks=None, impl="auto"):
    """heavy_path_order on the device that there is; what comes back is on the CPU."""
    given = [None if values is None else torch.as_tensor(values).to(DEVICE) for values in (parents, ranks)]
    return Ordering(*(field.cpu() for field in heavy_path_order(*given, impl=impl)))


def on_host(parents, ranks=None):
    """What the host says."""
    tree, permutation = TokenTree(parents, ranks).reordered("heavy_path")
    return Ordering(permutation, tree.parents, tree.ranks, tree.subtree_end)


def assert_same(got, expected):
    for name, value, wanted in zip(Ordering._fields, got, expected, strict=True):
        assert value.dtype == torch.long
        assert value.tolist() == wanted.tolist(), name


def shuffled_ranks(parents):
    """Random draw orders."""
    ranks = torch.zeros_like(parents)
    for parent in parents.unique():
        children = (parents == parent).nonzero()[:, 0]
        ranks[children] = torch.randperm(len(children))
    return ranks


def with_absent_leaves(parents, share):
    leaves = torch.ones_like(parents).scatter(1, parents.clamp(min=0), 0).bool()
    return parents.where(~leaves | (torch.rand(parents.shape) >= share), -1)


@IMPLS
def test_absent_nodes_come_last_and_stand_alone(impl):
    #   0         1 and 4 are absent
    #  / \
    # 2   3
    #     |
    #     5
    got = order([-1, -1, 0, 0, -1, 3], [0, 7, 0, 1, 7, 0], impl)
    assert got.permutation.tolist() == [0, 3, 5, 2, 1, 4]
    assert got.parents.tolist() == [-1, 0, 1, 0, -1, -1]
    assert got.ranks.tolist() == [0, 1, 0, 0, 0, 0]
    assert got.subtree_end.tolist() == [4, 3, 3, 4, 5, 6]
    assert order([-1, -1, -1], impl=impl).subtree_end.tolist() == [1, 2, 3]


MANY = ordering.MAX_NODES


@pytest.mark.parametrize(("impl", "shape", "sizes"), [
    *(("torch", shape, (1, 2, 3, 31, 32, 33, 64, 300)) for shape in SHAPES), ("torch", "random", (MANY,)),
    *(("triton", shape, (1, 33)) for shape in SHAPES), ("triton", "random", (32, 300)),
    pytest.param("triton", "random", (MANY,), marks=pytest.mark.slow),
])  # fmt: skip
def test_it_is_what_the_host_does(shape, impl, sizes):
    for nodes in sizes:
        parents = parents_of(shape, nodes)
        ranks = shuffled_ranks(parents)
        assert_same(order(parents, ranks, impl), on_host(parents, ranks))
        if nodes < 300:
            assert_same(order(parents, impl=impl), on_host(parents))


@IMPLS
def test_a_ragged_batch_is_ordered_as_its_trees_alone(impl):
    parents = with_absent_leaves(torch.stack([parents_of("young", 40) for _ in range(4)]), 0.5)
    together = order(parents.T.contiguous().T, impl=impl)  # other strides
    assert order(parents[:0], impl=impl).subtree_end.shape == (0, 40)
    for row in range(4):
        kept = ((parents[row] >= 0) | (torch.arange(40) == 0)).nonzero()[:, 0]
        new = torch.full((40,), -1).scatter(0, kept, torch.arange(len(kept)))
        alone = on_host(torch.cat([parents[row, :1], new[parents[row, kept[1:]]]]))
        present = [field[row, : len(kept)] for field in together]
        assert_same(present, alone._replace(permutation=kept[alone.permutation]))
        absent = [node for node in range(40) if node not in kept.tolist()]
        assert together.permutation[row, len(kept) :].tolist() == absent
        assert together.parents[row, len(kept) :].eq(-1).all()
        assert together.subtree_end[row, len(kept) :].tolist() == list(range(len(kept) + 1, 41))


def test_what_is_no_tree_is_ordered_all_the_same():
    """On a GPU values are not checked: any are put in some order, the same by both, and nothing else is written."""
    parents = torch.randint(-3, 70, (4, 40))
    parents[:, 1::2] = parents[:, 1::2] % torch.arange(1, 40, 2)
    ranks = torch.randint(-70, 2**40, (4, 40))
    for given in (None, ranks):
        expected = ordering._reference(parents, given)
        on_device = [None if values is None else values.to(DEVICE) for values in (parents, given)]
        assert_same([field.cpu() for field in ordering.launch_order(*on_device)], expected)
        assert torch.equal(expected.permutation.sort(-1).values, torch.arange(40).expand(4, 40))


@pytest.mark.parametrize(("trees", "nodes"), [
    (4, 12), (2, 130), pytest.param(217, 12, marks=pytest.mark.slow)  # 130 nodes need two warps
])  # fmt: skip
def test_trees_are_ordered_in_any_schedule(trees, nodes, adversary):
    parents = torch.stack([parents_of("random", nodes) for _ in range(trees)])
    ranks = torch.stack([*map(shuffled_ranks, parents)])
    parents[trees // 2 :] = with_absent_leaves(parents[trees // 2 :], 0.3)
    parents, ranks = parents.to(DEVICE), ranks.to(DEVICE)
    for half, given in ((slice(0, None, 2), None), (slice(1, None, 2), ranks[1::2])):
        assert_same(*(heavy_path_order(parents[half], given, impl=impl) for impl in ("triton", "torch")))
    adversary.met("_heavy_path_kernel")


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
def test_a_cuda_graph_orders_whatever_its_input_holds_and_the_host_never_waits():
    trees = [parents_of(shape, 700) for shape in ("chain", "random", "star", "young", "binary")]
    parents, ranks = torch.empty(2, 3, 700, dtype=torch.long, device=DEVICE).fill_(-1)
    graph, got = captured(lambda: heavy_path_order(parents, ranks))
    for batch in (trees[:3], trees[2:]):
        drawn = [shuffled_ranks(tree) for tree in batch]
        parents.copy_(torch.stack(batch))
        ranks.copy_(torch.stack(drawn))
        for _ in range(20):  # a race would show as a difference sooner or later
            graph.replay()
            for row, expected in enumerate(map(on_host, batch, drawn)):
                assert_same([field[row].cpu() for field in got], expected)


@pytest.mark.parametrize(("parents", "ranks", "message"), [
    (torch.tensor([-1, 0]).int(), None, r"LongTensor \[N\] or \[B, N\] with N >= 1, got torch.int32 \[2\]"),
    (torch.empty(2, 0).long(), None, "N >= 1"),
    (torch.tensor([-1, 0]), torch.tensor([0]), r"ranks must be a LongTensor \[2\], got torch.int64 \[1\]"),
    (torch.tensor([0, 0]), None, "-1 at node 0"),
    (torch.tensor([-1, 1]), None, r"parents\[i\] < i"),
    (torch.tensor([-1, -2]), None, r"-1 <= parents\[i\]"),
    (torch.tensor([-1, -1, 1]), None, "must have no children"),
    (torch.tensor([-1, 0, 0]), torch.tensor([0, 1, 1]), "ranks must differ among siblings"),
    (torch.tensor([-1, 0, 0]), torch.tensor([0, 1, 3]), r"in \[0, 3\)"),
])  # fmt: skip
def test_bad_input_is_refused(parents, ranks, message):
    with pytest.raises(ValueError, match=message):
        heavy_path_order(parents, ranks)


def test_an_implementation_that_cannot_run_is_refused():
    with pytest.raises(ValueError, match="heavy_path_order has impl 'auto', 'triton' or 'torch', got 'cuda'"):
        heavy_path_order(torch.tensor([-1, 0]), impl="cuda")
    with pytest.raises(ValueError, match="at most 2048 nodes, got 2049; take impl 'torch'"):
        order(parents_of("chain", 2049), impl="triton")
