"""What is played of CUDA graphs refuses what CUDA and torch refuse, and shows what a GPU would show."""

import gc
import threading

import pytest
import torch
from played_graphs import STREAMS, PlayedGraph, Pools, Stream, current_stream, on_stream, refuse_while_capturing


class OnCpu(PlayedGraph):
    """A graph for which all tensors are on the GPU but those that the host keeps."""

    host: tuple[torch.Tensor, ...] = ()

    def is_there(self, tensor):
        return all(tensor.untyped_storage()._cdata != one.untyped_storage()._cdata for one in self.host)

    @staticmethod
    def run(function, *args):
        function(*args)


@pytest.fixture(autouse=True)
def pools(monkeypatch):
    pools = Pools()
    pools.handles.add(threading.get_ident())
    monkeypatch.setattr(PlayedGraph, "pools", pools)
    return pools


def captured(work, pool=None):
    graph = OnCpu()
    graph.capture_begin(pool)
    try:
        out = work(graph)
    finally:
        graph.capture_end()
    return graph, out


def test_a_capture_runs_nothing_and_a_replay_all_of_it():
    state, launched = torch.zeros(3), []

    def work(graph):
        state.add_(1)
        state[1:] += 1
        graph.launch(lambda tensor: launched.append(tensor.tolist()), state)
        return state * 2, (state > 1).long(), state == 0

    graph, out = captured(work)
    assert (state.tolist(), launched) == ([0, 0, 0], [])
    assert out[0].isnan().all()
    assert out[1].tolist() == [-(10**9)] * 3
    for times in (1, 2):
        graph.replay()
        assert state.tolist() == [times, 2 * times, 2 * times]
        assert out[0].tolist() == [2 * times, 4 * times, 4 * times]
        assert out[1].tolist() == [times > 1, 1, 1]
        assert not out[2].any()
    assert launched == [[1, 2, 2], [2, 4, 4]]


def test_what_a_capture_freed_is_garbage_when_a_replay_begins():
    """A graph that counts in memory of its own without writing it first."""
    given, seen = torch.ones(2), []

    def work(graph):
        own = torch.empty(2)
        graph.launch(lambda tensor: seen.append(tensor.tolist()), own)
        own.copy_(given)

    graph, _ = captured(work)
    graph.replay()
    graph.replay()
    assert torch.tensor(seen).isnan().tolist() == [[True] * 2] * 2


def test_a_tensor_that_outlives_its_capture_is_garbage_until_a_replay():
    """As of a cache that is filled within a capture."""
    kept = []
    graph, _ = captured(lambda graph: kept.append(torch.arange(3)) or kept[0] + 1)
    assert kept[0].tolist() == [-(10**9)] * 3
    graph.replay()
    assert kept[0].tolist() == [0, 1, 2]


def test_memory_that_a_graph_uses_must_still_be_there():
    given = [torch.ones(2)]
    graph, _ = captured(lambda graph: given[0] + 1)
    graph.replay()
    given.clear()
    with pytest.raises(AssertionError, match="gone since it was captured"):
        graph.replay()


def test_a_graph_reads_what_the_hosts_memory_holds_by_then_but_takes_numbers_as_they_are():
    buffer, number, there = torch.ones(2), torch.tensor(3.0), torch.zeros(2)

    def work(graph):
        graph.host = buffer, number
        there.copy_(buffer)
        return there * number

    graph, out = captured(work)
    buffer.fill_(5)
    number.fill_(7)
    graph.replay()
    assert out.tolist() == [15, 15]


ASKS = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x.sum() > 0),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "write by a mask": lambda x: x.__setitem__(x > 0, x[:1]),
    "synchronize": lambda x: Stream().synchronize(),
    "replay": lambda x: TWO.replay(),
}
TWO, _ = captured(lambda graph: torch.ones(1))


@pytest.mark.parametrize("name", ASKS)
def test_what_asks_for_a_value_breaks_a_capture(name):
    graph, x = OnCpu(), torch.ones(2)
    graph.capture_begin()
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        ASKS[name](x)
    with pytest.raises(RuntimeError, match="previous error during capture"):
        graph.capture_end()
    with pytest.raises(AssertionError, match="without a preceding successful capture"):
        graph.replay()
    refuse_while_capturing()  # nothing is captured any more


def test_a_pool_without_graphs_takes_no_other(pools):
    pool = pools.handle()
    one, other = (captured(lambda graph: torch.ones(1), pool)[0] for _ in range(2))
    del one
    captured(lambda graph: torch.ones(1), pool)[0].reset()
    del other
    interrupted = pools.handle()
    with pytest.raises(ZeroDivisionError):
        captured(lambda graph: 1 / 0, interrupted)
    gc.collect()
    pools.empty_cache()
    for done_with in (pool, interrupted):
        with pytest.raises(RuntimeError, match="use_count > 0"):
            captured(lambda graph: torch.ones(1), done_with)
    captured(lambda graph: torch.ones(1), pools.handle())


def test_a_broken_capture_stays_underway_until_the_allocator_is_told(pools):
    pool = pools.handle()
    with pytest.raises(RuntimeError, match="previous error"):
        captured(lambda graph: torch.ones(1).item(), pool)
    with pytest.raises(RuntimeError, match="captures_underway"):
        pools.empty_cache()
    with pytest.raises(RuntimeError, match="already recording"):
        captured(lambda graph: torch.ones(1), pool)
    pools.end(0, pool)
    pools.empty_cache()
    with pytest.raises(RuntimeError, match="not currently recording"):
        pools.end(0, pool)
    with pytest.raises(RuntimeError, match=r"already recording .*CachingHostAllocator"):
        captured(lambda graph: torch.ones(1), pool)
    captured(lambda graph: torch.ones(1), pools.handle())


def test_a_thread_cannot_begin_to_multiply_in_a_capture(pools):
    pools.handles.clear()
    with pytest.raises(RuntimeError, match="previous error"):
        captured(lambda graph: torch.ones(2, 2) @ torch.ones(2, 2))


def test_behind_a_broken_capture_there_are_no_random_numbers_until_another_one_ends(pools):
    captured(lambda graph: torch.ones(1))
    pools.draw()
    with pytest.raises(RuntimeError, match="previous error"):
        captured(lambda graph: torch.ones(1).item())
    with pytest.raises(RuntimeError, match="Offset increment outside graph capture"):
        pools.draw()
    captured(lambda graph: torch.ones(1))
    pools.draw()


def test_products_of_a_stream_work_in_the_memory_of_its_first_capture_until_a_graph_goes(pools):
    def product(graph):
        return torch.ones(2, 2) @ torch.ones(2, 2)

    one, other = (captured(product)[0] for _ in range(2))
    sums, _ = captured(lambda graph: torch.ones(2).sum())
    del one
    sums.replay()
    with pytest.raises(AssertionError, match="products work in memory that is gone"):
        other.replay()
    captured(product)[0].replay()


def test_streams_are_given_out_in_turn():
    first = Stream()
    assert first not in [Stream() for _ in range(STREAMS - 1)]
    assert Stream() == first
    with on_stream(first):
        assert current_stream() == first
        graph, _ = captured(lambda graph: torch.ones(1))
    assert graph.stream == first
    assert current_stream().cuda_stream == 0
