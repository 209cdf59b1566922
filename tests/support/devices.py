"""Where kernels are tested: on the GPU if there is one, else on the CPU by Triton's interpreter."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLACES = {"torch": "cpu", "triton": DEVICE}  # by the name of the implementation


def moved(value: Any, device: str) -> Any:
    """The value with all tensors in it, also those in tuples, lists and dictionaries, on a device."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def placed(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call, where its implementation takes them."""
    return moved(arguments, DEVICE) if arguments.get("impl") == "triton" else arguments


def run_on(device: str, function: Callable, *arguments: Any, **options: Any) -> Any:
    """What a function gives for these arguments on a device, brought to the CPU."""
    return moved(function(*moved(arguments, device), **moved(options, device)), "cpu")
