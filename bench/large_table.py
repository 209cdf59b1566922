"""The table that large.py prints: a line of it with all that was measured, and how it is shown."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from profiled import kernel_lines

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


def lines(facts: dict[str, Any], rows: list[Row]) -> list[str]:
    """What is printed: of each method the size with the most tokens a second."""
    target, draft = (f"{facts[name]['layers']} x {facts[name]['hidden']}" for name in ("target", "draft"))
    best: dict[tuple[int, float, str], Row] = {}
    for row in rows:
        if row.tokens_per_second is not None:
            key = row.batch, row.temperature, row.method
            best[key] = max(best.get(key, row), row, key=lambda row: row.tokens_per_second or 0)
    failed = [f"{row}: {row.failed}"[:138] for row in rows if row.failed is not None]
    return [
        f"{facts['device']}, {facts['dtype']}: {target} and {draft}; {facts['prompts']} prompts, {facts['new_tokens']} "
        f"new; copy {facts['bandwidth'] / 1e12:.2f} TB/s: {facts['read_ms']:.2f} ms to read the target",
        line(COLUMNS),
        *(line(cells(row)) for row in best.values()),
        *kernels_and_phases(rows),
        *failed[:3],
        *[f"and {len(failed) - 3} more lines failed"] * (len(failed) > 3),
        *[NO_GPU] * (facts["gpu"] is False),
    ]


def kernels_and_phases(rows: list[Row]) -> list[str]:
    """Of the first line with a tree that was taken apart."""
    shown = [row for row in rows if row.kernels and row.method != "autoregressive"][:1]
    found = []
    for row in shown:
        found += [f"kernels of a step, {row}:", *kernel_lines(row.kernels or [], most=16)]
        if row.phases_ms is not None:
            found.append("its phases, ms: " + ", ".join(f"{name} {each:.3f}" for name, each in row.phases_ms.items()))
    return found


COLUMNS = {"b": 1, "T": -3, "method": -14, "nodes": 5, "tok/fwd": 7, "tok/s": 5, "x plain": 16, "x assist": 8}
COLUMNS |= {"ms/step (eager)": 15, "alone": 6, "models": 6, "rest (as run)": 14, "x limit (call)": 14}
COLUMNS |= {"GiB": 4, "graph": 5}  # how wide; negative: to the left


def line(entries: Iterable[str]) -> str:
    pairs = zip(entries, COLUMNS.values(), strict=True)
    return " ".join(entry.rjust(width) if width > 0 else entry.ljust(-width) for entry, width in pairs).rstrip()


def cells(row: Row) -> list[str]:
    """The entries of a line; "-" for what was not measured."""

    def number(value: float | None, spec: str, beside: float | None = None) -> str:
        shown = "-" if value is None else format(value, spec)
        return shown if beside is None else f"{shown} ({beside:{spec}})"

    return [
        str(row.batch),
        f"{row.temperature:g}",
        row.method.removeprefix("transformers "),
        str(row.nodes or "-"),
        number(row.tokens_per_forward, ".2f"),
        number(row.tokens_per_second, ".0f"),
        str(row.over_plain or "-"),
        number(None if row.over_assisted is None else row.over_assisted.median, ".2f"),
        number(row.step_ms, ".2f", row.eager_step_ms),
        number(row.alone_ms, ".2f"),
        number(row.models_ms, ".2f"),
        number(row.rest_alone, ".1%", row.rest),
        number(row.over_limit, ".2f", row.over_limit_of_call),
        number(None if row.peak_bytes is None else row.peak_bytes / 2**30, ".1f"),
        number(row.record_seconds, ".2f"),
    ]
