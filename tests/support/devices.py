"""Where kernels are tested: on the GPU if there is one, else on the CPU by Triton's interpreter."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLACES = {"torch": "cpu", "triton": DEVICE}  # by the name of the implementation


def moved(value: Any, device: str) -> Any:
    """The value with all tensors in it, in tuples, lists and dictionaries too, on a device, with the same strides."""
    return tree_map(lambda leaf: _on(leaf, device) if isinstance(leaf, Tensor) else leaf, value)


def _on(tensor: Tensor, device: str) -> Tensor:
    """A tensor on a device by the same strides, where `Tensor.to` would make one with gaps contiguous."""
    if tensor.device.type == device or tensor.is_contiguous():
        return tensor.to(device)
    elements = tensor.untyped_storage().nbytes() // tensor.itemsize
    stored = tensor.as_strided((elements,), (1,), 0).to(device)
    return stored.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def placed(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call, where its implementation takes them."""
    return moved(arguments, DEVICE) if arguments.get("impl") == "triton" else arguments


def run_on(device: str, function: Callable, *arguments: Any, **options: Any) -> Any:
    """What a function gives for these arguments on a device, brought to the CPU."""
    return moved(function(*moved(arguments, device), **moved(options, device)), "cpu")
