"""What each kernel compiles to on sm_80, sm_90 and sm_100; no GPU is needed.

    python bench/compile_report.py [--arch 90] [--case "bf16 D128"] [--json FILE]

Every case calls the package's own launcher. A launch compiles instead of running, for the GPU that a stand-in driver
names, in one process per architecture. What is printed is read off the machine code:

    regs, warps  registers of a thread, warps of a program
    spill        bytes of local memory that its instructions store and load
    KiB, tmem    shared memory and, on sm_100, columns of tensor memory that a program takes
    fit          programs that fit on a multiprocessor at once
    dot          what takes the products: HMMA (mma), HGMMA (wgmma), UTCHMMA (tcgen05), or FFMA without tensor cores
    load         the kind of global load that brings most bytes in the inner loop; LDGSTS is a copy to shared memory
    ahead        groups of such copies that may still be on their way when a block is used
    waits        for wgmma, in the inner loop; where ptxas takes products one by one, there is one for each
    loop         instructions of the inner loop: the shortest that takes products, with asynchronous copies if any has
                 them; of a kernel without products, the first that loads from global memory, which in gumbel_topk has
                 a thread draw 8 tokens; of a kernel without such loops, all instructions
    fp32, exp    those of the loop that compute in fp32, and in the unit for special functions

The exit status is 1 and a list says why if a case does not compile, if a kernel of the package is in no case, if
anything spills or takes more shared memory than there is, if 16-bit products of 64 rows and more lose wgmma on sm_90 or
wait for each, or if the inner loop of any 16-bit products loads less than 16 bytes at a time.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction


class Gpu(NamedTuple):
    """Multiprocessors, and the most shared memory of a program, in KiB; a multiprocessor has 1 KiB more."""

    processors: int
    shared: int


GPUS = {80: Gpu(108, 163), 90: Gpu(132, 227), 100: Gpu(148, 227)}  # A100, H100 and H200, B200


class OnGpu(Tensor):
    """A CPU tensor that says it is on a GPU, and whatever is made from it says so too."""

    is_cuda = True


def on_gpu(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(OnGpu)


DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SEED = on_gpu(torch.tensor(0))  # as a CUDA graph has it, where a number would stay what it was


def named(*words: str, **options) -> str:
    """What a case is called."""
    plain = (key if value is True or value is SEED else f"{key} {value}" for key, value in options.items())
    return " ".join([*words, *plain])


def attention(
    dtype: str,
    head_dim: int,
    nodes: int,
    group: int,
    *,
    prefix: int = 4096,
    masked: bool = False,
    queries: int | None = None,
    padded: bool = False,
    window: bool = False,
    softcap: bool = False,
) -> None:
    from heavypath.kernels.tree_attention import tree_attention

    queries, kv_heads, number = queries or nodes, 8, DTYPES[dtype]
    key, value = on_gpu(torch.empty(2, 1, kv_heads, prefix + nodes, head_dim, dtype=number))
    tree_attention(
        on_gpu(torch.empty(1, kv_heads * group, queries, head_dim, dtype=number)),
        key,
        value,
        prefix_length=on_gpu(torch.tensor([prefix])),
        subtree_end=None if masked else on_gpu(torch.full([nodes], nodes)),
        ancestor_mask=on_gpu(torch.ones(queries, nodes).bool()) if masked else None,
        first_row=on_gpu(torch.tensor([0])) if padded else None,
        window=1024 if window else None,
        softcap=50.0 if softcap else None,
        impl="triton",
    )


def attention_cases() -> dict[str, Callable[[], None]]:
    """Dtypes, head sizes, nodes x query heads of a key head, and options; every tile size, both kinds of tree."""
    cases = [
        *(("bf16", 128, nodes, group, {}) for nodes, group in ((1, 1), (1, 4), (64, 1), (64, 4), (256, 8))),
        *(("bf16", head_dim, 64, 4, {}) for head_dim in (16, 32, 40, 64, 80, 192, 256)),
        ("bf16", 64, 1, 4, {}),
        ("bf16", 256, 1, 4, {}),
        ("bf16", 64, 64, 1, {}),
        ("bf16", 128, 2048, 8, {"prefix": 0}),
        ("bf16", 128, 2048, 8, {"prefix": 0, "masked": True}),
        ("bf16", 128, 64, 4, {"masked": True, "queries": 16}),
        ("bf16", 64, 256, 8, {"masked": True}),
        ("bf16", 128, 1, 4, {"padded": True, "window": True}),
        ("bf16", 128, 64, 4, {"padded": True, "window": True, "softcap": True}),
        ("bf16", 256, 64, 2, {"masked": True, "window": True, "softcap": True}),
        ("fp16", 128, 64, 4, {}),
        ("fp32", 128, 1, 4, {}),
        ("fp32", 64, 64, 4, {}),
        ("fp32", 128, 64, 4, {}),
        ("fp32", 256, 64, 1, {"masked": True}),
    ]
    return {
        named(dtype, f"D{head_dim}", f"{nodes}x{group}", **options): partial(
            attention, dtype, head_dim, nodes, group, **options
        )
        for dtype, head_dim, nodes, group, options in cases
    }


def ordering(nodes: int, ranked: bool) -> None:
    from heavypath.kernels.ordering import heavy_path_order

    ranks = on_gpu(torch.zeros(nodes, dtype=torch.long)) if ranked else None
    heavy_path_order(on_gpu(torch.arange(-1, nodes - 1)), ranks, impl="triton")


def compaction(dtype: str, head_dim: int, places: int) -> None:
    from heavypath.kernels.cache_compaction import compact_cache

    key, value = torch.empty(2, 1, 8, 64, head_dim, dtype=DTYPES[dtype])
    path, one = on_gpu(torch.zeros(1, places, dtype=torch.long)), on_gpu(torch.ones(1, dtype=torch.long))
    compact_cache([on_gpu(key)], [on_gpu(value)], path, one, one, impl="triton")


def committing(nodes: int, per_sequence: bool) -> None:
    from heavypath.kernels.commit import State, StateField, commit
    from heavypath.kernels.nodes import Nodes, Verified

    def zeros(*shape: int) -> Tensor:
        return on_gpu(torch.zeros(shape, dtype=torch.long))

    batch, shape = 4, (4, nodes) if per_sequence else (nodes,)
    state = State(zeros(len(StateField), batch), zeros(batch, 9), zeros(2), zeros(batch, 9).bool(), zeros(2, 9))
    tree = Nodes(zeros(batch, nodes), zeros(*shape), zeros(*shape))
    verified = Verified(zeros(batch, min(nodes, 9)), zeros(batch), zeros(batch))
    commit(state, tree, zeros(*shape), verified, 1, impl="triton")


def sampling(dtype: str, vocabulary: int, k: int, **options) -> None:
    from heavypath.kernels.sampling import gumbel_topk

    gumbel_topk(on_gpu(torch.empty(1, vocabulary, dtype=DTYPES[dtype])), k, impl="triton", **options)


def sampling_cases() -> dict[str, Callable[[], None]]:
    filters = {"top_k": 50, "top_p": 0.9, "min_p": 0.01}
    cases = [
        *(("bf16", 128256, k, {}) for k in (1, 4, 32, 64)),
        ("fp16", 32000, 4, {}),
        ("fp32", 32000, 4, {}),
        ("bf16", 999, 4, {}),
        ("bf16", 128256, 4, {"temperature": 0.0}),
        ("bf16", 128256, 4, {"replacement": True}),
        ("bf16", 128256, 8, filters | {"uniform_fill": True}),
        ("bf16", 128256, 4, {"seed": SEED}),
        ("bf16", 128256, 8, filters | {"uniform_fill": True, "seed": SEED}),
    ]
    return {
        named(dtype, f"V{vocabulary}", f"k{k}", **options): partial(sampling, dtype, vocabulary, k, **options)
        for dtype, vocabulary, k, options in cases
    }


def verification(method: str, dtype: str, nodes: int, vocabulary: int, **options) -> None:
    from heavypath.kernels.verification import verify_tree

    logits = on_gpu(torch.empty(1, nodes, vocabulary, dtype=DTYPES[dtype]))
    tokens, parents = on_gpu(torch.zeros(1, nodes, dtype=torch.long)), on_gpu(torch.arange(-1, nodes - 1))
    verify_tree(tokens, parents, logits, logits, method=method, max_depth=8, impl="triton", **options)


def verification_cases() -> dict[str, Callable[[], None]]:
    filters = {"top_k": 50, "top_p": 0.9, "min_p": 0.01}
    cases = [
        *((method, "bf16", 64, 128256, {}) for method in ("without_replacement", "with_replacement", "kseq", "race")),
        ("without_replacement", "bf16", 768, 32000, {}),
        ("without_replacement", "fp32", 2048, 32000, {}),
        ("without_replacement", "fp16", 64, 999, {}),
        ("without_replacement", "bf16", 64, 32000, filters),
        ("with_replacement", "bf16", 64, 32000, filters),
        ("without_replacement", "bf16", 64, 32000, {"draft_temperature": 0.0}),
        *((method, "bf16", 64, 128256, {"seed": SEED}) for method in ("without_replacement", "kseq", "race")),
        ("without_replacement", "bf16", 64, 32000, filters | {"seed": SEED}),
    ]
    return {
        named(method, dtype, f"{nodes} nodes", f"V{vocabulary}", **options): partial(
            verification, method, dtype, nodes, vocabulary, **options
        )
        for method, dtype, nodes, vocabulary, options in cases
    }


CASES = {
    **verification_cases(),
    **sampling_cases(),
    **attention_cases(),
    **{f"tree of {nodes}": partial(committing, nodes, per_sequence=nodes > 64) for nodes in (1, 64, 2048)},
    **{f"{nodes} nodes": partial(ordering, nodes, ranked=False) for nodes in (64, 2048)},
    **{f"{nodes} nodes ranked": partial(ordering, nodes, ranked=True) for nodes in (64, 2048)},
    **{
        f"{dtype} D{head_dim} path {places}": partial(compaction, dtype, head_dim, places)
        for dtype, head_dim, places in (("bf16", 128, 5), ("bf16", 128, 17), ("bf16", 128, 2048), ("bf16", 5, 2048))
    },
}


class Driver:
    """Stands in for Triton's: it names the GPU to compile for, and has none to run on."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Row(NamedTuple):
    """What one kernel compiled to; the columns are described at the top."""

    arch: int
    kernel: str
    case: str
    registers: int
    warps: int
    spill: int
    shared: int  # bytes
    tensor_memory: int
    fit: int
    dot: str
    half_rows: int  # of the largest product of 16-bit numbers
    load: str
    load_bytes: int
    ahead: int
    waits: int
    loop: dict[str, int]  # instructions by name


class Report(NamedTuple):
    """Of one architecture; the faults are those that no row shows."""

    rows: list[Row]
    faults: list[str]


def compile_cases(arch: int, names: list[str]) -> Report:
    """Run these cases, in a process that belongs to this architecture."""
    launch, compiled, launched = JITFunction.run, {}, set()

    def compile_only(self, *arguments, grid, warmup, **options):
        kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
        compiled.setdefault(kernel.hash, kernel)
        launched.add(self.__name__)
        return kernel

    JITFunction.run = compile_only
    triton.runtime.driver.set_active(Driver(arch))
    facts = SimpleNamespace(multi_processor_count=GPUS[arch].processors, major=arch // 10, minor=arch % 10)
    torch.cuda.get_device_properties = lambda device=None: facts
    torch.cuda.get_device_capability = lambda device=None: (facts.major, facts.minor)

    rows, faults = [], []
    for name in names:
        known = len(compiled)
        try:
            CASES[name]()
        except Exception as error:
            *_, reason = ["", *str(error).strip().splitlines()]
            faults.append(f"sm_{arch} {name}: {type(error).__name__}: {reason}")
        rows += [read(kernel, arch, name) for kernel in list(compiled.values())[known:]]
    if names == list(CASES):
        faults += [f"sm_{arch} {name}: it is in no case" for name in sorted(package_kernels() - launched)]
    return Report(rows, faults)


def package_kernels() -> set[str]:
    """Names of the kernels that the package launches; functions that these call are not named so."""
    import heavypath.kernels as package

    modules = [import_module(f"{package.__name__}.{module.name}") for module in iter_modules(package.__path__)]
    functions = {name for module in modules for name, value in vars(module).items() if isinstance(value, JITFunction)}
    return {name for name in functions if name.endswith("_kernel")}


def faults_of(row: Row) -> list[str]:
    limit = GPUS[row.arch].shared
    checks = {
        f"spills {row.spill} bytes": row.spill > 0,
        f"takes {row.shared / 1024:.1f} KiB of shared memory, and {limit} are there": row.shared > limit * 1024,
        f"takes products with {row.dot}, not HGMMA": row.arch == 90 and row.half_rows >= 64 and row.dot != "HGMMA",
        "waits for each HGMMA": row.waits > 1 and row.waits >= row.loop.get("HGMMA", 0),
        f"loads {row.load_bytes} bytes at a time, not 16": row.half_rows > 0 and row.load_bytes < 16,
    }
    return [f"sm_{row.arch} {row.kernel} {row.case}: it {fault}" for fault, found in checks.items() if found]


def read(kernel: CompiledKernel, arch: int, case: str) -> Row:
    """The facts of a compiled kernel: from its metadata, its IR (the shapes of products) and its machine code."""
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
    loads = Counter()
    for instruction in loop:
        if instruction.name in ("LDG", "LDGSTS"):
            loads[instruction.name, instruction.bytes] += instruction.bytes
    (((load, load_bytes), _),) = loads.most_common(1) or [(("", 0), 0)]
    return Row(
        arch=arch,
        kernel=kernel.metadata.name.strip("_").removesuffix("_kernel"),
        case=case,
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
        loop=dict(Counter(instruction.name for instruction in loop).most_common()),
    )


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
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def as_table(rows: list[Row]) -> str:
    columns: dict[str, Callable[[Row], object]] = {
        "kernel": lambda row: row.kernel,
        "case": lambda row: row.case,
        "regs": lambda row: row.registers,
        "warps": lambda row: row.warps,
        "spill": lambda row: row.spill,
        "KiB": lambda row: f"{row.shared / 1024:.1f}",
        "tmem": lambda row: row.tensor_memory,
        "fit": lambda row: row.fit,
        "dot": lambda row: row.dot,
        "load": lambda row: row.load,
        "ahead": lambda row: row.ahead,
        "waits": lambda row: row.waits,
        "loop": lambda row: sum(row.loop.values()),
        "fp32": lambda row: sum(count for name, count in row.loop.items() if re.match("F[A-Z]", name)),
        "exp": lambda row: row.loop.get("MUFU", 0),
    }
    cells = [[*columns], *([str(cell(row)) for cell in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    words = ("kernel", "case", "dot", "load")
    return "\n".join(
        "  ".join(
            cell.ljust(width) if name in words else cell.rjust(width)
            for name, cell, width in zip(columns, line, widths, strict=True)
        ).rstrip()
        for line in cells
    )


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, choices=GPUS, action="append", help="all, if not given")
    parser.add_argument("--case", default="", help="only cases whose names contain this")
    parser.add_argument("--json", type=Path, help="write all rows to this file too")
    arguments = parser.parse_args(words)
    names = [name for name in CASES if arguments.case in name]
    if not names:
        parser.error(f"no case has {arguments.case!r} in its name; there are {', '.join(CASES)}")

    os.environ.pop("TRITON_INTERPRET", None)
    archs, context = arguments.arch or list(GPUS), get_context("spawn")
    with ProcessPoolExecutor(min(len(archs), os.cpu_count() or 1), context, max_tasks_per_child=1) as processes:
        reports = []
        for arch, report in zip(archs, processes.map(partial(compile_cases, names=names), archs), strict=True):
            print(f"sm_{arch}, {GPUS[arch].shared} KiB of shared memory\n{as_table(report.rows)}\n", flush=True)
            reports.append(report)
    rows = [row for report in reports for row in report.rows]
    faults = [fault for report in reports for fault in report.faults]
    faults += [fault for row in rows for fault in faults_of(row)]
    if arguments.json is not None:
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        written = {"versions": versions, "rows": [row._asdict() for row in rows], "faults": faults}
        arguments.json.write_text(json.dumps(written, indent=1) + "\n")
    sys.exit("\n".join(faults) if faults else 0)


if __name__ == "__main__":
    main()
