"""A plugin of pytest: kernels run as the PTX that Triton compiles for a GPU, on the CPU.

    PYTHONPATH=tests/support python -m pytest -p ptx.plugin --ptx sm_90 tests/kernels/test_sampling.py

The machine with a GPU is the one that stand_in_gpu.py plays. Each launch compiles with Triton's own compiler, but for
ptxas, and the machine of machine/ runs what it gives. A launch fails with `FaultError` where

    * an access is misaligned, or outside the tensors that the launch was given;
    * warps of a program meet in memory with no barrier between them, and one of them changes what is there;
    * lanes of one store write different values to one address;
    * a byte of shared memory is read that nothing has written;
    * lanes of a warp come apart where they must be together, or not all warps come to a barrier;
    * wgmma lacks its fences, or a program ends with copies or products on their way;
    * no program gets on.

Registers and shared memory begin as garbage. Copies and products that are asynchronous are done as late as their waits
allow, or at once; warps and programs take turns at random with --ptx-seed, and in tests that have the `adversary`.
Instructions that are approximate are off by what PTX allows. Not played: an order of memory that is weaker than that of
the instructions, tensor memory (sm_100), time.
"""

import os

os.environ["TRITON_INTERPRET"] = "0"  # kernels are compiled; before Triton is imported
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # of kernels that tests have of their own

import random
from collections import Counter
from functools import cache
from typing import NamedTuple

import pytest
import stand_in_gpu
import triton
from ptx.compile import BUILT
from ptx.emulator import PLAIN, Emulated, FaultError, Schedule
from ptx.launching import arguments_of, compiling_anew, without_ptxas
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

ARCHS = {"sm_80": 80, "sm_90": 90}
LONGEST = 600  # seconds of a processor that a test may take
SPOILED = 1 << 24  # bytes up to which new memory of the GPU becomes garbage; some tests have more that nobody touches
CANNOT_RUN = {  # and what needs Triton's interpreter, and says so
    "test_compile_and_export_see_one_node": "what torch.export makes does not know of a GPU that is only played",
}
FOLLOWS_ADDRESSES = {"_compact_kernel"}  # finds tensors by a table, so any memory of the GPU is allowed

_source: random.Random | None = None  # of a schedule for each launch
_errors = 0  # of approximate instructions: the same in all launches
_launched: Counter[str] = Counter()
_variants: set[str] = set()  # of kernels


class Launched(NamedTuple):
    """A compiled kernel on a grid."""

    kernel: CompiledKernel
    grid: tuple[int, int, int]

    @property
    def arg_names(self) -> list[str]:
        return self.kernel.src.fn.arg_names


@cache
def emulated(kernel: CompiledKernel) -> Emulated:
    return Emulated(kernel.asm["ptx"])


def run(launched: Launched, *given: object) -> None:
    """Run a launch with all of its arguments, constants too."""
    kernel, name = launched.kernel, launched.kernel.metadata.name
    arguments, ranges = arguments_of(kernel, given)
    if name in FOLLOWS_ADDRESSES:
        ranges += stand_in_gpu.memory()
    schedule = PLAIN if _source is None else Schedule.drawn(_source, _errors)
    machine, warps = emulated(kernel), kernel.metadata.num_warps
    try:
        machine.launch(launched.grid, 32 * warps, kernel.metadata.shared, arguments, ranges, schedule)
    except FaultError as fault:
        from heavypath.kernels.tickets import buffers

        buffers.clear()  # which it has left at any values
        raise FaultError(f"{name} {launched.grid}, {schedule}:\n    {fault}") from None
    _launched[name] += 1
    _variants.add(f"{name} {kernel.hash[:12]}")


def emulate_kernels() -> object:
    """Have the launches of compiled kernels come to `stand_in_gpu.launch`; returns what runs them."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(BUILT / "triton"))
    triton.knobs.runtime.interpret = False
    triton.knobs.runtime.add_stages_inspection_hook = without_ptxas
    JITFunction.run = compiling_anew(JITFunction.run)
    CompiledKernel._init_handles = lambda kernel: None
    CompiledKernel.launch_metadata = lambda *_: None
    CompiledKernel.run = property(
        lambda kernel: (
            lambda x, y, z, stream, function, packed, told, enter, leave, *given: stand_in_gpu.launch(
                Launched(kernel, (x, y, z)), *given
            )
        )
    )
    return run


class Adversary:
    """The same to a test as that of adversary.py: launches within take turns at random, by a seed."""

    def __init__(self, seed: int, everywhere: bool = False):
        self.seed = seed

    @property
    def launched(self) -> Counter[str]:
        return _launched - self.before

    def knows(self, *tensors: Tensor) -> None:
        """Launches may touch all memory that a table of theirs names."""

    def met(self, *kernels: str) -> None:
        assert {*kernels} <= {*self.launched}

    def __enter__(self) -> "Adversary":
        global _source
        self.before, self.outer, _source = _launched.copy(), _source, random.Random(self.seed)
        return self

    def __exit__(self, *_) -> None:
        global _source
        _source = self.outer


def pytest_addoption(parser):
    parser.addoption("--ptx", choices=[*ARCHS], default="sm_90", help="the GPU that kernels are compiled for")
    parser.addoption("--ptx-seed", type=int, metavar="SEED", help="have warps and programs take turns at random")


def pytest_load_initial_conftests(early_config):
    """Before tests/conftest.py looks for a GPU."""
    global _source, _errors
    options = early_config.known_args_namespace
    stand_in_gpu.LONGEST, stand_in_gpu.SPOILED = LONGEST, SPOILED
    stand_in_gpu.install(ARCHS[options.ptx], emulate_kernels)
    early_config.pluginmanager.register(stand_in_gpu, "stand_in_gpu")
    if options.ptx_seed is not None:
        _source, _errors = random.Random(options.ptx_seed), options.ptx_seed


def pytest_collection_modifyitems(items):
    for item in items:
        if item.originalname in CANNOT_RUN:
            item.add_marker(pytest.mark.skip(reason=CANNOT_RUN[item.originalname]))


def pytest_terminal_summary(terminalreporter):
    """Say what ran; it is empty in the process that only hands out tests."""
    if _launched:
        counts = {name.strip("_").removesuffix("_kernel"): count for name, count in sorted(_launched.items())}
        launches = ", ".join(f"{name} {count}" for name, count in counts.items())
        terminalreporter.write_line(f"{len(_variants)} variants as PTX, launches: {launches}")
