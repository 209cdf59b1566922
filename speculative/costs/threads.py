"""The cores that this process may use, and how busy they are."""

import math
import os
import time
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
MOMENT = 0.1  # seconds in which it is looked at what works
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds in each period, or "max"


class Load(NamedTuple):
    """The load of the machine.

    working: cores that work just now
    cores:   that this process may use
    threads: that PyTorch uses
    """

    working: float
    cores: int
    threads: int

    @property
    def busy(self) -> bool:
        """True if fewer cores are free than there are threads; a little load is always there."""
        return self.working > self.cores - self.threads + max(0.5, 0.1 * self.cores)

    def __str__(self) -> str:
        cores = f"{self.cores} core{'' if self.cores == 1 else 's'}"
        return f"load {self.working:.1f} on {cores}, {self.threads} thread{'' if self.threads == 1 else 's'}"


def usable_cores(quota: Path = QUOTA) -> int:
    """The cores that this process may run on, or as many as its container may use at a time if these are fewer."""
    cores = len(os.sched_getaffinity(0))
    try:
        allowed, period = quota.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return cores
    return cores if allowed == "max" else min(cores, max(1, math.ceil(int(allowed) / int(period))))


def default_threads() -> int:
    """The threads that PyTorch takes if nobody says how many: as OMP_NUM_THREADS has it, or one for each core.

    Of a container's share it knows nothing. Where two of the cores are one of the processor, it may take half as many.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(given) if given.isdecimal() and int(given) else len(os.sched_getaffinity(0))


def running(stat: Path = STAT, seconds: float = MOMENT) -> float:
    """The cores that work at this moment, of those that this process may use; other processes' work, as it waits.

    The average of a minute would count what has ended: an installation, or the command before. It is taken only where
    the system does not tell more.
    """
    before = _clocks(stat)
    time.sleep(seconds)
    passed = {core: [b - a for a, b in zip(before[core], now, strict=True)] for core, now in _clocks(stat).items()}
    shares = [1 - sum(ticks[3:5]) / sum(ticks) for ticks in passed.values() if sum(ticks)]
    return sum(shares) if shares else os.getloadavg()[0]


def _clocks(stat: Path) -> dict[str, list[int]]:
    """Ticks of each core that this process may use: user, nice, system, idle, waiting for disks, and others."""
    usable = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    try:
        rows = [line.split() for line in stat.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return {}
    return {row[0]: [int(ticks) for ticks in row[1:9]] for row in rows if row and row[0] in usable}
