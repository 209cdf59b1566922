"""Whether a call runs the Triton kernel or the reference: what `impl` means to every public function.

"triton" needs CUDA tensors or Triton's interpreter, "torch" takes anything, and "auto" is triton for CUDA tensors, else
torch. Each kernel's own file checks what else the kernel cannot take.
"""

from torch import Tensor
from triton import knobs


def choose_impl(function: str, impl: str, tensor: Tensor) -> str:
    """Return "triton" or "torch"; raises ValueError for an impl that `function` does not have."""
    if impl == "auto":
        return "triton" if tensor.is_cuda else "torch"
    if impl not in ("torch", "triton"):
        raise ValueError(f"{function} has impl 'auto', 'triton' or 'torch', got {impl!r}")
    return impl


def check_can_launch(tensor: Tensor) -> None:
    """Raise ValueError where a kernel cannot run on this tensor's device."""
    if not tensor.is_cuda and not knobs.runtime.interpret:
        raise ValueError(
            f"impl 'triton' needs CUDA tensors, got {tensor.device}; on a CPU take impl 'torch', "
            "or set TRITON_INTERPRET=1 before Python starts to run the kernel in Triton's interpreter"
        )
