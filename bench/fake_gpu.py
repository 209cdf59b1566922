"""GPUs that kernels are compiled for and that need not be there: launches compile, and nothing runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel


class Gpu(NamedTuple):
    """Multiprocessors, and the most shared memory of a program, in KiB; a multiprocessor has 1 KiB more."""

    processors: int
    shared: int


GPUS = {80: Gpu(108, 163), 90: Gpu(132, 227), 100: Gpu(148, 227)}  # A100, H100 and H200, B200


class OnGpu(Tensor):
    """A CPU tensor that says it is on a GPU, and whatever is made from it says so too."""

    is_cuda = True


@contextmanager
def all_on_gpu() -> Iterator[None]:
    """Within, all tensors say that they are on a GPU; that costs them nothing, unlike a class of their own."""
    Tensor.is_cuda = True
    try:
        yield
    finally:
        del Tensor.is_cuda


def on_gpu(tensor: Tensor) -> Tensor:
    """The same tensor as one on a GPU."""
    return tensor.as_subclass(OnGpu)


class Driver:
    """Stands in for Triton's driver: it names the GPU to compile for, and has none to run on."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_for(arch: int, launched: Callable[[CompiledKernel], object]) -> None:
    """From now on this process compiles all launches for a GPU of this architecture, and runs none.

    launched is called with the kernel of every launch. A process can serve one architecture only.
    """
    CompiledKernel._init_handles = lambda kernel: None  # would load the machine code
    CompiledKernel.run = property(lambda kernel: lambda *_: launched(kernel))
    triton.runtime.driver.set_active(Driver(arch))
    facts = SimpleNamespace(multi_processor_count=GPUS[arch].processors, major=arch // 10, minor=arch % 10)
    torch.cuda.get_device_properties = lambda device=None: facts
    torch.cuda.current_device = lambda: -1  # where tensors on a CPU say they are
    torch.cuda.get_device_capability = lambda device=None: (facts.major, facts.minor)
