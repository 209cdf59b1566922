"""Find the last program to finish among those that share some work; it continues with the results of all others.

Each program stores its part and then draws a ticket, the number of programs before it. The program with the highest
ticket is the last one, and resets the counter to zero. So a split reduction takes one launch, and no program ever waits
for another.

There is one buffer of counters for each GPU and stream, zeroed when it is allocated. Launches on one stream run one
after the other, from whatever threads, and each finds and leaves zeros. Counts that continue from one launch to the
next need separate counters (see `traversal_kernel`). A CUDA graph has separate counters, too, so that it can be
replayed on any stream: the caller who captures it passes them to `counters_for`, and they stay zero between replays.
Otherwise the graph zeroes counters in its memory before each kernel, and so does an operator of PyTorch.
"""

# pyright: reportCallIssue=false

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from heavypath.kernels.language import driver, tl, triton

buffers: dict[object, Tensor] = {}
_given = threading.local()


def new_counters(device: torch.device | str) -> Tensor:
    """Allocate zeroed counters for `counters_for`: 64 KiB, enough for most kernels."""
    return torch.zeros(1 << 14, dtype=torch.int32, device=device)


@contextmanager
def counters_for(counters: Tensor | tuple[()]) -> Iterator[None]:
    """Use these int32 counters, which must be zero, for launches that this thread captures in the block, on one stream.

    They must live as long as the graph. A launch that needs more counters allocates them.
    """
    before = getattr(_given, "counters", None)
    _given.counters = counters
    try:
        yield
    finally:
        _given.counters = before


def tickets(count: int, device: torch.device) -> Tensor:
    """Return at least `count` int32 counters that are zero; the kernel that uses them must leave them at zero."""
    index = device.index
    if index is None:  # a CPU: in the interpreter an exception can end a kernel before it resets its counters
        return torch.zeros(count, dtype=torch.int32, device="cpu")
    given = getattr(_given, "counters", None)
    if given is not None or torch.cuda.is_current_stream_capturing():
        if given is not None and len(given) >= count:
            return given
        return torch.zeros(count, dtype=torch.int32, device=device)
    active: Any = driver.active
    key = index, active.get_current_stream(index)
    counters = buffers.get(key)
    if counters is None or counters.numel() < count:
        size = max(4096, triton.next_power_of_2(count))
        counters = buffers[key] = torch.zeros(size, dtype=torch.int32, device=device)
    return counters


@triton.jit
def is_last(ticket_ptr, count):
    """Draw a ticket; returns whether all other count - 1 programs have drawn theirs, and so have stored their parts."""
    tl.debug_barrier()
    last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(ticket_ptr, 0)
    return last
