"""Choose between the Triton kernel and the reference: the meaning of `impl` in every public function.

"triton" needs CUDA tensors or Triton's interpreter, "torch" takes anything, and "auto" is triton for CUDA tensors, else
torch. Some functions have a third: "native", compiled C++ for CPU tensors (`heavypath.kernels.native`). For these
"auto" is native where a compiler is found. Each kernel's own file checks what else the kernel cannot take.

torch.compile sees a public function as one operator (`operator`), and torch.func does not look into it.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack

from heavypath.kernels.language import MISSING, knobs
from heavypath.kernels.native.library import library
from heavypath.kernels.native.recording import refuse

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def operator(func: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Have torch.compile and torch.export call a public function by its operator, which is in `operators.public`.

    Otherwise it is called as it is, and torch.func's transforms are refused.
    """

    @wraps(func)
    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        if torch.compiler.is_compiling():
            return call_operator(func.__name__, args, kwargs)
        if peek_interpreter_stack() is not None and any(
            isinstance(each, Tensor) and is_functorch_wrapped_tensor(each) for each in (*args, *kwargs.values())
        ):
            raise TypeError(
                f"{func.__name__} cannot be transformed by torch.func (vmap, grad, jvp): it computes outside of "
                "PyTorch; give it all rows at once, it takes a batch"
            )
        return func(*args, **kwargs)

    return call


def call_operator(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return the result of a public function, called as its `torch.ops.heavypath` operator.

    args, named: the function's own arguments
    """
    from heavypath.kernels.operators import OPERATORS  # which imports all kernels

    return OPERATORS[name](args, named)


def choose_impl(function: str, impl: str, tensor: Tensor, *, native: bool = False) -> str:
    """Return "triton", "native" or "torch"; raises ValueError for an impl that `function` does not have here.

    native: whether the function has a native implementation for these arguments
    """
    if impl == "auto":
        if tensor.is_cuda:
            return _triton(function)
        if native and tensor.is_cpu and library() is not None:
            return "native"
        refuse(function)  # a recording would not run PyTorch again
        return "torch"
    if impl == "native" and native:
        if not tensor.is_cpu:
            raise ValueError(f"{function}: impl 'native' takes CPU tensors, got {tensor.device}; take impl 'triton'")
        if library() is None:
            raise ValueError(f"{function}: impl 'native' needs a C++ compiler (g++, or one that CXX names); got none")
        return impl
    if impl not in ("torch", "triton"):
        others = "'auto', 'native', 'triton' or 'torch'" if native else "'auto', 'triton' or 'torch'"
        raise ValueError(f"{function} has impl {others}, got {impl!r}")
    if impl == "torch":
        return impl
    if not tensor.is_cuda and not MISSING and not knobs.runtime.interpret:
        raise ValueError(
            f"impl 'triton' needs CUDA tensors, got {tensor.device}; on a CPU take impl 'torch', "
            "or set TRITON_INTERPRET=1 before Python starts to run the kernel in Triton's interpreter"
        )
    return _triton(function)


def _triton(function: str) -> str:
    if MISSING:
        raise ValueError(
            f"{function}: impl 'triton' needs the package triton, which is not installed: on Linux `pip install "
            "triton`, elsewhere take CPU tensors, which other implementations serve"
        )
    return "triton"


def check_rows(impl: str, changed: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a tensor whose last axis is not contiguous, so that a kernel cannot change it in place."""
    for name, tensor in changed.items():
        if impl != "torch" and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            got = f"strides {[*tensor.stride()]} of {[*tensor.shape]}"
            raise ValueError(f"impl {impl!r} changes {name} with a last stride of 1, got {got}; take impl 'torch'")


def in_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where its last axis is not contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
