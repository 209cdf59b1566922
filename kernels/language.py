"""Triton and its language; or, where it is not installed, what stands for them, as on macOS and Windows.

Modules of kernels can be imported without Triton, for their references and for C++. `choose_impl` says what is missing
when a kernel is asked for.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

MISSING = find_spec("triton") is None

if TYPE_CHECKING or not MISSING:
    import triton
    import triton.language as tl
    from triton import knobs
    from triton.compiler import CompiledKernel
    from triton.runtime import driver
else:

    class Constant:
        """A constant of kernels, whose value functions on the host read, too."""

        def __init__(self, value: Any) -> None:
            self.value = value

    class Absent:
        """Every name of it is this again, and so is what its decorators make of a function."""

        constexpr = Constant

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Stand for what would be made of these."""
            return self

    triton = tl = knobs = CompiledKernel = driver = Absent()

__all__ = ["MISSING", "CompiledKernel", "driver", "knobs", "tl", "triton"]
