"""Run a function in several processes that know each other by torch.distributed, as `torchrun` does."""

import os
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SECONDS = 60  # that a rank waits for another one


def on_ranks(count, work, folder, *arguments):
    """What `work(folder, *arguments)` returns in each of `count` processes, or the exceptions' texts if one raises."""
    processes = start(count, work, folder, *arguments)
    for process in processes:
        process.join()
    found = [Path(folder, f"result-{rank}") for rank in range(count)]
    results = [torch.load(each, weights_only=False) if each.exists() else "it died" for each in found]
    problems = [f"rank {rank}: {result}" for rank, result in enumerate(results) if isinstance(result, str)]
    assert not problems, "\n".join(problems)
    return results


def start(count, work, folder, *arguments):
    """The processes, which have begun."""
    for left in [Path(folder, "store"), *Path(folder).glob("result-*")]:
        left.unlink(missing_ok=True)
    context = mp.get_context("spawn")
    processes = [
        context.Process(target=_rank, args=(rank, count, work, str(folder), arguments)) for rank in range(count)
    ]
    for process in processes:
        process.start()
    return processes


def _rank(rank, count, work, folder, arguments):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=SECONDS), world_size=count, rank=rank)
    try:
        result = work(folder, *arguments)
    except Exception:
        result = traceback.format_exc()
    torch.save(result, Path(folder, f"result-{rank}"))
    if not isinstance(result, str):
        dist.barrier()  # gloo aborts where one is still talking to another that has left
        dist.destroy_process_group()
