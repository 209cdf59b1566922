"""A Triton kernel compiled for one kind of arguments, launched without Triton's lookup of the variant.

Triton's launch inspects every argument to find the variant of the kernel that fits: which arguments are None, their
types, which integers are 1 or multiples of 16, and which pointers are aligned to 16 bytes. For 40 arguments this takes
30 us, more than the rest of a launch on the host. A caller for whom none of this changed can launch the compiled kernel
directly, as Triton's tutorial on the fused softmax and PyTorch's compiler do:

    compiled = kernel[grid](...)  # compiles if necessary
    compiled[grid](...)           # all arguments by position, constants too
"""

from collections.abc import Mapping
from functools import cache
from itertools import chain
from typing import Any

from heavypath.kernels.language import CompiledKernel, driver, knobs


class Variant:
    """A kernel for arguments of one kind. All launches of a variant have in common

        the GPU;
        the arguments that are None, and the types of the others (integers from 2**31 on are of another type);
        the constants; and that pointers are aligned to 16 bytes, except those in do_not_specialize_on_alignment.

    All integers must be in the kernel's do_not_specialize.

    kernel:   a function under @triton.jit whose constants are its last parameters
    options:  of the compiler, such as num_warps
    compiled: the kernel that the first launch compiled; None before it, and in Triton's interpreter
    """

    def __init__(self, kernel: Any, options: Mapping[str, Any]) -> None:
        self.kernel = kernel
        self.options = options
        self.compiled: CompiledKernel | None = None


@cache
def variant_of(kernel: Any, kind: tuple[object, ...], options: tuple[tuple[str, Any], ...]) -> Variant:
    """Return the cached variant of a kernel; kind: a key of everything that its launches have in common."""
    return Variant(kernel, dict(options))


class Launch:
    """Launches of a variant with the same grid and the same last arguments, which are given by name."""

    def __init__(self, variant: Variant, grid: tuple[int, int, int], fixed: Mapping[str, Any]) -> None:
        names = variant.kernel.arg_names[-len(fixed) :]
        if [*fixed] != names:
            raise TypeError(f"expected the last arguments of the kernel, {names}, got {[*fixed]}")
        self._variant = variant
        self._grid = grid
        self._fixed = tuple(fixed.values())

    def __call__(self, stream: int | None, varying: tuple[Any, ...]) -> None:
        """Launch with the kernel's first arguments, followed by the fixed ones.

        stream: the result of `current_stream`
        """
        variant = self._variant
        compiled = self._variant.compiled
        if compiled is None:
            compiled = variant.kernel[self._grid](*chain(varying, self._fixed), **variant.options)
            if isinstance(compiled, CompiledKernel):
                variant.compiled = compiled
        elif stream is None:
            compiled[self._grid](*chain(varying, self._fixed))
        else:  # the same launch, without the profilers' hooks
            x, y, z = self._grid
            run: Any = compiled.run  # before `function`: this property loads the machine code on first use
            told = (compiled.packed_metadata, None, None, None)
            run(x, y, z, stream, compiled.function, *chain(told, varying, self._fixed))


def current_stream(device: int) -> int | None:
    """Return the stream of this device, which must be the current one; None if a profiler has set launch hooks."""
    enter = knobs.runtime.launch_enter_hook
    leave = knobs.runtime.launch_exit_hook
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        return None
    active: Any = driver.active
    return active.get_current_stream(device)
