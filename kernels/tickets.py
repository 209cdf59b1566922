"""Find out which of the programs that share a piece of work finishes last: it goes on with what all others have stored.

Each program stores its part and then draws a ticket, a count of the programs before it. The program that draws the
highest ticket is the last one, and sets the counter back to zero. So a split reduction takes one launch, and no program
ever waits for another.

Counters live in one buffer for each GPU and stream, which is zeroed when it is made: the launches on one stream follow
each other. A CUDA graph has counters of its own, in its own memory, which it sets to zero itself, so that it may be
replayed on any stream and beside any other graph.
"""

# A type checker does not understand Triton kernels.
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

_buffers: dict[tuple[int, int], Tensor] = {}


def tickets(count: int, device: torch.device) -> Tensor:
    """`count` int32 counters that are zero; the kernel that draws tickets from them leaves them at zero."""
    if device.type != "cuda":  # in the interpreter an exception may end a kernel and leave its counters at any value
        return torch.zeros(count, dtype=torch.int32)
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = device.index, torch.cuda.current_stream(device).cuda_stream
    if key not in _buffers or len(_buffers[key]) < count:
        _buffers[key] = torch.zeros(max(4096, triton.next_power_of_2(count)), dtype=torch.int32, device=device)
    return _buffers[key]


@triton.jit
def is_last(ticket_ptr, COUNT: tl.constexpr):
    """Whether the other COUNT - 1 programs have all drawn a ticket here before, and so have stored their parts."""
    tl.debug_barrier()
    last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == COUNT - 1
    if last:
        tl.store(ticket_ptr, 0)
    return last
