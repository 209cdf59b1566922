"""Counters of tickets: which launches share them. What CUDA says of streams and captures is played here."""

import threading
from types import SimpleNamespace

import pytest
import torch
from test_step import as_on_a_gpu  # noqa: F401

from heavypath.kernels import tickets as module
from heavypath.kernels.tickets import counters_for, tickets
from heavypath.speculative.decoding.graphs import Graphs

GPU = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch):
    """The current stream of each GPU, and whether it is captured."""
    state = SimpleNamespace(stream={0: 1, 1: 1}, captures=False)
    zeros = torch.zeros
    monkeypatch.setattr(module, "buffers", {})
    monkeypatch.setattr(
        module, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=state.stream.__getitem__))
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.captures)
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **options: zeros(*size, **options))
    return state


def test_launches_of_one_stream_share_counters(cuda):
    first = tickets(3, GPU)
    assert first.dtype == torch.int32
    assert not first.any()
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
    given, elsewhere = torch.empty(8, dtype=torch.int32), []
    with counters_for(given):
        assert tickets(3, GPU) is tickets(8, GPU) is given
        assert len(tickets(9, GPU)) == 9
        thread = threading.Thread(target=lambda: elsewhere.append(tickets(3, GPU)))
        thread.start()
        thread.join()
        assert elsewhere[0] is not given
    assert tickets(3, GPU) is not given
    cuda.captures = False
    assert tickets(3, GPU) is eager


def test_a_step_that_is_captured_sets_no_counters_to_zero(cuda, as_on_a_gpu):  # noqa: F811
    as_on_a_gpu()
    graphs, cuda.captures = Graphs(GPU), True
    drawn = []
    for key in "ab":
        graphs.of(key).capture(lambda: drawn.extend(tickets(3, GPU) for _ in range(3)))
    assert [drawn[0] is other for other in drawn] == [True] * 3 + [False] * 3
    assert drawn[3] is drawn[4] is drawn[5]
