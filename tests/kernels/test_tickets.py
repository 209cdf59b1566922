"""Counters of tickets: which launches share them. What CUDA says of streams and captures is played here."""

import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from attention_cases import inputs, oracle, random_tree
from in_time import in_time
from kernel_cases import same

from heavypath.kernels import tickets as module
from heavypath.kernels.filter_cuts import filter_cuts
from heavypath.kernels.filtering import Filters
from heavypath.kernels.operators.definition import Operator
from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.tickets import counters_for, tickets
from heavypath.kernels.tree_attention import tree_attention
from heavypath.kernels.verification import verify_tree
from heavypath.kernels.verifying import traversal_kernel
from heavypath.speculative import TokenTree
from heavypath.speculative.decoding.graphs import Graphs

GPU = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch):
    """The current stream of each GPU, and whether it is captured."""
    state, zeros = SimpleNamespace(stream={0: 1, 1: 1}, captures=False), torch.zeros
    active = SimpleNamespace(get_current_stream=state.stream.__getitem__)
    monkeypatch.setattr(module, "buffers", {})
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.captures)
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **options: zeros(*size, **options))
    return state


def test_launches_of_one_stream_share_counters(cuda):
    first = tickets(3, GPU)
    assert torch.equal(first, torch.zeros_like(first, dtype=torch.int32))
    assert tickets(4000, GPU) is first
    cuda.stream[0] = 2
    assert tickets(3, GPU) is not first
    cuda.stream[0] = 1
    assert tickets(3, GPU) is first
    assert tickets(3, torch.device("cuda", 1)) is not first
    more = tickets(5000, GPU)
    assert len(more) >= 5000
    assert tickets(3, GPU) is more


def test_what_is_captured_has_the_counters_that_it_was_given(cuda):
    eager, cuda.captures = tickets(3, GPU), True
    assert len({id(each) for each in [eager, tickets(3, GPU), tickets(3, GPU)]}) == 3
    given = torch.empty(8, dtype=torch.int32)
    with counters_for(given):
        assert tickets(3, GPU) is tickets(8, GPU) is given
        assert len(tickets(9, GPU)) == 9
        elsewhere = in_time(lambda: tickets(3, GPU))[0]
        assert isinstance(elsewhere, torch.Tensor)
        assert elsewhere is not given
    assert tickets(3, GPU) is not given
    cuda.captures = False
    assert tickets(3, GPU) is eager


def test_an_operator_keeps_no_counters(cuda):
    """torch.compile runs it in memory of a graph that is to be captured, and refuses what stays there."""
    drawn = []

    def draws_tickets(x: torch.Tensor) -> torch.Tensor:
        drawn.extend(tickets(3, GPU) for _ in range(2))
        return x.clone()

    operator = Operator(draws_tickets, torch.empty_like, is_fresh=True)
    operator((torch.ones(1),), {})
    assert drawn[0] is not drawn[1]
    assert module.buffers == {}
    assert tickets(3, GPU) is tickets(3, GPU)


def test_a_step_that_is_captured_sets_no_counters_to_zero(cuda, as_on_a_gpu):
    as_on_a_gpu()
    graphs, cuda.captures = Graphs(GPU), True
    drawn = []
    for key in "ab":
        graphs.of(key).capture(lambda: drawn.extend(tickets(3, GPU) for _ in range(3)))
    assert drawn[0] is drawn[1] is drawn[2] is not drawn[3] is drawn[4] is drawn[5]


@pytest.fixture
def stream(monkeypatch, interpreter):
    """The counters that all launches here share, as those on one stream of a GPU; all leave them at zero."""
    asked, counters = [], torch.zeros(4096, dtype=torch.int32)
    for name, user in list(sys.modules.items()):
        if name.startswith("heavypath.kernels") and getattr(user, "tickets", None) is tickets:
            monkeypatch.setattr(user, "tickets", lambda count, device: asked.append(count) or counters)
    yield counters
    assert asked
    assert not counters.any()


def test_draws_and_cuts_of_rows_that_programs_share_leave_counters_at_zero(stream):
    logits = torch.randn(1, 9_000)  # two chunks of either
    assert same(*(gumbel_topk(logits, 2, impl=impl) for impl in ("triton", "torch")))
    assert not stream.any()
    filter_cuts(logits[None], Filters(0.8, top_k=9))


def test_attention_leaves_counters_at_zero_and_merges_all_rows_of_a_tile(stream):
    """Up to five programs share a tile of 32 rows, and 8 of these are merged at a time."""
    tree, tensors, lengths = random_tree(27), inputs(2, 2, 1, 27, 1_130, 128), [700, 1_100]
    exact = oracle(*tensors, lengths, tree.mask().expand(2, -1, -1))
    for _ in range(2):
        out = tree_attention(*tensors, prefix_length=torch.tensor(lengths), subtree_end=tree.subtree_end, impl="triton")
        torch.testing.assert_close(out.double(), exact, atol=2e-5, rtol=0)


def traversed(seed, impl):
    """Where a traversal ends in a tree of six nodes, and the token behind it."""
    tree = TokenTree([-1, 0, 0, 1, 1, 2])
    target = torch.randn(1, 6, 12, generator=torch.Generator().manual_seed(seed))
    draft, tokens, rows = 0.7 * target, torch.zeros(1, 6, dtype=torch.long), torch.arange(6)[None]
    for node in range(3):
        children = (tree.parents == node).nonzero()[:, 0]
        tokens[:, children] = gumbel_topk(draft[:, node], len(children), seed=seed, impl="torch").tokens
    options = {"method": "traversal", "ranks": tree.ranks, "seed": seed, "rows": rows, "max_depth": tree.depth}
    return [field.tolist() for field in verify_tree(tokens, tree.parents, target, draft, **options, impl=impl)]


class Instead:
    """Stands for the traversal's second kernel, and does something before it is launched."""

    def __init__(self, does):
        self.does, self.kernel = does, traversal_kernel._chains_kernel
        self.arg_names = self.kernel.arg_names

    def __getitem__(self, grid):
        self.does()
        return self.kernel[grid]


def test_launches_of_another_thread_may_come_between_those_of_a_traversal(stream, monkeypatch):
    """Traversal keeps counts from one launch to the next, and threads launch on one stream unless they are told to."""
    others = []

    def another():
        monkeypatch.setattr(traversal_kernel, "_chains_kernel", between.kernel)
        others.extend(in_time(lambda: traversed(2, "triton")))

    between = Instead(another)
    monkeypatch.setattr(traversal_kernel, "_chains_kernel", between)
    assert [traversed(1, "triton"), *others] == [traversed(1, "torch"), traversed(2, "torch")]


def test_a_traversal_that_is_broken_off_leaves_counters_at_zero(stream, monkeypatch):
    """By Ctrl-C, for example, while a kernel is compiled."""
    with monkeypatch.context() as patch:
        patch.setattr(traversal_kernel, "_chains_kernel", Instead(Mock(side_effect=KeyboardInterrupt)))
        with pytest.raises(KeyboardInterrupt):
            traversed(1, "triton")
    assert not stream.any()
    assert traversed(1, "triton") == traversed(1, "torch")
