"""Benchmarks of single kernels on pytest-benchmark: a file for each kernel, and what they share.

    python -m pytest bench/kernels --benchmark-only [-k "attention and demo"] [--miniature] [--benchmark-json FILE]
    python -m pytest bench/kernels --benchmark-disable -n 14 -k heavypath    # compiles all that a GPU will launch

A file has CASES, its shapes, of which those with `runs_here()` are timed; MINIATURE, the least that runs every line;
WAYS, the contenders by name: from a case each makes what is timed, or None where it has nothing for that case; and one
test, which gives that to `timed`. Ways of a case are a group of the table, in which the fastest is 1.0.

On a GPU a time is that of one of CALLS calls in a CUDA graph, which is replayed again and again: a small kernel takes
less than what events and a graph's launch add. The calls take turns with `problems_of` a case, which together are more
than the L2 cache holds if one reads 8.4 MB or more. Smaller ones may be found there, as they are behind the kernel that
made them, and be above a roof of memory. Ways that are called from Python say so ("eager"): their time is
triton.testing.do_bench's, which empties the L2 cache before every run. A peer that cannot do a case is named and passed
over.

Roofs are the least time of what the problem needs: bytes at the speed of a large copy, FLOPs at that of a large matrix
product, both measured in the same run. The last table has each time, and its share of the later roof.
"""

import itertools
import shlex
import sys
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))

import triton
from common import CALLS, DEVICE, captured, copy_bandwidth, environment, gpu_seconds, matrix_flops, show

ROWS = pytest.StashKey[list]()
EAGER = 3  # of the problems that take turns, those that ways that are called from Python are timed with


class DeviceClock:
    """What pytest-benchmark reads in place of the time: how long a GPU has worked."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def run(self, seconds: Callable[[], float]) -> None:
        self.seconds += seconds()


CLOCK = DeviceClock()


def pytest_addoption(parser):
    parser.addoption("--miniature", action="store_true", help="the least that runs every line")


def pytest_configure(config):
    config.stash[ROWS] = []
    config.addinivalue_line("filterwarnings", "default")  # those of peers are no errors


def pytest_generate_tests(metafunc):
    """A test for each case and each way."""
    if "case" in metafunc.fixturenames:
        small, module = metafunc.config.getoption("--miniature"), metafunc.module
        cases = module.MINIATURE if small else [case for case in module.CASES if case.runs_here()]
        metafunc.parametrize("case", cases, ids=str)
    if "way" in metafunc.fixturenames:
        metafunc.parametrize("way", [*metafunc.module.WAYS])


def pytest_collection_modifyitems(config, items):
    """What is ours comes first: a GPU may be taken away before the peers are done."""
    items.sort(key=lambda item: not item.name.endswith("-heavypath]"))
    for item in items:
        if DEVICE == "cuda" and "timed" in item.fixturenames:
            item.add_marker(pytest.mark.benchmark(timer=CLOCK))
        if config.getoption("--miniature"):
            item.add_marker(pytest.mark.benchmark(max_time=0.01, min_rounds=1))


@pytest.fixture
def timed(benchmark, request, case, way):
    """Times what a way has made of a case; several runs take turns.

    read, flops: bytes and operations of a run, the latter with their dtype; roof: seconds that bound it besides. count:
    equal pieces of work in a run, one of which is reported. facts: what else is kept.
    """
    small = request.config.getoption("--miniature")

    def measure(*runs, read=0, flops=(0, torch.float32), roof=0.0, count=1, **facts):
        if None in runs or not runs:
            pytest.skip(f"{way} has nothing for {case}")
        name = request.node.path.stem.removeprefix("bench_")
        machine = environment()
        benchmark.group = f"{name}: {case}"
        where = {"device": machine["device"], "threads": machine["threads"]}
        benchmark.extra_info |= {"case": str(case), "way": way} | where
        with torch.inference_mode():
            try:
                if DEVICE == "cuda":
                    on_gpu(benchmark, runs, "eager" in way, CALLS if count == 1 else 1)
                else:
                    on_host(benchmark, runs)
            except RuntimeError as error:
                if way.startswith("heavypath"):
                    raise
                pytest.skip(f"{way} failed: {type(error).__name__}: {error}"[:300])
        if benchmark.stats is None:  # by --benchmark-disable
            return
        seconds = benchmark.stats.stats.median / count
        roofs = [
            roof,
            read / copy_bandwidth(small) if read else 0,
            flops[0] and flops[0] / matrix_flops(flops[1], small),
        ]
        row = {"kernel": name, "case": str(case), "way": way, "microseconds": 1e6 * seconds}
        row |= {"MB": read / 1e6} if read else {}
        row |= {"of_roof": max(roofs) / seconds} if max(roofs) else {}
        benchmark.extra_info |= row | facts
        request.config.stash[ROWS].append(row | facts)

    return measure


def on_gpu(benchmark, runs, eager: bool, calls: int) -> None:
    """Time runs that take turns. calls: at least this many of them are in a graph."""
    if not benchmark.enabled:  # it is to be compiled, and no more
        for run in runs:
            run()
        torch.cuda.empty_cache()  # other processes compile beside this one
        return
    if eager:
        turns: Iterator = itertools.cycle(runs)
        rounds = min(len(runs), EAGER)
        benchmark.pedantic(lambda: CLOCK.run(lambda: do_bench(next(turns))), rounds=rounds)
        return
    again = -(-calls // len(runs))

    def every() -> None:
        for run in again * runs:
            run()

    graph = captured(every)
    benchmark.pedantic(lambda: CLOCK.run(lambda: gpu_seconds(graph) / again / len(runs)), rounds=3)


def do_bench(run) -> float:
    return triton.testing.do_bench(run, warmup=10, rep=40, return_mode="median") / 1e3


def on_host(benchmark, runs) -> None:
    turns: Iterator = itertools.cycle(runs)
    benchmark(lambda: next(turns)())


def pytest_benchmark_update_json(config, output_json):
    """Keep of a file what others of results have: how the figures came to be, and the figures."""
    given = [*config.invocation_params.args]
    place = given.index("--benchmark-json")
    command = shlex.join(["python", "-m", "pytest", *given[:place], *given[place + 2 :]])
    benchmarks = [
        {"extra_info": each["extra_info"], "stats": {name: each["stats"][name] for name in ("median", "iqr", "rounds")}}
        for each in output_json["benchmarks"]
    ]
    output_json.clear()
    output_json["environment"] = environment() | {"command": command, "date": date.today().isoformat()}
    output_json["benchmarks"] = benchmarks


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(config):
    if config.stash[ROWS]:
        show(config.stash[ROWS])
