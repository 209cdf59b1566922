"""Choose between the Triton kernel and the reference: the meaning of `impl` in every public function.

"triton" needs CUDA tensors or Triton's interpreter, "torch" takes anything, and "auto" is triton for CUDA tensors, else
torch. Some functions have a third: "native", compiled C++ for CPU tensors (`heavypath.kernels.native`). For these
"auto" is native where a compiler is found. Each kernel's own file checks what else the kernel cannot take.

Public functions that compute outside of PyTorch are `opaque`: neither torch.compile nor torch.func looks into them.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from triton import knobs

from heavypath.kernels.native.library import library
from heavypath.kernels.native.recording import refuse

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def opaque(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Have torch.compile call a function as it is, with a graph break, and torch.func's transforms refused.

    It costs half of what torch.compiler.disable does, and does not import the compiler where nobody compiles.
    """

    @wraps(function)
    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        func: Any = function
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(f"{function.__name__} computes outside of PyTorch")  # what fullgraph=True says
            func = torch.compiler.disable(call)
        elif peek_interpreter_stack() is not None and any(
            isinstance(each, Tensor) and is_functorch_wrapped_tensor(each) for each in (*args, *kwargs.values())
        ):
            raise TypeError(
                f"{function.__name__} cannot be transformed by torch.func (vmap, grad, jvp): it computes outside of "
                "PyTorch; give it all rows at once, it takes a batch"
            )
        return func(*args, **kwargs)

    return call


def choose_impl(function: str, impl: str, tensor: Tensor, *, native: bool = False) -> str:
    """Return "triton", "native" or "torch"; raises ValueError for an impl that `function` does not have here.

    native: whether the function has a native implementation of what is asked for
    """
    if impl == "auto":
        if tensor.is_cuda:
            return "triton"
        if native and tensor.is_cpu and library() is not None:
            return "native"
        refuse(function)
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
    if impl == "triton" and not tensor.is_cuda and not knobs.runtime.interpret:
        raise ValueError(
            f"impl 'triton' needs CUDA tensors, got {tensor.device}; on a CPU take impl 'torch', "
            "or set TRITON_INTERPRET=1 before Python starts to run the kernel in Triton's interpreter"
        )
    return impl


def in_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where its last axis is not contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
