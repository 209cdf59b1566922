"""Run a command on a target that is split over N processes: `torchrun --nproc-per-node N -m heavypath.speculative ...`.

Rank 0 reads the prompt and writes the text. The other ranks only write their own errors.
"""

import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heavypath.speculative.ranks.group import Ranks

LIMIT = timedelta(minutes=10)  # how long a rank waits for another one, which may still be loading its weights


def rank_count() -> int:
    """The number of processes that torchrun has started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def this_rank() -> int:
    """The rank of this process among those that torchrun has started, from 0; 0 without torchrun."""
    return int(os.environ.get("RANK", "0")) if rank_count() > 1 else 0


def check_command(name: str | None) -> None:
    """Raise ValueError for a command that does not support torchrun."""
    if rank_count() > 1 and name not in (None, "generate"):
        raise ValueError(f"torchrun can start only `generate`, got {name} in {rank_count()} processes")


def join_ranks() -> "Ranks | None":
    """Join the other processes that torchrun has started; None without torchrun. Only rank 0's output is shown."""
    if rank_count() == 1:
        return None
    import torch
    import torch.distributed as dist

    from heavypath.speculative.ranks.group import Ranks

    device = None
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device is None else "nccl", timeout=LIMIT, device_id=device)
    if this_rank() > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process runs
    group = dist.group.WORLD
    assert group is not None
    return Ranks(group)


def leave_ranks() -> None:
    """Wait for the other processes, and leave the process group."""
    if rank_count() > 1:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
