"""Run a function in several processes that know each other by torch.distributed, as `torchrun` does."""

import os
import time
import traceback
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SECONDS = 60  # that a rank waits for another one


def on_ranks(count, work, folder, *arguments, backend="gloo"):
    """What `work(folder, *arguments)` returns in each of `count` processes, or the exceptions' texts if one raises."""
    wait(start(count, work, folder, *arguments, backend=backend))
    found = [Path(folder, f"result-{rank}") for rank in range(count)]
    results = [torch.load(each, weights_only=False) if each.exists() else "it died" for each in found]
    problems = [f"rank {rank}: {result}" for rank, result in enumerate(results) if isinstance(result, str)]
    assert not problems, "\n".join(problems)
    return results


def start(count, work, folder, *arguments, backend="gloo"):
    """The processes, which have begun."""
    for left in Path(folder).glob("result-*"):
        left.unlink()
    context, store = mp.get_context("spawn"), Path(folder, f"store-{uuid4()}")
    processes = [
        context.Process(target=_rank, args=(rank, count, work, store, arguments, backend), daemon=True)
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    return processes


def wait(processes, seconds=600):
    """Wait until all have ended; those that have not by then are killed."""
    last = time.monotonic() + seconds
    for process in processes:
        process.join(max(0, last - time.monotonic()))
    for process in processes:
        process.kill()
        process.join()


def _rank(rank, count, work, store, arguments, backend):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    torch.set_num_threads(1)
    folder = str(store.parent)
    dist.init_process_group(backend, f"file://{store}", timedelta(seconds=SECONDS), world_size=count, rank=rank)
    try:
        result = work(folder, *arguments)
    except Exception:
        result = traceback.format_exc()
    torch.save(result, Path(folder, f"result-{rank}"))
    if not isinstance(result, str):
        dist.barrier()  # gloo aborts where one is still talking to another that has left
        dist.destroy_process_group()
