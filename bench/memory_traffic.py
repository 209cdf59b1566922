"""What kernels' accesses take of memory, beside the fewest that their bytes could: no GPU is needed.

    python bench/memory_traffic.py [--arch 90] [--case "bf16 D128"] [--record]

The cases are those of compile_report.py. The first programs of each launch run as PTX, on the CPU (tests/support/ptx):

    sectors  sectors of 32 bytes of global memory that warps' loads, stores and copies touch, over the fewest
    banks    cycles of shared memory that they take, over the fewest: 1 without any conflict of banks

Of a program that fails, because nothing meaningful is in its tensors, what it did before counts; a line says so.
--record adds to the file that compile_report.py takes these columns from. A line there is of the sources that it was
made of, so a changed kernel has none until it is recorded anew. sm_100 cannot be run.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import triton
from compile_cases import CASES
from compile_report import TRAFFIC, key_of, read_traffic
from machine_code import GPUS, compile_for, kernel_name
from triton.compiler import CompiledKernel

ARCHS = (80, 90)
PROGRAMS = 4  # of a launch that run
INSTRUCTIONS = 10**7  # of these programs' warps, at most

Ratios = dict[str, list[float | None]]  # sectors and banks of each kernel that a case launches


def traffic_of(name: str, launched: list) -> Ratios:
    """The ratios of each kernel that a case launches. launched: what its launches are put into."""
    from ptx import emulator
    from ptx.launching import arguments_of

    emulator.LIMIT = INSTRUCTIONS

    launched.clear()
    CASES[name]()
    found: Ratios = {}
    for kernel, (x, y, z, *_, given) in launched:
        machine = emulator.Emulated(kernel.asm["ptx"])
        arguments, ranges = arguments_of(kernel, given)
        threads, shared = 32 * kernel.metadata.num_warps, kernel.metadata.shared
        try:
            machine.launch((x, y, z), threads, shared, arguments, ranges, emulator.PLAIN, most=PROGRAMS)
        except emulator.FaultError as fault:  # the numbers in the tensors are any
            print(f"{name}: {kernel.metadata.name} {fault}", file=sys.stderr)
        parts = map(machine.traffic, ("global", "shared"))
        found[kernel_name(kernel.metadata.name)] = [
            round(units / least, 2) if least else None for units, least in parts
        ]
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, choices=ARCHS, default=90)
    parser.add_argument("--case", default="", help="only cases whose names contain this")
    parser.add_argument("--record", action="store_true", help="add to what the repository keeps")
    arguments = parser.parse_args(words)
    os.environ.pop("TRITON_INTERPRET", None)
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
    from common import made, show  # which is slow to import
    from ptx.launching import without_ptxas

    launched: list = []
    compile_for(arguments.arch, launched.append)
    triton.knobs.runtime.add_stages_inspection_hook = without_ptxas
    CompiledKernel.run = property(
        lambda kernel: (
            lambda x, y, z, stream, function, packed, told, enter, leave, *given: launched.append(
                (kernel, (x, y, z, given))
            )
        )
    )
    record, rows = read_traffic(), []
    keys = {name: key_of(arguments.arch, name, case) for name, case in CASES.items() if arguments.case in name}
    for name, key in keys.items():
        if key not in record:
            record[key] = traffic_of(name, launched)
        rows += [
            {"kernel": kernel, "case": name, "sectors": one, "banks": other}
            for kernel, (one, other) in record[key].items()
        ]
    show(rows, title=f"sm_{arguments.arch}, {GPUS[arguments.arch].processors} multiprocessors")
    if arguments.record:
        known = {key_of(arch, name, case) for arch in ARCHS for name, case in CASES.items()}
        kept = {key: ratios for key, ratios in sorted(record.items()) if key in known}
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(ratios)}" for key, ratios in kept.items())
        made(TRAFFIC).write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
