"""A kernel as it was compiled for one kind of arguments, launched without a search for it.

Triton's own launch looks at every argument to find out which variant of the kernel fits. It asks which arguments are
None, their types, which integers are 1 or multiples of 16, and which pointers are aligned to 16 bytes. For 40 arguments
this takes 30 us, more than all else that a launch takes on the host. A caller who knows that nothing of it changed
launches the compiled kernel itself, as Triton's tutorial on the fused softmax and PyTorch's own compiler do:

    compiled = kernel[grid](...)  # compiles where it has to
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
        the constants; and that pointers are aligned to 16 bytes, but those in do_not_specialize_on_alignment.

    All integers are in the kernel's do_not_specialize.

    kernel:   a function under @triton.jit whose constants are its last parameters
    options:  of the compiler, such as num_warps
    compiled: what the first launch compiled; None before, and in Triton's interpreter
    """

    def __init__(self, kernel: Any, options: Mapping[str, Any]) -> None:
        self.kernel = kernel
        self.options = options
        self.compiled: CompiledKernel | None = None


@cache
def variant_of(kernel: Any, kind: tuple[object, ...], options: tuple[tuple[str, Any], ...]) -> Variant:
    """The variant of a kernel for launches of this kind: all that they agree in, in any form."""
    return Variant(kernel, dict(options))


class Launch:
    """Launches of a variant that also agree in their grid and in the last of their arguments, given by name."""

    def __init__(self, variant: Variant, grid: tuple[int, int, int], fixed: Mapping[str, Any]) -> None:
        names = variant.kernel.arg_names[-len(fixed) :]
        if [*fixed] != names:
            raise TypeError(f"expected the last arguments of the kernel, {names}, got {[*fixed]}")
        self._variant = variant
        self._grid = grid
        self._fixed = tuple(fixed.values())

    def __call__(self, stream: int | None, varying: tuple[Any, ...]) -> None:
        """Launch with these arguments, which are the first of the kernel, and the fixed ones.

        stream: what `current_stream` gives
        """
        variant, compiled = self._variant, self._variant.compiled
        if compiled is None:
            compiled = variant.kernel[self._grid](*chain(varying, self._fixed), **variant.options)
            if isinstance(compiled, CompiledKernel):
                variant.compiled = compiled
        elif stream is None:
            compiled[self._grid](*chain(varying, self._fixed))
        else:  # the same, with nothing for profilers
            x, y, z = self._grid
            run: Any = compiled.run  # before `function`, because it loads the machine code if nothing has
            told = (compiled.packed_metadata, None, None, None)
            run(x, y, z, stream, compiled.function, *chain(told, varying, self._fixed))


def current_stream(device: int) -> int | None:
    """The current stream of this device, which is the current one; None where a profiler wants to know of launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        return None
    active: Any = driver.active
    return active.get_current_stream(device)
