"""Kernels as Triton compiled them, run by the machine on the memory of the host.

kernel = Emulated(ptx)
kernel.launch(grid, threads, shared_bytes, arguments, ranges, schedule)
"""

import ctypes
import random
from typing import NamedTuple

import numpy as np
from ptx.compile import addresses, machine
from ptx.lower import lower
from ptx.parse import parse

ROW = np.dtype([
    ("run", "u8"), ("first", "u4"), ("guard", "i4"), ("sense", "i4"), ("kind", "i4"), ("target", "i4"), ("_", "u4")
])  # fmt: skip
COUNT = np.dtype([("requests", "u8"), ("units", "u8"), ("least", "u8")])
AT_ONCE = (1, 2, 4, 16, 1 << 30)  # programs
MEMORY = 1 << 29  # bytes of registers that programs may take together
LIMIT = 10**9  # instructions of a launch


class FaultError(AssertionError):
    """A launch that would go wrong on a GPU."""


class Schedule(NamedTuple):
    """In which order warps and programs run, when asynchronous work is done, and how approximate instructions err.

    A GPU differs in all but the last from one launch to the next.

    seed:    0 for programs in their order
    at_once: programs that run together
    late:    0 for asynchronous work at once, 1 at the wait for it, 2 for either by chance
    errors:  a seed
    """

    seed: int
    at_once: int
    late: int
    errors: int = 0

    @classmethod
    def drawn(cls, source: random.Random, errors: int) -> "Schedule":
        return cls(source.randrange(1, 1 << 60), source.choice(AT_ONCE), source.randrange(3), errors)


PLAIN = Schedule(0, 4, 1)


class _Job(ctypes.Structure):
    """machine.h has the same."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rows", "operands", "constants")),
        *((name, ctypes.c_int64) for name in ("constant_bytes", "register_bytes")),
        ("ranges", ctypes.c_void_p), ("range_count", ctypes.c_int64), ("counts", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("seed", "errors")),
        *((name, ctypes.c_int64) for name in ("limit", "most")),
        ("grid", ctypes.c_uint32 * 3), *((name, ctypes.c_uint32) for name in ("threads", "shared", "at_once")),
        ("late", ctypes.c_int32), ("error_row", ctypes.c_int32), ("error", ctypes.c_char * 400),
    ]  # fmt: skip


class Emulated:
    """A kernel. counts: for each of its rows, see COUNT; they add up over launches."""

    def __init__(self, ptx: str):
        lowered = lower(parse(ptx))
        found = addresses(row.function for row in lowered.rows)
        self.lowered = lowered
        self.rows = np.zeros(len(lowered.rows), ROW)
        operands: list[int] = []
        for at, row in enumerate(lowered.rows):
            self.rows[at] = found[row.function], len(operands), row.guard, row.sense, row.kind, row.target, 0
            operands += row.operands
        self.operands = np.array([*operands, 0], np.int64)
        self.constants = np.frombuffer(lowered.constants, np.uint8).copy()
        self.counts = np.zeros(len(lowered.rows), COUNT)

    def launch(
        self, grid: tuple[int, int, int], threads: int, shared: int, arguments: list[int],
        ranges: list[tuple[int, int]], schedule: Schedule, most: int = 1 << 60,
    ) -> None:  # fmt: skip
        """Run the programs of the grid, at most so many of them; raises FaultError.

        arguments: the bits of each parameter; what is left out, as scratch memory of Triton's own, is 0
        ranges:    begin and end of the memory that the launch may touch
        """
        constants = self.constants.copy()
        values = [*arguments, *[0] * (len(self.lowered.parameters) - len(arguments))]
        for value, (place, size) in zip(values, self.lowered.parameters, strict=True):
            width = max(2, size)
            own = (value & (1 << 8 * size) - 1).to_bytes(width, "little") * 32
            constants[place : place + len(own)] = np.frombuffer(own, np.uint8)
        table = np.array(sorted(ranges) or [(0, 0)], np.uint64)
        warps = threads // 32
        fit = max(1, MEMORY // (warps * self.lowered.size + shared * 16 + 1))
        job = _Job(
            rows=self.rows.ctypes.data, operands=self.operands.ctypes.data, constants=constants.ctypes.data,
            constant_bytes=len(constants), register_bytes=self.lowered.size, ranges=table.ctypes.data,
            range_count=len(table), counts=self.counts.ctypes.data, seed=schedule.seed, errors=schedule.errors,
            limit=LIMIT, most=most, grid=grid, threads=threads, shared=shared, at_once=min(schedule.at_once, fit),
            late=schedule.late,
        )  # fmt: skip
        if machine().ptx_launch(ctypes.byref(job)):
            raise FaultError(f"{job.error.decode()}\n    {self.lowered.rows[job.error_row].text}")

    def traffic(self, space: str) -> tuple[int, int]:
        """Units that accesses to "global" or "shared" memory took, and the fewest that their bytes could take.

        A unit is a sector of 32 bytes of global memory; of shared memory a cycle, and a warp's access takes as many as
        it wants words of one bank; with 8 and 16 bytes a lane, in parts.
        """
        counts = self.counts[[at for at, row in enumerate(self.lowered.rows) if space in row.text]]
        return int(counts["units"].sum()), int(counts["least"].sum())
