"""Public functions as operators of PyTorch, `torch.ops.heavypath`, for torch.compile and torch.export.

OPERATORS    each function's operator by its name; whoever asks for it first defines them all, see `public`
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "OPERATORS":
        raise AttributeError(f"module 'heavypath.kernels.operators' has no attribute {name!r}")
    return import_module(f"{__name__}.public").OPERATORS
