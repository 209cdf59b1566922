"""Public functions as operators of PyTorch, `torch.ops.heavypath`, for torch.compile and torch.export.

OPERATORS    each function's operator by its name; all are defined at the first use, see `public`
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "OPERATORS":
        raise AttributeError(f"module 'heavypath.kernels.operators' has no attribute {name!r}")
    return import_module(f"{__name__}.public").OPERATORS
