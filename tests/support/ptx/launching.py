"""A launch of Triton's as the machine takes it: parameters as bits, and the memory that the launch may touch."""

import gc
import struct
from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction


def arguments_of(kernel: CompiledKernel, given: tuple[object, ...]) -> tuple[list[int], list[tuple[int, int]]]:
    """The bits of each parameter, and the hulls of tensors. given: all arguments of the launch, constants too."""
    arguments, ranges = [], []
    for kind, value in zip(kernel.src.signature.values(), given, strict=True):
        if kind == "constexpr":
            continue
        value = value if isinstance(value, Tensor) else getattr(value, "base", value)  # read as another type
        arguments.append(_bits(kind, value))
        if isinstance(value, Tensor) and value.numel():
            ranges.append(_hull(value))
    return arguments, ranges


def _bits(kind: str, value: Any) -> int:
    """The bits of an argument of a type of Triton's."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    if kind in ("fp32", "fp64"):
        return int.from_bytes(struct.pack("<f" if kind == "fp32" else "<d", value), "little")
    return int(value)


def _hull(tensor: Tensor) -> tuple[int, int]:
    """The memory from a tensor's first number to its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def without_ptxas(backend: Any = None, stages: dict[str, Any] | None = None, *_: object) -> tuple[str, str] | None:
    """Triton's hook into the stages of its compiler, `knobs.runtime.add_stages_inspection_hook`: no machine code."""
    if stages is None:
        return "no machine code", "no machine code"
    stages["cubin"] = lambda source, metadata: b""
    return None


def compiling_anew(launch: Callable[..., Any]) -> Callable[..., Any]:
    """`JITFunction.run` for tests that change a module's constants, which compiled kernels have in them."""

    def run(function: Any, *given: Any, **options: Any) -> Any:
        try:
            return launch(function, *given, **options)
        except RuntimeError as error:
            if not str(error).startswith("Global variable"):
                raise
        for each in gc.get_objects():
            if type(each) is JITFunction:
                each.hash, each.used_global_vals = None, {}
                each.device_caches.clear()
        return launch(function, *given, **options)

    return run
