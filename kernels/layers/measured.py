"""What measurements on GPUs showed to be faster.

Both tables are empty. On an H200 requests made each pass slower, and all products of a pass by few_rows.py took longer
with 64 rows, and up to 3% less time with 16 rows and 1 (bench/results/weight_stream-h200.json). It is not measured for
each shape yet.

FASTER: shapes for which the kernel of few_rows.py is faster than cuBLAS (gated: than cuBLAS and silu).
        `python bench/kernels/bench_linear.py kernel_linear.json` prints what a GPU's results add.
AHEAD:  how much of the next weight a pass requests in the second cache, see prefetch.py.
        `python bench/weight_stream.py` prints the amounts with which a pass is fastest, if any is faster than none.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class Amounts(NamedTuple):
    """Bytes of a weight that are requested during a layer's attention, and during another small kernel of a layer."""

    attention: int
    small: int


# GPU name -> (outputs, columns, gated) -> (least, most) rows.
FASTER: dict[str, dict[tuple[int, int, bool], tuple[int, int]]] = {}
AHEAD: dict[str, Amounts] = {}  # by GPU name


def is_faster(x: Tensor, weight: Tensor, gated: bool) -> bool:
    """Whether the kernel was measured to be faster on this GPU, for x [R, K] in 16 bits and a weight [N, K]."""
    if not FASTER or x.dtype.itemsize != 2 or not weight.is_contiguous():
        return False
    outputs, columns = weight.shape
    least, most = FASTER.get(_name(x.device), {}).get((outputs, columns, gated), (1, 0))
    return least <= len(x) <= most


def amounts_ahead(device: torch.device) -> Amounts | None:
    """How much to request on a device; None where that was not measured to be faster."""
    return AHEAD.get(_name(device)) if AHEAD and device.type == "cuda" else None


@cache
def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
