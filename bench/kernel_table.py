"""The table of Triton kernels in docs/kernels.md, from the record of compile_report.py, for cog; see tables.py."""

import json
import re
from collections.abc import Sequence

import cog
from tables import BENCH, Row, code, table

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
