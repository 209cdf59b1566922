"""Gumbel-top-k against the same draw in plain PyTorch, and against the hardware's roofs.

    python bench/kernel_sampling.py [--only plain] [--instructions 26] [--json FILE] [--plot FILE]

plain     1 / 16 / 64 rows of 32,000 / 128,256 / 151,936 bfloat16 logits, k = 1 / 4 / 16 / 32, temperature 0.6
float32   some of those in float32
filtered  top_k 50 and top_p 0.9 besides, 128,256 tokens, k = 4 / 16

Without a GPU 1 and 16 rows, 32,000 and 128,256 tokens and k = 4 and 32 (float32 and filtered: 128,256 tokens, k = 4)
are timed, and heavypath is its PyTorch reference, whose noise is keyed by counters, its keys float32 and its
log-probabilities float64. The peers do a draw without replacement from the same logits, in float32:

softmax, noise, topk   probabilities / fresh exponential noise, then topk: as Sequoia's code, which keeps its noise
softmax, noise, sort   the same with a full sort
multinomial            torch.multinomial of the softmax, without replacement
topk alone             of the bare logits, without noise or filters: less work, to see what the selection costs

For the filtered table the peers go through transformers' own warpers. Logits are normal with a standard deviation of 3.

On a GPU each time is the median of triton.testing.do_bench, which empties the L2 cache before every run, of a CUDA
graph; multinomial, which waits for the host, and heavypath's reference are called from Python, as "eager" is heavypath.
On a CPU it is the median of alternating runs, and ratios are medians of ratios within a round. Bytes are what the
problem needs at least: logits and outputs once. The roof is the later of bytes over the copy bandwidth measured in the
same run and, on a GPU and without filters, the instructions of an element (read off the compiled kernel for 16-bit
logits, --instructions) over what all lanes issue at the highest clock: noise costs more than reading.
"""

import argparse
import json
import platform
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import triton
from kernel_attention import DEVICE, captured, draw_plot, measured_roofs
from decoding import processor
from rich.console import Console
from rich.table import Table
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from heavypath.kernels.sampling import gumbel_topk

TEMPERATURE, TOP_K, TOP_P = 0.6, 50, 0.9
EAGER = ("its reference", "multinomial")  # on a GPU too: multinomial waits for the host
LANES = 128  # instructions that a multiprocessor issues a cycle, one for each lane


class Case(NamedTuple):
    table: str
    rows: int
    vocabulary: int
    k: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.table} {self.rows} x {self.vocabulary} k={self.k}"

    def fits_a_cpu(self) -> bool:
        few = (4,) if self.table != "plain" else (4, 32)
        return self.rows <= 16 and self.vocabulary <= 128256 and self.k in few


CASES = [
    *(Case("plain", rows, size, k) for size in (32000, 128256, 151936) for rows in (1, 16, 64) for k in (1, 4, 16, 32)),
    *(Case("float32", rows, 128256, k, torch.float32) for rows in (1, 16, 64) for k in (4, 32)),
    *(Case("filtered", rows, 128256, k) for rows in (1, 16, 64) for k in (4, 16)),
]


def contenders(case: Case) -> dict[str, Callable[[], object]]:
    """The ways to solve a case."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    logits = (3 * torch.randn(case.rows, case.vocabulary, generator=generator, device=DEVICE)).to(case.dtype)
    rows = torch.arange(case.rows, device=DEVICE)
    filters = {"top_k": TOP_K, "top_p": TOP_P} if case.table == "filtered" else {}
    warpers = LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE)])
    if filters:
        warpers += [TopKLogitsWarper(TOP_K), TopPLogitsWarper(TOP_P)]

    def ours(impl: str) -> Callable[[], object]:
        return lambda: gumbel_topk(logits, case.k, temperature=TEMPERATURE, **filters, rows=rows, impl=impl)

    def probs() -> torch.Tensor:
        return warpers(None, logits.float()).softmax(-1)

    def raced() -> torch.Tensor:
        draft = probs()
        return draft / torch.empty_like(draft).exponential_()

    return {
        "heavypath": ours("auto"),
        **({"its reference": ours("torch")} if DEVICE == "cuda" else {}),
        "softmax, noise, topk": lambda: raced().topk(case.k),
        "softmax, noise, sort": lambda: raced().sort(descending=True).indices[:, : case.k],
        "multinomial": lambda: torch.multinomial(probs(), case.k),
        "topk alone": lambda: logits.topk(case.k),
    }


def gpu_milliseconds(run: Callable[[], object]) -> float:
    return triton.testing.do_bench(run, warmup=10, rep=40, return_mode="median")


def alternated(runs: dict[str, Callable[[], object]], seconds: float, least: int = 5) -> dict[str, list[float]]:
    """Milliseconds of each in every round on a CPU; who goes first changes."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(times["heavypath"]) < least:
        for name in list(runs)[:: 1 if len(times["heavypath"]) % 2 else -1]:
            start = time.perf_counter()
            runs[name]()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def against(times: dict[str, list[float]]) -> dict[str, dict]:
    """Medians of the times, and how often heavypath's fits in each of the others': median and quartiles."""
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


def instructions_a_second() -> float | None:
    if DEVICE == "cpu":
        return None
    properties = triton.runtime.driver.active.utils.get_device_properties(torch.cuda.current_device())
    return properties["multiprocessor_count"] * LANES * properties["sm_clock_rate"] * 1e3


def measured(case: Case, facts: dict) -> dict:
    """One row of the table."""
    row = {"case": str(case)} | case._asdict() | {"dtype": str(case.dtype).removeprefix("torch.")}
    elements, outputs = case.rows * case.vocabulary, case.rows * case.k
    row["bytes"] = elements * case.dtype.itemsize + outputs * (8 + 4 + 4)  # tokens, keys, log-probabilities
    row["bandwidth_milliseconds"] = row["roof_milliseconds"] = row["bytes"] / facts["bytes_a_second"] * 1e3
    if facts["instructions_a_second"] and case.table != "filtered":
        issued = facts["instructions"] * elements / facts["instructions_a_second"] * 1e3
        row["instruction_milliseconds"], row["roof_milliseconds"] = issued, max(issued, row["roof_milliseconds"])
    runs = contenders(case)
    with torch.inference_mode():
        if DEVICE == "cuda":
            row["eager_milliseconds"] = gpu_milliseconds(runs["heavypath"])
            times, row["failed"] = {}, {}
            for name, run in runs.items():
                try:
                    times[name] = [gpu_milliseconds(run if name in EAGER else captured(run))]
                except Exception as error:  # a peer that cannot do a shape leaves the others their figures
                    if name == "heavypath":
                        raise
                    row["failed"][name] = f"{type(error).__name__}: {error}"[:300]
            row |= against(times)
        else:
            row |= against(alternated(runs, seconds=2))
    for roof in ("bandwidth", "roof"):
        row[f"fraction_of_{roof}"] = row[f"{roof}_milliseconds"] / row["milliseconds"]["heavypath"]
    return row


def as_table(rows: list[dict]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("case", "us", "MB", "of bandwidth", "of roof", "times as fast as"):
        table.add_column(heading, justify="left" if heading in ("case", "times as fast as") else "right")
    for row in rows:
        table.add_row(
            row["case"],
            f"{row['milliseconds']['heavypath'] * 1e3:.1f}",
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['fraction_of_bandwidth']:.1%}",
            f"{row['fraction_of_roof']:.1%}",
            "; ".join(f"{name} {ratio:.2f}" for name, ratio in row["ratio"].items()),
        )
    return table


def parser(description: str | None, tables: Iterable[str]) -> ArgumentParser:
    options = ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", choices=tuple(tables))
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    options.add_argument("--json", type=Path)
    options.add_argument("--plot", type=Path, help="needs matplotlib")
    return options


def environment(threads: int) -> dict:
    """Where and with what; the roof by copying is measured here."""
    torch.set_num_threads(threads)
    return {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else processor(),
        "threads": threads,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "bytes_a_second": measured_roofs(torch.bfloat16)[0],
    }


def tabulated(
    cases: Iterable[NamedTuple], measure: Callable[..., dict], table: Callable, facts: dict, arguments: Namespace
) -> list[dict]:
    """Measures, prints, writes and plots the cases of --only."""
    console, rows = Console(highlight=False, width=180), []
    with console.status("") as status:
        for case in cases:
            if arguments.only not in (None, case.table):
                continue
            status.update(str(case))
            rows.append(measure(case, facts))
            if arguments.json is not None:  # after every case: nothing is lost if it is stopped
                arguments.json.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1) + "\n")
    console.print(table(rows))
    if arguments.plot is not None:
        draw_plot(rows, arguments.plot)
    return rows


def main() -> None:
    options = parser(__doc__, dict.fromkeys(case.table for case in CASES))
    options.add_argument("--instructions", type=float, default=26, help="of a 16-bit logit, without filters")
    arguments = options.parse_args()
    facts = environment(arguments.threads)
    facts |= {"instructions": arguments.instructions, "instructions_a_second": instructions_a_second()}
    cases = [case for case in CASES if DEVICE == "cuda" or case.fits_a_cpu()]
    tabulated(cases, measured, as_table, facts, arguments)


if __name__ == "__main__":
    main()
