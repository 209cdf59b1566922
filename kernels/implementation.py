"""Whether a call runs the Triton kernel or the reference: what `impl` means to every public function.

"triton" needs CUDA tensors or Triton's interpreter, "torch" takes anything, and "auto" is triton for CUDA tensors, else
torch. Some functions have a third: "native", compiled C++ for CPU tensors (`heavypath.kernels.native`), which "auto" is
for these where a compiler is there. Each kernel's own file checks what else the kernel cannot take.
"""

from torch import Tensor
from triton import knobs

from heavypath.kernels.native.library import library
from heavypath.kernels.native.recording import refuse


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
    return impl


def check_can_launch(tensor: Tensor) -> None:
    """Raise ValueError where a kernel cannot run on this tensor's device."""
    if not tensor.is_cuda and not knobs.runtime.interpret:
        raise ValueError(
            f"impl 'triton' needs CUDA tensors, got {tensor.device}; on a CPU take impl 'torch', "
            "or set TRITON_INTERPRET=1 before Python starts to run the kernel in Triton's interpreter"
        )
