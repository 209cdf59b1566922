"""How the benchmarks of one kernel time it: on a GPU by Triton's do_bench, on a CPU in turns with its peers."""

import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import torch
import triton
from common import DEVICE, made, until_stopped, write_results
from rich.console import Console
from rich.table import Table

from heavypath.kernels.tickets import counters_for, new_counters

Run = Callable[[], object]


def captured(run: Run) -> Run:
    """The same work as a CUDA graph. It is run three times before, which compiles it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph, counters = torch.cuda.CUDAGraph(), new_counters(DEVICE)
    with torch.cuda.graph(graph), counters_for(counters):
        run()

    def replay() -> None:
        graph.replay()
        assert counters is not None  # they are there for as long as the graph is

    return replay


def gpu_milliseconds(run: Run, budget: int = 40) -> float:
    """The median time on a GPU whose L2 cache is emptied before every run. budget: milliseconds to spend on it."""
    return triton.testing.do_bench(run, warmup=budget // 4, rep=budget, return_mode="median")


def alternated(runs: dict[str, Run], seconds: float, least: int = 5) -> dict[str, list[float]]:
    """Milliseconds of each run in every round on a CPU.

    The runs take turns within a round and the order changes from round to round, for `seconds` and at least `least`
    rounds; a first round is not counted.
    """
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    begin, rounds = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds or rounds < least:
        for name in list(runs)[:: 1 if rounds % 2 else -1]:
            start = time.perf_counter()
            runs[name]()
            times[name].append((time.perf_counter() - start) * 1e3)
        rounds += 1
    return times


def microseconds(run: Callable[..., object], prepare: Callable[[], tuple] = tuple, seconds: float = 0.1) -> dict:
    """The time of a run on the host, round by round: median, quartiles and the number of rounds.

    prepare: makes the arguments of the run in each round, and is not timed.
    """
    times: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(times) < 20:
        arguments = prepare()
        start = time.perf_counter()
        run(*arguments)
        times.append((time.perf_counter() - start) * 1e6)
    low, middle, high = quantiles(times[len(times) // 10 :], n=4)  # the first tenth warms up
    return {"microseconds": middle, "quartiles": (low, high), "rounds": len(times)}


def compared(times: dict[str, list[float]]) -> dict[str, dict]:
    """The median time of each, and how many times as fast as each of the others "heavypath" is.

    The ratio is taken within a round: its median and its quartiles.
    """
    ours = torch.tensor(times["heavypath"])
    quarters = torch.tensor([0.25, 0.5, 0.75])
    ratios = {
        name: (torch.tensor(values) / ours).quantile(quarters).tolist()
        for name, values in times.items()
        if name != "heavypath"
    }
    return {
        "milliseconds": {name: median(values) for name, values in times.items()},
        "ratio": {name: middle for name, (_, middle, _) in ratios.items()},
        "ratio_quartiles": {name: (low, high) for name, (low, _, high) in ratios.items()},
    }


def in_graphs(
    ways: dict[str, Callable[[], Run | None]], eager: Iterable[str] = (), budget: int = 40
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Milliseconds on a GPU of what each way makes, and the ways that failed with their errors.

    A way makes a run, or None where it has none for this shape. A run becomes a CUDA graph unless it is one of `eager`.
    A peer that cannot do a shape leaves the others their figures; "heavypath" must not fail.
    """
    times, failed = {}, {}
    for name, way in ways.items():
        try:
            run = way()
            if run is not None:
                times[name] = [gpu_milliseconds(run if name in eager else captured(run), budget)]
        except Exception as error:
            if name == "heavypath":
                raise
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    return times, failed


def copy_bandwidth(miniature: bool = False) -> float:
    """Bytes a second, read and written, of a large copy on this device."""
    bits = 10 if miniature else 29 if DEVICE == "cuda" else 25
    source = torch.zeros(1 << bits, dtype=torch.bfloat16, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _roof_milliseconds(lambda: target.copy_(source)) * 1e3


def matrix_flops(dtype: torch.dtype, miniature: bool = False) -> float:
    """Floating-point operations a second of a large matrix product on this device."""
    side = 64 if miniature else 8192 if DEVICE == "cuda" else 1024
    left = torch.randn(side, side, device=DEVICE).to(dtype)
    return 2 * side**3 / _roof_milliseconds(lambda: left @ left) * 1e3


def _roof_milliseconds(run: Run) -> float:
    return gpu_milliseconds(run, 100) if DEVICE == "cuda" else median(alternated({"roof": run}, seconds=0.5)["roof"])


def measure_cases(
    cases: Iterable[NamedTuple],
    measure: Callable[..., dict],
    as_table: Callable[[list[dict]], Table],
    facts: dict,
    arguments: Namespace,
) -> list[dict]:
    """Measure the cases of --only, print their table, write them to --json and draw them to --plot.

    measure(case, facts) gives a row; a case has the name of its table in `table`. When it is stopped it prints what it
    has.
    """
    chosen = (case for case in cases if arguments.only in (None, case.table))
    rows = kept((measure(case, facts) for case in chosen), facts, arguments)
    Console(highlight=False, width=180).print(as_table(rows))
    if arguments.plot is not None:
        draw_plot(rows, arguments.plot)
    return rows


def kept(measured: Iterable[dict], facts: dict, arguments: Namespace) -> list[dict]:
    """All rows, which are measured as they are asked for, or those until it is stopped. --json always has them all."""
    rows: list[dict] = []
    with until_stopped():
        for row in measured:
            rows.append(row)
            write_results(arguments.json, facts, rows=rows)
    return rows


def draw_plot(rows: list[dict], path: Path) -> None:
    """A group of bars for each case that was timed, one bar for each way, and a mark at the nearer roof."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if "milliseconds" in row]
    names = list(dict.fromkeys(name for row in rows for name in row["milliseconds"]))
    figure, axes = pyplot.subplots(figsize=(10, 1 + 0.32 * len(rows)), layout="constrained")
    for place, name in enumerate(names):
        timed = [
            (index, row["milliseconds"][name] * 1e3) for index, row in enumerate(rows) if name in row["milliseconds"]
        ]
        heights = [index + 0.8 * (place / len(names) - 0.5) for index, _ in timed]
        axes.barh(heights, [value for _, value in timed], 0.8 / len(names), align="edge", label=name)
    axes.plot(
        [row["roof_milliseconds"] * 1e3 for row in rows], range(len(rows)), "k|", markersize=9, label="nearer roof"
    )
    axes.set(xscale="log", xlabel="microseconds", yticks=range(len(rows)), yticklabels=[row["case"] for row in rows])
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(made(path), dpi=120)
