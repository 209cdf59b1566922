"""How benchmarks time on a GPU, by events that are played: the clock goes on by what a run says that it takes."""

import importlib.util

import pytest
from bench_scripts import BENCH, script

common = script("common")
spec = importlib.util.spec_from_file_location("kernel_benchmarks", BENCH / "kernels" / "conftest.py")
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)


@pytest.fixture
def clock(monkeypatch):
    """The seconds that have gone by, in a list that runs may add to; an event reads it, and adds 4 us."""
    gone = [0.0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = gone[0]
            gone[0] += 4e-6

        def synchronize(self):
            pass

        def elapsed_time(self, later):
            return 1e3 * (later.at - self.at)

    monkeypatch.setattr("torch.cuda.Event", Event)
    return gone


def taking(clock, seconds):
    def run():
        clock[0] += seconds

    return run


def test_what_events_add_is_shared_by_many_runs(clock):
    assert common.gpu_seconds(taking(clock, 20e-6)) == pytest.approx(20e-6, rel=1e-3)
    assert clock[0] == pytest.approx(0.04, rel=0.2)


def test_calls_of_a_small_kernel_take_turns_in_one_graph(clock, monkeypatch):
    order, captured = [], []

    def capture(work):
        captured.append(work)
        return work

    class Benchmark:
        enabled = True

        def pedantic(self, work, rounds):
            assert rounds == 3
            work()

    def runs():
        return [lambda name=name: (order.append(name), taking(clock, 3e-6)()) for name in "abc"]

    monkeypatch.setattr(kernels, "captured", capture)
    monkeypatch.setattr(kernels.CLOCK, "seconds", 0.0)
    kernels.on_gpu(Benchmark(), runs(), eager=False, calls=8)
    assert len(captured) == 1
    assert order[:10] == [*"abcabcabca"]
    assert kernels.CLOCK.seconds == pytest.approx(3e-6, rel=1e-2)


def test_problems_fill_more_than_a_second_cache_on_a_gpu(monkeypatch):
    made = [len(common.problems_of(object, nbytes)) for nbytes in (1, 10**9)]
    monkeypatch.setattr(common, "DEVICE", "cuda")
    on_gpu = [len(common.problems_of(object, nbytes)) for nbytes in (1000, 16_000_000, 50_000_000, 10**9)]
    assert made == [1, 1]
    assert on_gpu == [24, 13, 4, 1]
