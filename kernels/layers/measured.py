"""Shapes for which the kernel of few_rows.py was measured to be faster than cuBLAS (gated: than cuBLAS and silu).

`python bench/kernels/bench_linear.py kernel_linear.json` prints what a GPU's results add to FASTER. No GPU has been
measured yet.
"""

from functools import cache

import torch
from torch import Tensor

# GPU name -> (outputs, columns, gated) -> (least, most) rows.
FASTER: dict[str, dict[tuple[int, int, bool], tuple[int, int]]] = {}


def is_faster(x: Tensor, weight: Tensor, gated: bool) -> bool:
    """Whether the kernel was measured to be faster on this GPU, for x [R, K] in 16 bits and a weight [N, K]."""
    if not FASTER or x.dtype.itemsize != 2 or not weight.is_contiguous():
        return False
    outputs, columns = weight.shape
    least, most = FASTER.get(_name(x.device), {}).get((outputs, columns, gated), (1, 0))
    return least <= len(x) <= most


@cache
def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
