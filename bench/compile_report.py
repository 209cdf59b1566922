"""What each kernel compiles to on sm_80, sm_90 and sm_100; no GPU is needed.

    python bench/compile_report.py [--arch 90] [--case "bf16 D128"] [--json FILE] [--anew | --record]

Every case calls the package's own launcher. A launch compiles instead of running, for the GPU that a stand-in driver
names, in processes that serve one architecture each. What is printed is read off the machine code:

    regs, warps  registers of a thread, warps of a program
    spill        bytes of local memory that its instructions store and load
    KiB, tmem    shared memory and, on sm_100, columns of tensor memory that a program takes
    fit          programs that fit on a multiprocessor at once
    dot          the instructions of products: HMMA (mma), HGMMA (wgmma), UTCHMMA (tcgen05), or FFMA without tensor
                 cores
    load         the kind of global load that brings most bytes in the inner loop; LDGSTS is a copy to shared memory
    ahead        groups of such copies that may still be on their way when a block is used
    waits        for wgmma, in the inner loop; where ptxas takes products one by one, there is one for each
    loop         instructions of the inner loop: the shortest that takes products, with asynchronous copies if any has
                 them; of a kernel without products, the first that loads from global memory, which in gumbel_topk has
                 a thread draw 8 tokens; of a kernel without such loops, all instructions
    fp32, exp    those of the loop that compute in fp32, and in the unit for special functions
    sectors      sectors of global memory that accesses touch, over the fewest, as memory_traffic.py has recorded it
    banks        cycles of shared memory that they take, over the fewest, likewise: 1 without conflicts
    seconds      that compiling took when it was compiled, which no comparison looks at

The exit status is 1 and a list says why if a case does not compile, if a kernel of the package is in no case, if
lanes of a reduction would round different sums, since a product is fused with its first addition, if anything spills
or takes more shared memory than there is, if 16-bit products of 64 rows and more lose wgmma on sm_90 or wait for
each, or if the inner loop of any 16-bit products loads less than 16 bytes at a time.

A case is compiled if the code that it depends on changed (py says what that is). Otherwise its figures
are those that this machine or the repository keeps. One in ten of the cases that only the repository knows, drawn anew
in every run, is compiled all the same: it is a fault if the repository keeps other figures. --anew compiles everything.
--record writes the figures that the repository keeps; they belong into the commit that changes a kernel.
"""

import argparse
import ast
import hashlib
import inspect
import json
import os
import random
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, NamedTuple

import machine_code
import torch
import triton
from compile_cases import CASES
from machine_code import GPUS, LEAST_SHARED, Figures, compile_for, figures, kernel_name
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from heavypath.kernels.step_kernels import FUNCTIONS

PACKAGE = "heavypath.kernels"
TYPES_ALONE = "TYPE_CHECKING"  # the condition of imports that only type checkers read
RECORD = Path(__file__).parent / "results" / "compile_report.json"
TRAFFIC = RECORD.with_name("memory_traffic.json")
CACHE = Path(__file__).parent.parent / "build" / "compile_report.json"
CHUNK = 20  # cases that a process compiles
SAMPLED = 10  # one in so many of the cases that only the repository knows is compiled again


Kernels = dict[str, Figures]  # of the kernels that a case launches, by an identity that equal kernels of one run share


class Row(NamedTuple):
    """A kernel's figures, and the first case that launched it on an architecture."""

    arch: int
    case: str
    figures: Figures


Case = tuple[int, str]  # an architecture, and the name of a case


class Found(NamedTuple):
    """The kernels of each case, or why it failed; what does not agree with the record; how many came from where."""

    kernels: dict[Case, Kernels | str]
    disagreements: list[str]
    origin: str


def find(archs: Sequence[int], names: Sequence[str], anew: bool) -> Found:
    """Take the kernels of all cases from where they are kept, or compile them; unless `anew`, keep what is compiled."""
    keys = {(arch, name): key_of(arch, name, CASES[name]) for arch in archs for name in names}
    cached, recorded = ({} if anew else read_record(path) for path in (CACHE, RECORD))
    only_recorded = [case for case, key in keys.items() if key in recorded and key not in cached]
    sample = random.sample(only_recorded, -(-len(only_recorded) // SAMPLED))
    unknown = [case for case, key in keys.items() if key not in cached and key not in recorded]
    compiled = compile_all([*unknown, *sample])
    kernels = {
        case: compiled[case] if case in compiled else cached[key] if key in cached else recorded[key]
        for case, key in keys.items()
    }
    if not anew:
        new = {keys[case]: done for case, done in compiled.items() if not isinstance(done, str)}
        write_record(CACHE, cached | new)
    disagreements = [
        f"sm_{arch} {name}: {RECORD.name} is wrong: {change}"
        for (arch, name), done in kernels.items()
        if (key := keys[arch, name]) in recorded and not isinstance(done, str)
        for change in differences(recorded[key], done)
    ]
    before, trusted = sum(key in cached for key in keys.values()), len(only_recorded) - len(sample)
    origin = f"{len(keys)} cases: {len(compiled)} compiled now, {before} before on this machine, {trusted} as recorded"
    return Found(kernels, disagreements, origin)


def key_of(arch: int, name: str, case: partial) -> str:
    """The key of a case on an architecture. case: a function of compile_cases.py with its arguments."""
    source = inspect.getsource(case.func)
    parts = [triton.__version__, arch, GPUS[arch], code(source), case.args, case.keywords]
    parts.append(code(inspect.getsource(machine_code)))
    parts += [(used, module_code(used)) for used in modules_used(source)]
    return f"sm_{arch} {name}: {hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"


def modules_used(source: str) -> list[str]:
    """Names of the modules of kernels/ that this code imports, and those that they import, and so on."""
    used: set[str] = set()
    new = imported(source)
    while new:
        used |= new
        new = {name for user in new for name in imported(module_source(user))} - used
    return sorted(used)


@cache
def imported(source: str) -> set[str]:
    """Names of the modules of kernels/ that this code imports itself, inside functions too; none of the CPU's.

    A function of a step is imported by its name in `StepKernels`, as the table there says.
    """
    names: list[str] = []
    tree = ast.parse(textwrap.dedent(source))
    calls_by_name = "step_kernels" in source
    for_types = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == TYPES_ALONE]
    unread = {id(inner) for block in for_types for each in block.body for inner in ast.walk(each)}
    for node in ast.walk(tree):
        if id(node) in unread:
            continue
        if calls_by_name and isinstance(node, ast.Attribute) and node.attr in FUNCTIONS:
            module, _, _ = FUNCTIONS[node.attr]["triton"].rpartition(".")
            names.append(f"{PACKAGE}.{module}")
        if isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            names += [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        elif isinstance(node, ast.Import):
            names += [each.name for each in node.names]
    prefix = f"{PACKAGE}."
    used = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    return {name for name in used if name.split(".")[0] != "native"}  # which a GPU has no part in


@cache
def module_source(name: str) -> str:
    found = find_spec(f"{PACKAGE}.{name}")
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"no module {PACKAGE}.{name}")
    return Path(found.origin).read_text(encoding="utf-8")


def module_code(name: str) -> str:
    return code(module_source(name))


@cache
def code(source: str) -> str:
    """The code without comments and docstrings."""
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def read_record(path: Path) -> dict[str, Kernels]:
    """The kernels of each case by its key; none if there is no such file, or one of another form."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["fields"] != list(Figures._fields):
            return {}
        return {key: {name: Figures(*row) for name, row in rows.items()} for key, rows in kept["kernels"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write_record(path: Path, kept: Mapping[str, Kernels]) -> None:
    """A file that `read_record` reads, with one line for each case."""
    head = f'"triton": "{triton.__version__}",\n"fields": {json.dumps(Figures._fields)},\n'
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(kernels)}" for key, kernels in kept.items())
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'{{\n{head}"kernels": {{\n{lines}\n}}\n}}\n', encoding="utf-8")


def differences(kept: Kernels, compiled: Kernels) -> list[str]:
    """What is otherwise in the second, but for seconds; kernels are compared in the order of their launches."""
    if [row.kernel for row in kept.values()] != [row.kernel for row in compiled.values()]:
        return [f"{names(kept.values())} became {names(compiled.values())}"]
    return [
        f"{before.kernel}: {field} {getattr(before, field)} became {getattr(after, field)}"
        for before, after in zip(kept.values(), compiled.values(), strict=True)
        for field in Figures._fields
        if field != "seconds" and getattr(before, field) != getattr(after, field)
    ]


def names(rows: Iterable[Figures]) -> str:
    return ", ".join(row.kernel for row in rows)


def compile_all(cases: Iterable[Case]) -> dict[Case, Kernels | str]:
    """Compile these cases, in as many processes at a time as there are processors, and say how many are done."""
    names: dict[int, list[str]] = {}
    for arch, name in cases:
        names.setdefault(arch, []).append(name)
    chunks = [
        (arch, own[start::count])
        for arch, own in names.items()
        for count in [-(-len(own) // CHUNK)]
        for start in range(count)
    ]
    if not chunks:
        return {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        done = threads.map(compile_apart, *zip(*chunks, strict=True))
        kernels: dict[Case, Kernels | str] = {}
        for (arch, _), by_name in zip(chunks, done, strict=True):
            kernels |= {(arch, name): found for name, found in by_name.items()}
            print(f"{len(kernels)} of {sum(map(len, names.values()))} cases compiled", file=sys.stderr)
        return kernels


def compile_apart(arch: int, names: Sequence[str]) -> dict[str, Kernels | str]:
    """The same as `compile_cases`, in a process of its own; a compiler that dies takes only the one case with it."""
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            return process.submit(compile_cases, arch, names).result()
    except BrokenProcessPool:
        half = len(names) // 2
        if half == 0:
            return {names[0]: "the compiler died"}
        return compile_apart(arch, names[:half]) | compile_apart(arch, names[half:])


def compile_cases(arch: int, names: Sequence[str]) -> dict[str, Kernels | str]:
    """The kernels of each case, or why it failed. The process must serve no other architecture."""
    launched: list[CompiledKernel] = []
    seconds: dict[str, float] = {}

    def compiled(*, metadata: Mapping[str, Any], times: Any, **_: object) -> None:
        seconds[metadata["hash"]] = times.total / 1e6

    triton.knobs.compilation.listener = compiled
    triton.knobs.compilation.always_compile = True  # what Triton has on disk would be loaded, which takes no time
    compile_for(arch, launched.append)
    read: dict[str, Figures] = {}
    done: dict[str, Kernels | str] = {}
    for name in names:
        launched.clear()
        try:
            CASES[name]()
        except Exception as error:
            *_, reason = ["", *str(error).strip().splitlines()]
            done[name] = f"{type(error).__name__}: {reason}"
            continue
        new = [kernel for kernel in launched if kernel.hash not in read]
        read |= {kernel.hash: figures(kernel, arch, seconds[kernel.hash]) for kernel in new}
        done[name] = {kernel.hash[:12]: read[kernel.hash] for kernel in launched}
        for kernel in new:
            if fused := sums_by_lane(kernel.asm["ptx"]):
                done[name] = f"{kernel.metadata.name}: lanes would have different sums, {fused[0]}"
    return done


def sums_by_lane(ptx: str) -> list[str]:
    """The additions of a reduction over lanes that a product is fused with: each lane would round another sum."""
    said: set[str] = set()  # registers with what another lane has
    found = []
    for line in map(str.strip, ptx.splitlines()):
        if shuffled := re.match(r"shfl\.sync\.bfly\.b32\s+(%r\d+)", line):
            said.add(shuffled[1])
        elif (moved := re.match(r"mov\.b32\s+(%[rf]\d+),\s*(%[rf]\d+);", line)) and moved[2] in said:
            said.add(moved[1])
        elif (fused := re.match(r"fma\.rn\.f32\s+\S+\s*\S+\s*\S+\s*(%[rf]\d+);", line)) and fused[1] in said:
            found.append(line)
    return found


def package_kernels() -> set[str]:
    """What the report calls the kernels that the package launches; the names of functions they call end otherwise."""
    import heavypath.kernels as package

    folder = list(package.__path__)[:1]  # where it is imported from; another install may be behind it
    modules = [import_module(module.name) for module in walk_packages(folder, f"{package.__name__}.")]
    functions = {name for module in modules for name, value in vars(module).items() if isinstance(value, JITFunction)}
    return {kernel_name(name) for name in functions if name.endswith("_kernel")}


def faults_of(row: Row) -> list[str]:
    """Why a kernel is not as it must be."""
    arch, case, found = row
    limit = LEAST_SHARED.get(arch, GPUS[arch].shared)
    checks = {
        f"spills {found.spill} bytes": found.spill > 0,
        f"takes {found.shared / 1024:.1f} KiB of shared memory, and {limit} are there": found.shared > limit * 1024,
        f"takes products with {found.dot}, not HGMMA": arch == 90 and found.half_rows >= 64 and found.dot != "HGMMA",
        "waits for each HGMMA": found.waits > 1 and found.waits >= found.wgmma,
        f"loads {found.load_bytes} bytes at a time, not 16": found.half_rows > 0 and found.load_bytes < 16,
    }
    return [f"sm_{arch} {found.kernel} {case}: it {fault}" for fault, wrong in checks.items() if wrong]


def rows_of(found: Mapping[Case, Kernels]) -> list[Row]:
    """A row for each kernel, with the first case of those that launch it."""
    seen: set[Case] = set()
    rows = []
    for (arch, case), kernels in found.items():
        rows += [Row(arch, case, row) for name, row in kernels.items() if (arch, name) not in seen]
        seen |= {(arch, name) for name in kernels}
    return rows


def read_traffic() -> dict[str, dict[str, list[float | None]]]:
    """Ratios of sectors and of banks, by the key of a case and a kernel: what memory_traffic.py records."""
    return json.loads(TRAFFIC.read_text(encoding="utf-8")) if TRAFFIC.exists() else {}


def shown(row: Row, sectors: float | None, banks: float | None) -> dict[str, object]:
    """A line of the table."""
    found = row.figures
    return {
        "kernel": found.kernel, "case": row.case, "regs": found.registers, "warps": found.warps, "spill": found.spill,
        "KiB": found.shared / 1024, "tmem": found.tensor_memory, "fit": found.fit, "dot": found.dot,
        "load": found.load, "ahead": found.ahead, "waits": found.waits, "loop": found.loop, "fp32": found.fp32,
        "exp": found.special, "sectors": sectors, "banks": banks, "seconds": found.seconds,
    }  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, choices=GPUS, action="append", help="all, if not given")
    parser.add_argument("--case", default="", help="only cases whose names contain this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows to this file")
    keeping = parser.add_mutually_exclusive_group()
    keeping.add_argument("--anew", action="store_true", help="compile everything, and keep nothing")
    keeping.add_argument("--record", action="store_true", help="write the figures that the repository keeps")
    arguments = parser.parse_args(words)
    names = [name for name in CASES if arguments.case in name]
    if not names:
        parser.error(f"no case has {arguments.case!r} in its name; there are {', '.join(CASES)}")
    if arguments.record and (arguments.case or arguments.arch):
        parser.error("--record is for all cases on all architectures")

    from common import show, write_results  # which processes that only compile do without

    os.environ.pop("TRITON_INTERPRET", None)
    archs = arguments.arch or list(GPUS)
    found = find(archs, names, arguments.anew)
    kernels = {case: done for case, done in found.kernels.items() if not isinstance(done, str)}
    faults = [f"sm_{arch} {name}: {done}" for (arch, name), done in found.kernels.items() if isinstance(done, str)]
    faults += found.disagreements
    rows, traffic = rows_of(kernels), read_traffic()
    for arch in archs:
        own = [row for row in rows if row.arch == arch]
        ratios = [traffic.get(key_of(arch, row.case, CASES[row.case]), {}) for row in own]
        lines = [shown(row, *each.get(row.figures.kernel, (None, None))) for row, each in zip(own, ratios, strict=True)]
        show(lines, title=f"sm_{arch}, {GPUS[arch].shared} KiB of shared memory")
        if not arguments.case:
            missing = package_kernels() - {row.figures.kernel for row in own}
            faults += [f"sm_{arch} {name}: it is in no case" for name in sorted(missing)]
    faults += [fault for row in rows for fault in faults_of(row)]
    print(found.origin)
    if arguments.record:
        kept = {key_of(arch, name, CASES[name]): done for (arch, name), done in kernels.items()}
        write_record(RECORD, kept)
    flat = [{"arch": row.arch, "case": row.case} | row.figures._asdict() for row in rows]
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    write_results(arguments.json, versions, rows=flat, faults=faults)
    sys.exit("\n".join(faults) if faults else 0)


if __name__ == "__main__":
    main()
