"""Facts about the host: which of a device's tensors it may read while steps run there, and its memory."""

from pathlib import Path

import torch

CONTROL_GROUP = Path("/sys/fs/cgroup")  # of version 2, as a container sees its own


def host_can_read(device: torch.device) -> bool:
    """True if the host may read a device's tensors at any time, as on a CPU; for a GPU's tensors it would wait."""
    return device.type == "cpu"


def free_memory() -> int:
    """Bytes that this process may still take, by Linux and by the limit of its control group, if it has one."""
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(facts["MemAvailable"].split()[0]) << 10
    try:
        limit, used = ((CONTROL_GROUP / f"memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - int(used)))
