"""How many cores this process may use, how busy they are, and how many threads PyTorch uses by default."""

import math
import os
import time
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
MOMENT = 0.1  # seconds for which the cores are observed
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds in each period, or "max"


class Load(NamedTuple):
    """The load of the machine.

    working: number of cores that are busy at present
    cores:   number of cores that this process may use
    threads: number of threads that PyTorch uses
    """

    working: float
    cores: int
    threads: int

    @property
    def busy(self) -> bool:
        """Whether fewer cores are free than there are threads; a little load is ignored."""
        return self.working > self.cores - self.threads + max(0.5, 0.1 * self.cores)

    def __str__(self) -> str:
        cores = f"{self.cores} core{'' if self.cores == 1 else 's'}"
        return f"load {self.working:.1f} on {cores}, {self.threads} thread{'' if self.threads == 1 else 's'}"


def usable_cores(quota: Path = QUOTA) -> int:
    """The number of cores that this process may run on, or its container's share (rounded up) if that is less.

    quota: the file in which Linux has the container's share
    """
    cores = len(os.sched_getaffinity(0))
    try:
        allowed, period = quota.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return cores
    return cores if allowed == "max" else min(cores, max(1, math.ceil(int(allowed) / int(period))))


def default_threads() -> int:
    """The number of threads that PyTorch uses by default: OMP_NUM_THREADS, or one for each core.

    PyTorch ignores a container's share. With hyper-threading it may use half as many threads.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(given) if given.isdecimal() and int(given) else len(os.sched_getaffinity(0))


def running(stat: Path = STAT, seconds: float = MOMENT) -> float:
    """The number of busy cores at present, among those that this process may use, while it sleeps for `seconds`.

    stat: the file in which Linux counts the time of each core

    The load average of the last minute would also count processes that have ended, like an installation. It is returned
    only if `stat` cannot be read.
    """
    before = _clocks(stat)
    time.sleep(seconds)
    passed = {core: [b - a for a, b in zip(before[core], now, strict=True)] for core, now in _clocks(stat).items()}
    shares = [1 - sum(ticks[3:5]) / sum(ticks) for ticks in passed.values() if sum(ticks)]
    return sum(shares) if shares else os.getloadavg()[0]


def _clocks(stat: Path) -> dict[str, list[int]]:
    """Core -> ticks (user, nice, system, idle, iowait, ...), for the cores that this process may use."""
    usable = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    try:
        rows = [line.split() for line in stat.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return {}
    return {row[0]: [int(ticks) for ticks in row[1:9]] for row in rows if row and row[0] in usable}
