"""The kernels of a piece of work by PyTorch's profiler: how often each runs, and how long. On a CPU: operations."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities


def kernels_of(run: Callable[[], object], repeats: int) -> list[dict]:
    """Of one run, those that take longest first: "name", "count" and "microseconds", means over the repeats.

    On a GPU these are what it did, also what a CUDA graph launched; without one, operations of PyTorch.
    """
    gpu = ProfilerActivity.CUDA in supported_activities()
    run()
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(repeats):
            run()
        if gpu:
            torch.cuda.synchronize()
    found = []
    for event in profiler.key_averages():
        spent = event.self_device_time_total if gpu else event.self_cpu_time_total
        if spent > 0:
            found.append({"name": event.key[:160], "count": event.count / repeats, "microseconds": spent / repeats})
    return sorted(found, key=lambda kernel: -kernel["microseconds"])


def kernel_lines(kernels: list[dict], most: int) -> list[str]:
    """A table of the first ones."""
    lines = [f"{'us':>9} {'times':>6}  name"]
    for kernel in kernels[:most]:
        lines.append(f"{kernel['microseconds']:>9.1f} {kernel['count']:>6.1f}  {kernel['name'][:120]}")
    total = sum(kernel["microseconds"] for kernel in kernels)
    return [*lines, f"{total:>9.1f} {sum(kernel['count'] for kernel in kernels):>6.1f}  all {len(kernels)} of the list"]
