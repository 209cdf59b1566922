"""Triton and its language, or stand-ins for them where Triton is not installed, as on macOS and Windows.

So modules with kernels can be imported without Triton, for their references and their C++ forms. `choose_impl` raises
an error if a Triton kernel is requested that cannot run.
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
        """Stand-in for tl.constexpr: functions on the host read its value."""

        def __init__(self, value: Any) -> None:
            self.value = value

    class Absent:
        """Stand-in whose attributes, and whatever its calls and decorators return, are this object again."""

        constexpr = Constant

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Return this object, whatever is called or decorated."""
            return self

    triton = tl = knobs = CompiledKernel = driver = Absent()

__all__ = ["MISSING", "CompiledKernel", "driver", "knobs", "tl", "triton"]
