"""The product of a linear layer on a GPU, by a kernel for few rows where that is faster, see `few_rows_product`.

torchao's Float8WeightOnlyConfig keeps a weight in fp8 with a scale for each row. torchao itself converts that weight to
16 bits in memory and reads it again, which moves five bytes per number instead of one.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from heavypath.kernels.layers.few_rows import few_rows_product


def product_of(layer: Any) -> Callable[[Tensor], Tensor]:
    """A function from hidden states [rows, K] to a linear layer's output [rows, n].

    layer: without a bias; its weight is plain or torchao's Float8Tensor. If it also quantises activations, or scales
        blocks of the weight, the layer itself is returned.
    """
    if type(layer.weight).__name__ != "Float8Tensor":
        return lambda hidden: few_rows_product(hidden, layer.weight)
    if layer.weight.act_quant_kwargs is None and layer.weight.scale.numel() == len(layer.weight):
        return lambda hidden: few_rows_product(hidden, layer.weight.qdata, scale=layer.weight.scale.view(-1))
    return layer  # it also quantises activations, or scales blocks
