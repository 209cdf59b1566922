"""Find out which of the programs that share a piece of work finishes last: it goes on with what all others have stored.

Each program stores its part and then draws a ticket, a count of the programs before it. The program that draws the
highest ticket is the last one, and sets the counter back to zero. So a split reduction takes one launch, and no program
ever waits for another.

Counters live in one buffer for each GPU and stream, which is zeroed when it is made: the launches on one stream follow
each other. A CUDA graph has counters of its own, in its own memory, which it sets to zero itself, so that it may be
replayed on any stream and beside any other graph: once, where `captured_on_one_stream` says that its launches follow
each other, too; otherwise before each launch, which takes as long as a small kernel.
"""

# A type checker does not understand Triton kernels.
# pyright: reportCallIssue=false

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

_of_streams: dict[object, Tensor] = {}
_of_capture = threading.local()


def tickets(count: int, device: torch.device) -> Tensor:
    """At least `count` int32 counters that are zero; the kernel that draws tickets from them leaves them at zero."""
    if device.type != "cuda":  # in the interpreter an exception may end a kernel and leave its counters at any value
        return torch.zeros(count, dtype=torch.int32)
    if torch.cuda.is_current_stream_capturing():
        buffers, key = getattr(_of_capture, "buffers", {}), device.index
    else:
        active: Any = driver.active
        buffers, key = _of_streams, (device.index, active.get_current_stream(device.index))
    counters = buffers.get(key)
    if counters is None or counters.numel() < count:
        size = max(4096, triton.next_power_of_2(count))
        counters = buffers[key] = torch.zeros(size, dtype=torch.int32, device=device)
    return counters


@contextmanager
def captured_on_one_stream() -> Iterator[None]:
    """Around the capture of one CUDA graph: all that this thread captures is on one stream, and so shares counters."""
    _of_capture.buffers = {}
    try:
        yield
    finally:
        del _of_capture.buffers


@triton.jit
def is_last(ticket_ptr, count):
    """Whether the other count - 1 programs have all drawn a ticket here before, and so have stored their parts."""
    tl.debug_barrier()
    last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(ticket_ptr, 0)
    return last
