"""The tables of kernels: what they compile to, and their times beside others. For cog, as tables.py."""

import json
import re
from collections.abc import Sequence

import cog
from tables import BENCH, Row, code, results, source, spread, table

KERNELS = BENCH.parent / "kernels"
ARCHS = ("sm_80", "sm_90", "sm_100")


def compiled() -> None:
    """Each Triton kernel's file and what its variants compile to, by the record of compile_report.py."""
    record = json.loads((BENCH / "results" / "compile_report.json").read_text(encoding="utf-8"))
    found: dict[str, dict[str, list[Row]]] = {}
    for case, kernels in record["kernels"].items():
        for figures in kernels.values():
            row = dict(zip(record["fields"], figures, strict=True))
            found.setdefault(row["kernel"], {}).setdefault(case.split()[0], []).append(row)
    rows: list[Sequence[object]] = []
    for kernel, of in sorted(found.items(), key=lambda item: (file_of(item[0]), item[0])):
        each = [of.get(arch, []) for arch in ARCHS]
        dots = [" ".join(sorted({row["dot"] for row in rows} - {""})) for rows in each]
        rows.append([
            code(kernel), code(f"kernels/{file_of(kernel)}"), max(map(len, each)),
            *(max((row["registers"] for row in rows), default=None) for rows in each),
            max(row["spill"] for rows in each for row in rows), " / ".join(filter(None, dots)),
        ])  # fmt: skip
    table(["kernel", "file", "variants", *ARCHS, "spilled", "products"], rows)
    cog.outl(f"\n*`python bench/compile_report.py`, Triton {record['triton']}*")


def file_of(kernel: str) -> str:
    """The file of a Triton kernel, below kernels/."""
    jitted = re.compile(rf"^def _?{kernel}_kernel\(", re.M)
    files = (path for path in sorted(KERNELS.rglob("*.py")) if jitted.search(path.read_text(encoding="utf-8")))
    return ", ".join(path.relative_to(KERNELS).as_posix() for path in files)


def products() -> None:
    """GB/s at which a weight is read while rows are multiplied by it: PyTorch, and this package."""
    found: dict[str, dict[int, dict[str, str]]] = {}
    for facts in (each["extra_info"] for each in results("linear")["benchmarks"]):
        weight, rows = facts["case"].removesuffix(" rows").rsplit(", ", 1)
        speed = f"{1e3 * facts['MB'] / facts['microseconds']:.1f}"
        found.setdefault(weight, {}).setdefault(int(rows), {})[facts["way"]] = speed
    counts = [1, 2, 5, 8, 16, 64]
    table(
        ["weight", *(f"{count} row{'s' * (count > 1)}" for count in counts), "reading"],
        [[weight, *(f"{own[count]['linear']} / {own[count]['heavypath']}" for count in counts), own[1]["read"]]
         for weight, own in found.items()],
    )  # fmt: skip
    source("linear")


def kernels() -> None:
    """What a CPU runs in place of the kernels: how many times as fast as the usual way."""
    rows: list[Sequence[object]] = []
    for name, peers in (
        ("attention", ("sdpa, dense mask",)),
        ("sampling", ("softmax, noise, topk", "softmax, noise, sort")),
        ("verification", ("loop, eager", "lazy loop, eager")),
    ):
        times: dict[str, dict[str, float]] = {}
        for facts in (each["extra_info"] for each in results(f"kernel_{name}")["benchmarks"]):
            times.setdefault(facts["case"], {})[facts["way"]] = facts["microseconds"]
        for peer in peers:
            ratios = sorted(each[peer] / each["heavypath"] for each in times.values() if peer in each)
            usual = peer.removesuffix(", eager")
            rows.append([name, usual, f"{ratios[0]:.2f}", f"{ratios[len(ratios) // 2]:.2f}", f"{ratios[-1]:.2f}"])
    table(["kernel", "beside", "least", "median", "most"], rows)
    source("kernel_attention", "kernel_sampling", "kernel_verification")


def attention_function() -> None:
    found = results("dropin")
    rows = []
    for row in found["rows"]:
        threads = row.get("threads", found["environment"].get("threads"))
        times = (f"{row[name]:.0f}" for name in ("sdpa", "heavypath"))
        work = f"{row['work']}, {threads} thread{'s' * (threads > 1)}"
        rows.append([work, *times, spread([row["ratio"], *row["quartiles"]])])
    table(["work", "sdpa, ms", "heavypath, ms", "ratio"], rows)
    source("dropin")
