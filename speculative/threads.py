"""Threads: how many there are cores for, how busy these are, and how threads wait for each other.

PyTorch on a CPU runs an operation on several threads of OpenMP, which wait for each other at its end. By default they
wait by spinning, so that the next operation finds them awake. Where another process wants their cores, they spin for a
thread that is not running: small models then take 20 to 180 times as long. With OMP_WAIT_POLICY=PASSIVE they sleep
instead. To be woken costs some 50 microseconds an operation, which only models of a few million parameters notice: they
are best off with one thread, which waits for nobody.

OpenMP reads its environment once, when PyTorch is imported. So a program sets it before. The `heavypath` command does,
unless its user has; for other programs the package sets nothing.
"""

import math
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

WAIT_POLICY = "OMP_WAIT_POLICY"
WAIT_SETTINGS = (WAIT_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")  # of GNU's and of Intel's OpenMP
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds in each period, or "max"


class Load(NamedTuple):
    """The load of the machine.

    average: processes that ran or wanted to run, on average over the last minute; this one's own are among them
    cores:   that this process may use
    threads: that PyTorch uses
    """

    average: float
    cores: int
    threads: int

    @property
    def busy(self) -> bool:
        """True if fewer cores are free than there are threads; a little load is always there."""
        return self.average > self.cores - self.threads + max(0.5, 0.1 * self.cores)

    def __str__(self) -> str:
        cores = f"{self.cores} core{'' if self.cores == 1 else 's'}"
        return f"load {self.average:.1f} on {cores}, {self.threads} thread{'' if self.threads == 1 else 's'}"


def usable_cores(quota: Path = QUOTA) -> int:
    """The cores that this process may run on, or as many as its container may use at a time if these are fewer."""
    cores = len(os.sched_getaffinity(0))
    try:
        allowed, period = quota.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return cores
    return cores if allowed == "max" else min(cores, max(1, math.ceil(int(allowed) / int(period))))


def is_command(argv: list[str], original: list[str]) -> bool:
    """True if this process is the `heavypath` command, or `python -m` with the package's name.

    argv, original: sys.argv and sys.orig_argv. While Python looks for the module of -m, the first of argv is "-m".
    """
    if argv[:1] == ["-m"] and "-m" in original:
        return original[original.index("-m") + 1 :][:1] in (["heavypath"], ["heavypath.speculative"])
    return bool(argv) and Path(argv[0]).name == "heavypath"


def wait_passively(environment: MutableMapping[str, str]) -> None:
    """Let threads sleep while they wait, unless the environment says how they wait. Before PyTorch is imported."""
    if not waiting(environment):
        environment[WAIT_POLICY] = "PASSIVE"


def waiting(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment's setting for how threads wait; nothing for OpenMP's own default, to spin."""
    return {name: environment[name] for name in WAIT_SETTINGS if name in environment}
