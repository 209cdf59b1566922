"""The product of a linear layer on a GPU: by the kernel of few rows where that is faster, see `few_rows_product`.

torchao's Float8WeightOnlyConfig leaves a weight in fp8 with a scale for each row. torchao itself writes that in 16 bits
and reads it again: five bytes for each number in place of one.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from heavypath.kernels.layers.few_rows import few_rows_product


def product_of(layer: Any) -> Callable[[Tensor], Tensor]:
    """The product of a linear layer without a bias, of a plain weight or a Float8Tensor."""
    if type(layer.weight).__name__ != "Float8Tensor":
        return lambda hidden: few_rows_product(hidden, layer.weight)
    if layer.weight.act_quant_kwargs is None and layer.weight.scale.numel() == len(layer.weight):
        return lambda hidden: few_rows_product(hidden, layer.weight.qdata, scale=layer.weight.scale.view(-1))
    return layer  # which quantises activations, too, or blocks
