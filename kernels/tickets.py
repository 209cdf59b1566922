"""Who of the programs that share a piece of work arrives last: it alone goes on, and sees what all the others stored.

Each program stores its part, then draws a ticket; who draws the highest one puts the counter back to zero. So a split
reduction takes one launch, and no program ever waits for another. Counters live in one buffer for each GPU and stream,
zeroed when it is made: launches on one stream follow each other. A CUDA graph has counters of its own, in its own
memory, which it sets to zero itself: it may be replayed on any stream and beside any other graph.
"""

# Triton's language is no Python that a type checker knows.
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

_buffers: dict[tuple[int, int], Tensor] = {}


def tickets(count: int, device: torch.device) -> Tensor:
    """`count` int32 counters at zero, which the kernel that draws from them leaves at zero."""
    if device.type != "cuda":  # the interpreter: a kernel that an exception ended left its counters anywhere
        return torch.zeros(count, dtype=torch.int32)
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = device.index, torch.cuda.current_stream(device).cuda_stream
    if key not in _buffers or len(_buffers[key]) < count:
        _buffers[key] = torch.zeros(max(4096, triton.next_power_of_2(count)), dtype=torch.int32, device=device)
    return _buffers[key]


@triton.jit
def is_last(ticket_ptr, COUNT: tl.constexpr):
    """Whether all other COUNT - 1 programs have drawn a ticket here, and so stored what they had to store before."""
    tl.debug_barrier()
    last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == COUNT - 1
    if last:
        tl.store(ticket_ptr, 0)
    return last
