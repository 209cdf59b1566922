"""Compile at once the kernels that would otherwise be compiled launch by launch.

A kernel is compiled when it is first launched, which takes a second or so, while the launches after it wait: some
twenty kernels for a step. But the launches of a step are known before anything runs, because it asks the host nothing.
So they are noted in a CUDA graph's capture, where nothing is executed, and compiled side by side.
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

_noting = threading.Lock()  # Triton has one hook for all threads


@contextmanager
def uncompiled_launches() -> Iterator[list[Compilation]]:
    """Within the block, leave out launches of this thread that would compile first; yields them, each once.

    So nothing else that runs in the block may depend on their results.
    """
    thread, noted = threading.get_ident(), {}

    def note(**told: Any) -> bool | None:
        """Triton's hook before it compiles: True leaves the launch out."""
        if threading.get_ident() != thread:
            return before(**told) if before else None
        function = told["fn"].jit_function
        # `run` loads it, for which Triton 3.6 compiles a launcher in C.
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
    """Compile and load side by side, for this CUDA device; later launches find it there, other processes on disk.

    Raises what the compiler raises.
    """
    with ThreadPoolExecutor(os.cpu_count(), initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        for done in [pool.submit(compilation) for compilation in compilations]:
            done.result()
