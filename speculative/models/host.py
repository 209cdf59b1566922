"""The memory of the host that is free."""

from pathlib import Path

CONTROL_GROUP = Path("/sys/fs/cgroup")  # of version 2, as a container sees its own


def free_memory() -> int:
    """Bytes that this process may still take, by Linux and by the limit of its control group, if it has one."""
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(facts["MemAvailable"].split()[0]) << 10
    try:
        limit, used = ((CONTROL_GROUP / f"memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - int(used)))
