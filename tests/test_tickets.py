"""Counters of tickets: which launches share them. What CUDA says of streams and captures is played here."""

import threading
from types import SimpleNamespace

import pytest
import torch
from test_step import as_on_a_gpu  # noqa: F401

from heavypath.kernels import tickets as module
from heavypath.kernels.tickets import captured_on_one_stream, tickets
from heavypath.speculative.decoding.graphs import Graphs

GPU = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch):
    """The current stream of each GPU, and whether it is captured."""
    state = SimpleNamespace(stream={0: 1, 1: 1}, captures=False)
    zeros = torch.zeros
    monkeypatch.setattr(module, "_of_streams", {})
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


def test_launches_of_one_capture_share_counters_if_it_says_that_they_follow_each_other(cuda):
    eager, cuda.captures = tickets(3, GPU), True
    assert len({id(each) for each in [eager, tickets(3, GPU), tickets(3, GPU)]}) == 3
    kept, elsewhere = [], []
    for _ in range(2):
        with captured_on_one_stream():
            kept.append(tickets(3, GPU))
            assert tickets(4, GPU) is kept[-1]
            thread = threading.Thread(target=lambda: elsewhere.append(tickets(3, GPU)))
            thread.start()
            thread.join()
            assert elsewhere[-1] is not kept[-1]
    assert len({id(each) for each in [eager, *kept, *elsewhere]}) == 5
    assert tickets(3, GPU) is not kept[-1]
    cuda.captures = False
    assert tickets(3, GPU) is eager


def test_a_step_that_is_captured_sets_its_counters_to_zero_once(cuda, as_on_a_gpu):  # noqa: F811
    as_on_a_gpu()
    graphs, cuda.captures = Graphs(), True
    drawn = []
    for key in "ab":
        graphs.of(key).capture(lambda: drawn.extend(tickets(3, GPU) for _ in range(3)))
    assert [drawn[0] is other for other in drawn] == [True] * 3 + [False] * 3
    assert drawn[3] is drawn[4] is drawn[5]
