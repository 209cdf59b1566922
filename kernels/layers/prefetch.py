"""Request a part of a weight in a GPU's second cache (L2), before the product that reads it.

    for each row of the weight [N, K]:  prefetch its first c lines of LINE bytes      c = nbytes / (N LINE)

A weight does not depend on activations. While a norm, rotary embedding, attention or silu runs, the memory has little
to do, and can bring what the next product reads. All programs of a product begin with the first columns of their rows,
so each finds its first blocks in the cache.

No decoder does this now: `measured.AHEAD` has no GPU, because on an H200 it made every pass slower. Other GPUs are not
measured yet.

A prefetch changes no value: NVIDIA, "Parallel Thread Execution ISA", section "prefetch". The kernel does not wait for
the bytes. It ends when all requests are made.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

import torch
from torch import Tensor

from heavypath.kernels.implementation import choose_impl
from heavypath.kernels.language import tl, triton

LINE = 128  # bytes that a prefetch brings
_LINES = 1024  # that a program requests


def prefetch_weight(weight: Tensor, nbytes: int, *, impl: str = "auto") -> None:
    """Request the first columns of all rows of a weight, about `nbytes` bytes; at least one line of each row.

    weight: [N, K] with contiguous columns. impl "torch" does nothing, and neither does a launch in Triton's interpreter

    Raises ValueError for another shape or other strides, and for fewer than 1 byte.
    """
    if weight.dim() != 2 or weight.stride(1) != 1 or nbytes < 1:
        got = f"{[*weight.shape]} with strides {[*weight.stride()]}, {nbytes} bytes"
        raise ValueError(
            f"prefetch_weight takes a weight [N, K] with contiguous columns, and 1 byte or more; got {got}"
        )
    if choose_impl("prefetch_weight", impl, weight) == "torch" or not weight.numel():
        return
    rows, columns = weight.shape
    lines_of_row = max(1, min(nbytes // (rows * LINE), columns * weight.itemsize // LINE))
    lines = rows * lines_of_row
    with torch.cuda.device_of(weight):
        _prefetch_kernel[(triton.cdiv(lines, _LINES),)](
            weight.detach().view(torch.int8),
            lines,
            lines_of_row,
            weight.stride(0) * weight.itemsize,
            LINE=LINE,
            LINES=_LINES,
            INTERPRETED=not weight.is_cuda,
            num_warps=4,
        )


@triton.jit
def offsets_of_lines(program, lines, lines_of_row, row_bytes, LINE: tl.constexpr, LINES: tl.constexpr):
    """Where the lines of a program begin, [LINES] bytes from the weight's begin; the last line fills up."""
    line = tl.minimum(program * LINES + tl.arange(0, LINES), lines - 1)
    return (line // lines_of_row).to(tl.int64) * row_bytes + (line % lines_of_row) * LINE


@triton.jit(do_not_specialize=["lines", "lines_of_row", "row_bytes"])
def _prefetch_kernel(
    weight, lines, lines_of_row, row_bytes, LINE: tl.constexpr, LINES: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Each program requests LINES lines."""
    at = weight + offsets_of_lines(tl.program_id(0), lines, lines_of_row, row_bytes, LINE, LINES)
    if not INTERPRETED:  # the interpreter has no inline assembly
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )
