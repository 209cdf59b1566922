"""Find out which of the programs that share some work finishes last: it goes on with the results of all others.

Each program stores its part and then draws a ticket, a count of the programs before it. The program that draws the
highest ticket is the last one, and sets the counter back to zero. So a split reduction takes one launch, and no program
ever waits for another.

Counters live in one buffer for each GPU and stream, which is zeroed when it is made. The launches on one stream follow
each other, whatever threads they are from, and each finds and leaves zeros. Counts that go on from one launch to the
next have counters of their own (see `traversal_kernel`). A CUDA graph has its own counters, so that it may be replayed
on any stream. The caller who captures it gives them by `counters_for`, since a buffer that is zero once stays so.
Otherwise the graph sets some in its own memory to zero before each kernel, and so does an operator of PyTorch.
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
    """Counters for `counters_for`: enough for most kernels, in 64 KiB."""
    return torch.zeros(1 << 14, dtype=torch.int32, device=device)


@contextmanager
def counters_for(counters: Tensor | tuple[()]) -> Iterator[None]:
    """Give int32 counters, which are zero, to the launches that this thread captures in the block, on one stream.

    They must be there for as long as the graph is. A launch that needs more of them has its own, captured or not.
    """
    before, _given.counters = getattr(_given, "counters", None), counters
    try:
        yield
    finally:
        _given.counters = before


def tickets(count: int, device: torch.device) -> Tensor:
    """At least `count` int32 counters that are zero; the kernel that draws tickets from them leaves them at zero."""
    index = device.index
    if index is None:  # a CPU; in the interpreter an exception may end a kernel and leave its counters at any value
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
    """Whether the other count - 1 programs have all drawn a ticket here before, and so have stored their parts."""
    tl.debug_barrier()
    last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(ticket_ptr, 0)
    return last
