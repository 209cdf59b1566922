"""A linear layer as a function: on a CPU, for the few rows of a tree, in less time than the module itself takes."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from heavypath.speculative.models.structure import has_hooks

# At most FEW_ROWS rows times a weight of at most SMALL elements are multiplied as columns.
FEW_ROWS = 5
SMALL = 1 << 19
_HAS_BOTH = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()


def linear_of(module: Any, from_memory: bool) -> Callable[[Tensor], Tensor]:
    """A function that does what a linear layer does to [rows, K].

    from_memory: whether the model's weights are read from memory in each pass, see `read_from_memory`
    """
    if not (from_memory and _HAS_BOTH and type(module) is nn.Linear) or has_hooks(module):
        return module
    weight = module.weight
    plain = type(weight) is nn.Parameter  # torchao quantises the weight, not the module
    return _FewRows(module) if plain and weight.is_cpu and weight.dtype == torch.float32 else module


def read_from_memory(weights: Iterable[Tensor]) -> bool:
    """Whether no core's cache holds a model's weights."""
    return sum(weight.numel() for weight in weights) > 1 << 20


class _FewRows:
    """A linear layer in fp32 on a CPU, for few rows, where the time goes into reading the weight.

    PyTorch asks MKL for rows @ weight.T. Written as weight @ rows.T, the same product takes MKL a third to two thirds
    of the time, for 2 to 5 rows and a small weight. oneDNN, which torch.compile uses on a CPU, has a larger fixed cost,
    but reads larger weights 1.3 to 5 times as fast as MKL, also for whole prompts (`python bench/linear.py`).

    oneDNN generates code for each number of rows that it meets, which takes half a millisecond and 0.7 MB. So numbers
    of rows are rounded up, to four different ones between a power of two and the next.
    """

    def __init__(self, module: nn.Linear):
        self._module = module
        self._small = module.weight.numel() <= SMALL

    def __call__(self, hidden: Tensor) -> Tensor:
        module, rows = self._module, len(hidden)
        if self._small and rows > FEW_ROWS:
            return module(hidden)
        if not self._small:
            step = 1 << max(0, rows.bit_length() - 3)
            padded = pad(hidden, (0, 0, 0, -rows % step)) if rows % step else hidden
            product = torch.ops.mkldnn._linear_pointwise(padded, module.weight, module.bias, "none", [], "")
            return product[:rows]
        flat = hidden.contiguous() if rows > 1 else hidden.repeat(2, 1)
        product = torch.mm(module.weight, flat.t()).t()
        if rows == 1:
            product = product[:1]
        return product if module.bias is None else product + module.bias
