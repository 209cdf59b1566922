"""Compile the kernels of a step in parallel, before its first run.

Triton compiles a kernel at its first launch, which takes about a second while later launches wait; a step has about
twenty kernels. The launches of a step do not depend on results, because it never synchronises with the host. So they
are collected while a CUDA graph is captured, when nothing is executed, and compiled in parallel.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from heavypath.kernels.language import knobs

Compilation = Callable[[], object]

_noting = threading.Lock()  # Triton has a single hook for all threads


@contextmanager
def uncompiled_launches() -> Iterator[list[Compilation]]:
    """Within the block, skip launches of this thread that would have to compile. Yields the list of their compilations.

    The list is filled at the end of the block, once for each kernel. No code in the block may need results of launches.
    """
    thread = threading.get_ident()
    noted = {}

    def note(**told: Any) -> bool | None:
        """Triton's hook before it compiles; returning True skips the launch."""
        if threading.get_ident() != thread:
            return before(**told) if before else None
        function = told["fn"].jit_function
        # The property `run` loads the kernel, for which Triton 3.6 compiles a launcher in C.
        noted[function, told["key"]] = lambda: function.preload(told["compile"]["specialization_data"]).run
        return True

    compilations: list[Compilation] = []
    with _noting:
        before = knobs.runtime.jit_cache_hook
        knobs.runtime.jit_cache_hook = note
        try:
            yield compilations
        finally:
            knobs.runtime.jit_cache_hook = before
            compilations += noted.values()


def compile_all(compilations: list[Compilation], device: torch.device) -> None:
    """Compile and load kernels in parallel, for this CUDA device; other processes find them in Triton's disk cache.

    Raises the compiler's errors.
    """
    with ThreadPoolExecutor(os.cpu_count(), initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        for done in [pool.submit(compilation) for compilation in compilations]:
            done.result()
