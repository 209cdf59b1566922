"""Kernels for GPUs that need not be there: launches compile and nothing runs; and what can be read off a kernel."""

import re
import subprocess
import tempfile
from collections import Counter
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
LEAST_SHARED = {80: 99}  # KiB that sm_86 and sm_89 (RTX 3090, A10, RTX 4090, L4) have, which run the programs for sm_80


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


class Figures(NamedTuple):
    """What one kernel compiled to. The columns of compile_report.py's table are described there."""

    kernel: str
    registers: int
    warps: int
    spill: int  # bytes
    shared: int  # bytes
    tensor_memory: int
    fit: int
    dot: str
    half_rows: int  # rows of the largest product of 16-bit numbers; 0 if there is none
    load: str
    load_bytes: int
    ahead: int
    waits: int
    loop: int  # instructions of the inner loop, and how many of them ...
    wgmma: int  # ... take products on sm_90,
    fp32: int  # ... compute in fp32,
    special: int  # ... run in the unit for special functions
    seconds: float  # that compiling took, on a machine as busy as it was


def figures(kernel: CompiledKernel, arch: int, seconds: float) -> Figures:
    """The figures of a kernel that was compiled for this architecture in so many seconds."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage = output_of(triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name)
        instructions, labels = parse(output_of(triton.knobs.nvidia.nvdisasm.path, "-c", cubin.name))
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    tensor_memory = getattr(kernel.metadata, "tmem_size", None) or 0
    products = re.findall(r"tt\.dot .* : tensor<(\d+)x\d+x(\w+)>", kernel.asm["ttir"])
    tensor_cores = {instruction.name for instruction in instructions} & {"HMMA", "HGMMA", "UTCHMMA"}
    units = (tensor_cores or {"FFMA"}) if products else set()
    loop = inner_loop(instructions, labels, units)
    names = Counter(instruction.name for instruction in loop)
    loads = Counter()
    for instruction in loop:
        if instruction.name in ("LDG", "LDGSTS"):
            loads[instruction.name, instruction.bytes] += instruction.bytes
    (((load, load_bytes), _),) = loads.most_common(1) or [(("", 0), 0)]
    return Figures(
        kernel=kernel_name(kernel.metadata.name),
        registers=registers,
        warps=warps,
        spill=sum(instruction.bytes for instruction in instructions if instruction.name in ("STL", "LDL")),
        shared=shared,
        tensor_memory=tensor_memory,
        fit=programs_that_fit(arch, registers, warps, shared, tensor_memory),
        dot="+".join(sorted(units)),
        half_rows=max((int(rows) for rows, dtype in products if dtype in ("f16", "bf16")), default=0),
        load=f"{load}.{8 * load_bytes}" if load else "",
        load_bytes=load_bytes,
        ahead=max((instruction.groups_left for instruction in loop), default=0),
        waits=sum(instruction.name == "WARPGROUP" and "DEPBAR" in instruction.modifiers for instruction in loop),
        loop=len(loop),
        wgmma=names["HGMMA"],
        fp32=sum(count for name, count in names.items() if re.match("F[A-Z]", name)),
        special=names["MUFU"],
        seconds=round(seconds, 2),
    )


def kernel_name(function: str) -> str:
    """What the report calls a kernel: the name of its function without underscores around it, and without "_kernel"."""
    return function.strip("_").removesuffix("_kernel")


class Instruction(NamedTuple):
    """`@P0 LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64] ;` has the name LDGSTS, and bits 128."""

    name: str
    modifiers: list[str]
    operands: str

    @property
    def bytes(self) -> int:
        """How many bytes a thread loads or stores by it."""
        sizes = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
        return next((sizes[modifier] for modifier in self.modifiers if modifier in sizes), 4)

    @property
    def groups_left(self) -> int:
        """Groups of asynchronous copies that may still be on their way after waiting."""
        wait = re.fullmatch(r"SB0, 0x(\w+)", self.operands) if self.name == "DEPBAR" else None
        return int(wait[1], 16) if wait else 0


def parse(listing: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions, and which of them follow a label, of what nvdisasm prints."""
    instructions, labels = [], {}
    for line in listing.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s+/\*\w+\*/\s+(?:@\S+ )?\s*([A-Z][\w.]*)\s*(.*?)\s*;", line):
            name, *modifiers = found[1].split(".")
            instructions.append(Instruction(name, modifiers, found[2]))
    return instructions, labels


def inner_loop(instructions: list[Instruction], labels: dict[str, int], units: set[str]) -> list[Instruction]:
    """The shortest loop in which one of these units works, one with asynchronous copies if there is; else all.

    Without units, the first loop with a global load.
    """
    loops = []
    for place, instruction in enumerate(instructions):
        target = re.search(r"\((\.L\w+)\)", instruction.operands) if instruction.name == "BRA" else None
        if target and labels[target[1]] <= place:
            loops.append(instructions[labels[target[1]] : place + 1])
    working = units or {"LDG"}
    loops = [loop for loop in loops if any(instruction.name in working for instruction in loop)]
    if not units:
        return loops[0] if loops else instructions
    copying = [loop for loop in loops if any(instruction.name == "LDGSTS" for instruction in loop)]
    return min(copying or loops, key=len, default=instructions)


def programs_that_fit(arch: int, registers: int, warps: int, shared: int, tensor_memory: int) -> int:
    """On one multiprocessor: 64 Ki registers given to warps by 256, 64 warps, 32 programs, 512 columns."""
    warps_of_registers = 65536 // (-(-registers // 8) * 8 * 32) // 4 * 4
    fit = [32, min(64, warps_of_registers) // warps, (GPUS[arch].shared + 1) * 1024 // (shared + 1024)]
    return min([*fit, 512 // tensor_memory] if tensor_memory else fit)


def output_of(*command: str) -> str:
    """What a command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
