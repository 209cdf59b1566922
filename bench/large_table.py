"""The table that large.py prints: a line of it with all that was measured, the kernels of a step, how it is shown."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from common import show
from torch.profiler import ProfilerActivity, profile, supported_activities

NO_GPU = "not measured: no GPU: steps as CUDA graphs beside eager ones, GiB, seconds to record a graph"


class Ratio(NamedTuple):
    """Median, least and largest over the prompts."""

    median: float
    least: float
    largest: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Ratio":
        return cls(median(numbers), min(numbers), max(numbers))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f}-{self.largest:.2f})"


@dataclass
class Row:
    """A line of the table; None is what was not measured."""

    batch: int
    temperature: float
    method: str
    nodes: int | None = None
    tokens_per_forward: float | None = None
    tokens_per_second: float | None = None
    over_plain: Ratio | None = None
    over_assisted: Ratio | None = None
    step_ms: float | None = None
    eager_step_ms: float | None = None
    alone_ms: float | None = None
    models_ms: float | None = None
    rest_alone: float | None = None
    rest: float | None = None
    over_limit: float | None = None
    at_others_acceptance: float | None = None
    over_limit_of_call: float | None = None
    peak_bytes: int | None = None
    record_seconds: float | None = None
    first_step_seconds: float | None = None  # which compiles kernels that no line before needed
    texts_equal_to_plain: int | None = None  # of greedy texts; in bfloat16 rounding may part them
    phases_ms: dict[str, float] | None = None  # of an eager step
    kernels: list[dict[str, Any]] | None = None  # of a step, those that take longest first, as `kernels_of` has them
    failed: str | None = None

    def __str__(self) -> str:
        nodes = "" if self.nodes is None else f" {self.nodes}"
        return f"batch {self.batch}, temperature {self.temperature:g}: {self.method}{nodes}"


def print_rows(facts: dict[str, Any], rows: list[Row]) -> None:
    """Of each method the size with the most tokens a second; then kernels and phases, and what failed."""
    target, draft = (f"{facts[name]['layers']} x {facts[name]['hidden']}" for name in ("target", "draft"))
    best: dict[tuple[int, float, str], Row] = {}
    for row in rows:
        if row.tokens_per_second is not None:
            key = row.batch, row.temperature, row.method
            best[key] = max(best.get(key, row), row, key=lambda row: row.tokens_per_second or 0)
    print(
        f"{facts['device']}, {facts['dtype']}: {target} and {draft}; {facts['prompts']} prompts, {facts['new_tokens']} "
        f"new; copy {facts['bandwidth'] / 1e12:.2f} TB/s: {facts['read_ms']:.2f} ms to read the target"
    )
    show([cells(row) for row in best.values()])
    for row in [row for row in rows if row.kernels and row.method != "autoregressive"][:1]:
        kernels = row.kernels or []
        show(kernels[:16], title=f"kernels of a step, {row}, {sum(each['microseconds'] for each in kernels):.0f} us")
        if row.phases_ms is not None:
            show([{"phase": name, "ms": each} for name, each in row.phases_ms.items()])
    failed = [f"{row}: {row.failed}"[:138] for row in rows if row.failed is not None]
    print(*failed[:3], *[f"and {len(failed) - 3} more lines failed"] * (len(failed) > 3), sep="\n")
    if not facts["gpu"]:
        print(NO_GPU)


def cells(row: Row) -> dict[str, Any]:
    """A line of the table; in brackets what large.py says of a column."""

    def beside(value: float | None, other: float | None, spec: str) -> str | None:
        shown = None if value is None else format(value, spec)
        return shown if shown is None or other is None else f"{shown} ({other:{spec}})"

    return {
        "b": row.batch,
        "T": row.temperature,
        "method": row.method.removeprefix("transformers "),
        "nodes": row.nodes,
        "tok/fwd": row.tokens_per_forward,
        "tok/s": row.tokens_per_second,
        "x plain": row.over_plain and str(row.over_plain),
        "x assist": row.over_assisted and row.over_assisted.median,
        "ms/step (eager)": beside(row.step_ms, row.eager_step_ms, ".2f"),
        "alone": row.alone_ms,
        "models": row.models_ms,
        "rest (as run)": beside(row.rest_alone, row.rest, ".1%"),
        "x limit (call)": beside(row.over_limit, row.over_limit_of_call, ".2f"),
        "at others'": row.at_others_acceptance,
        "GiB": row.peak_bytes and row.peak_bytes / 2**30,
        "graph": row.record_seconds,
    }


def kernels_of(run: Callable[[], object], repeats: int) -> list[dict]:
    """Of one run by PyTorch's profiler, those that take longest first: means over the repeats.

    On a GPU these are what it did, also what a CUDA graph launched; without one, operations of PyTorch.
    """
    gpu = ProfilerActivity.CUDA in supported_activities()
    run()
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(repeats):
            run()
        if gpu:
            torch.cuda.synchronize()
    found = []
    for event in profiler.key_averages():
        spent = event.self_device_time_total if gpu else event.self_cpu_time_total
        if spent > 0:
            found.append({"microseconds": spent / repeats, "count": event.count / repeats, "name": event.key[:160]})
    return sorted(found, key=lambda kernel: -kernel["microseconds"])
