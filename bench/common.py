"""What the scripts of this folder share: options, facts about the machine, how they time, print and keep results."""

import argparse
import json
import platform
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from functools import cache
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple, TypeVar

import torch
import transformers
import triton
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from heavypath.kernels.tickets import counters_for, new_counters
from heavypath.speculative import METHODS, TokenTree, load_demo_pair
from heavypath.speculative.demo import DemoPair

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(__file__).parents[1]
PARTS = 5  # of a measurement on a GPU, of which the median counts
CALLS = 24  # of a small kernel, in one graph
COLD = 200_000_000  # bytes of which no second cache holds much
Run = Callable[[], object]
Row = dict[str, Any]
Returned = TypeVar("Returned")


def argument_parser(
    description: str | None, *, threads: bool = True, device: bool = False, plot: str | None = None
) -> argparse.ArgumentParser:
    """A parser with --json, which every script has, and those of --threads, --device and --plot that are asked for.

    description: the script's docstring, which --help prints as it is. plot: the help text of --plot.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if threads:
        parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of PyTorch, on a CPU")
    if device:
        parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--miniature", action="store_true", help="the least that runs every line, to try the script")
    if plot is not None:
        parser.add_argument("--plot", type=Path, metavar="PATH", help=plot)
    return parser


def options_of(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None, **miniature: object
) -> argparse.Namespace:
    """The options of the command line, with these values for --miniature. PyTorch takes its --threads from then on."""
    given = parser.parse_args(argv)
    if given.miniature:
        vars(given).update(miniature)
    if isinstance(threads := getattr(given, "threads", None), int):
        torch.set_num_threads(threads)
    return given


@contextmanager
def until_stopped() -> Iterator[None]:
    """SIGINT and SIGTERM end the block, and no more: what has been measured until then is printed behind it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        print("stopped before the end; this is what there is:", flush=True)


def environment(device: str = DEVICE, given: argparse.Namespace | None = None, *names: str) -> dict:
    """The device, the threads, the versions and the options of the command line that results depend on."""
    return {
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        **{name: getattr(given, name) for name in names},
    }


def processor() -> str:
    """The name of the CPU, with family and model: a virtual machine may hide the rest of the name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    facts: dict[str, str] = {}
    for name, colon, value in (line.partition(":") for line in lines):
        if colon:
            facts.setdefault(name.strip(), value.strip())
    if "model name" not in facts:
        return platform.processor()
    numbers = [f"{name.removeprefix('cpu ')} {facts[name]}" for name in ("cpu family", "model") if name in facts]
    return facts["model name"] + (f" ({', '.join(numbers)})" if numbers else "")


def write_results(path: Path | None, facts: dict, **results: object) -> None:
    """Write a file of results: the environment first, then the results by name. Nothing is written without a path.

    The environment also gets the command and the date, which docs/results.md prints below each table. A list or an
    object that holds no other stands on one line.
    """
    if path is not None:
        facts = facts | {"command": command(), "date": date.today().isoformat()}
        made(path).write_text(written({"environment": facts, **results}))


def written(content: Row) -> str:
    """The text of a file of results."""
    text = json.dumps(content, indent=1)
    return re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda innermost: _on_one_line(innermost[0]), text) + "\n"


def command() -> str:
    """The command line of this process, from the repository's root on. The file of results is left out."""
    script, given = Path(sys.argv[0]).resolve(), sys.argv[1:]
    if "--json" in given:
        place = given.index("--json")
        given = given[:place] + given[place + 2 :]
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    return shlex.join(["python", str(name), *given])


def made(path: Path) -> Path:
    """The path of a file to be written, whose folder is made if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _on_one_line(text: str) -> str:
    return re.sub(r"\n\s*", "", re.sub(r",\n\s*", ", ", text))


def report(measured: Iterable[Row], facts: dict, path: Path | None, **looks: Any) -> None:
    """Print all rows, which are measured as they are asked for, or those until it is stopped; each is written at once.

    looks: options of `show`
    """
    rows: list[Row] = []
    with until_stopped():
        for row in measured:
            rows.append(row)
            write_results(path, facts, rows=rows)
    show(rows, **looks)


def show(rows: Sequence[Row], without: Collection[str] = (), title: str | None = None) -> None:
    """Print rows as a table: a column for each field, but those named and those that hold more than a few numbers."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in without]
    names = [name for name in names if any(_cell(row.get(name)) for row in rows)]
    table = Table(box=None, pad_edge=False)
    for name in names:
        numbers = all(isinstance(row.get(name), int | float | None) for row in rows)
        table.add_column(name.replace("_", " "), justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in names))
    if title is not None:
        print(f"\n{title}")
    Console(highlight=False, markup=False, width=200).print(table)


def _cell(value: object) -> str:
    if value is None or (isinstance(value, list | tuple) and len(value) > 3):
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(each)}" for name, each in value.items())
    return " - ".join(map(_cell, value)) if isinstance(value, list | tuple) else str(value)


def quieten() -> None:
    """Have transformers print neither warnings nor progress."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def quiet_demo_pair(device: str = "cpu") -> DemoPair:
    """The shipped pair; transformers is quiet from then on."""
    quieten()
    return load_demo_pair(device=device)


def token_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], device: str = "cpu") -> list[Tensor]:
    """The tokens of each text, LongTensor[1, T]."""
    return [tokenizer(text, return_tensors="pt").input_ids.to(device) for text in texts]


def random_tree(nodes: int, seed: int = 0) -> TokenTree:
    """A random recursive tree: the parent of each node is uniform over the nodes before it."""
    generator = torch.Generator().manual_seed(seed)
    return TokenTree([-1, *(int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, nodes))])


def paper_verifier(method: str) -> str | None:
    """The verifier by which a method is what its paper has, for SpeculativeDecoder: None where it has that anyway."""
    return "rejection" if METHODS[method].verifiers else None


def figure_of(width: float, height: float) -> Any:
    """A figure of matplotlib, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


class Spread(NamedTuple):
    """A median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Of some numbers, or of one."""
        every = [*values]
        low, middle, high = quantiles(every, n=4, method="inclusive") if len(every) > 1 else 3 * every
        return cls(middle, low, high)

    def __str__(self) -> str:
        digits = 2 if self.median < 10 else 0
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} - {self.high:.{digits}f})"


def clock_of(device: str) -> Callable[[], float]:
    """A clock in seconds. For a GPU it waits until that has done all it was given: phases can be told apart."""

    def when_done() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return when_done if torch.device(device).type == "cuda" else time.perf_counter


def timed(call: Callable[[], Returned], clock: Callable[[], float] = time.perf_counter) -> tuple[float, Returned]:
    """Seconds that a call takes, and what it returned."""
    begin = clock()
    returned = call()
    return clock() - begin, returned


def timed_behind_first(
    generate: Callable[[int], Returned], tokens: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, Returned]:
    """Seconds for a text of so many tokens less those for one token, and the text. Few may seem to take no time."""
    first, _ = timed(lambda: generate(1), clock)
    whole, text = timed(lambda: generate(tokens), clock)
    return max(whole - first, 1e-6), text


def in_turns(
    runs: Mapping[str, Run], rounds: int, seconds: float = 0.0, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each run in each round. Runs take turns, and each round begins with another one.

    There are so many rounds, more until so many seconds are over, and one before them, which warms up and is not
    counted.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    names, begin, number = [*runs], time.perf_counter(), -1
    while number < rounds or time.perf_counter() - begin < seconds:
        place = number % len(names)
        for name in names[place:] + names[:place]:
            start = clock()
            runs[name]()
            if number >= 0:
                times[name].append(clock() - start)
        number += 1
    return times


def times_as_fast(times: Mapping[str, Sequence[float]], name: str, other: str) -> Spread:
    """How many times as fast one is as another: their ratio is taken within a round."""
    return Spread.of(theirs / own for own, theirs in zip(times[name], times[other], strict=True))


def captured(run: Run) -> Run:
    """The same work as a CUDA graph, which keeps what `run` reads. It is run three times before, which compiles it."""
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
        assert run is not None  # whose tensors are there for as long as the graph is
        assert counters is not None  # likewise

    return replay


def gpu_seconds(run: Run, budget: float = 0.04) -> float:
    """The median time of a run on a GPU, of runs one after another. budget: seconds to spend on it.

    Events are around several runs, so that what an event adds, and the first launch, are shared by them. The second
    cache is not emptied: a run should read more than it holds, or what is there in use, too.
    """
    run()
    count = max(1, int(budget / PARTS / _seconds_of(run, 3)))
    return median(_seconds_of(run, count) for _ in range(PARTS))


def _seconds_of(run: Run, count: int) -> float:
    """The time of one of this many runs on a GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / count


def problems_of(make: Callable[[], Returned], nbytes: int) -> list[Returned]:
    """Problems that take turns, so that each finds its bytes in memory, not in the second cache; one on a CPU.

    Those that read less than COLD / CALLS bytes are too few for that.

    make: makes one; nbytes: that one reads
    """
    count = 1 if DEVICE == "cpu" else max(1, min(CALLS, -(-COLD // nbytes)))
    return [make() for _ in range(count)]


@cache
def copy_bandwidth(miniature: bool = False) -> float:
    """Bytes a second, read and written, of a large copy on this device."""
    bits = 10 if miniature else 29 if DEVICE == "cuda" else 25
    source = torch.zeros(1 << bits, dtype=torch.bfloat16, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _roof_seconds(lambda: target.copy_(source))


@cache
def matrix_flops(dtype: torch.dtype, miniature: bool = False) -> float:
    """Floating-point operations a second of a large matrix product on this device."""
    side = 64 if miniature else 8192 if DEVICE == "cuda" else 1024
    left = torch.randn(side, side, device=DEVICE).to(dtype)
    return 2 * side**3 / _roof_seconds(lambda: left @ left)


def _roof_seconds(run: Run) -> float:
    return gpu_seconds(run, 0.1) if DEVICE == "cuda" else median(in_turns({"": run}, 5, seconds=0.5)[""])
