"""What kernels' accesses take of memory: sectors of global memory, and cycles of shared memory, beside the fewest.

A sector is 32 bytes. A warp's access to shared memory takes as many cycles as it wants words of one bank; with 8 and 16
bytes a lane, in parts. Both are counted as the machine runs; `least` is what the same bytes would take side by side.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ptx.emulator import Emulated


class Traffic(NamedTuple):
    """A variant of a kernel, whose machine counts."""

    kernel: str
    machine: Emulated

    def of(self, space: str) -> tuple[int, int, int]:
        """Accesses of warps to "global" or "shared" memory, units that they took, and the fewest possible."""
        rows = [at for at, row in enumerate(self.machine.lowered.rows) if space in row.text]
        counts = self.machine.counts[rows]
        return tuple(int(counts[field].sum()) for field in ("requests", "units", "least"))


def row(arch: str, variants: list[Traffic]) -> dict[str, object]:
    """A line of the report: of all variants of a kernel, for a GPU."""
    found: dict[str, object] = {"arch": arch, "kernel": variants[0].kernel, "variants": len(variants)}
    for space in ("global", "shared"):
        accesses, units, least = (sum(part) for part in zip(*(each.of(space) for each in variants), strict=True))
        found |= {f"{space}_accesses": accesses, f"{space}_over_least": round(units / least, 3) if least else None}
    return found


def write_report(path: Path, arch: str, traffic: Iterable[Traffic]) -> None:
    """Add this process's lines to a file of JSON; others of the same GPU and kernel go."""
    by_kernel: dict[str, list[Traffic]] = {}
    for each in traffic:
        by_kernel.setdefault(each.kernel, []).append(each)
    new = [row(arch, variants) for _, variants in sorted(by_kernel.items())]
    known = json.loads(path.read_text()) if path.exists() else []
    replaced = {(each["arch"], each["kernel"]) for each in new}
    kept = [each for each in known if (each["arch"], each["kernel"]) not in replaced]
    path.write_text(json.dumps(kept + new, indent=1) + "\n")
