"""Compile what the benchmarks of single kernels launch, in many processes: Triton keeps it on disk for them.

    python bench/warm_up.py [--processes 14] [--miniature]

A variant compiles for 2 to 14 seconds, and there are about a hundred. Each process takes one case after another of
those scripts that have `cases` and `warm_up`; a case that fails is named, and does not stop the others.
"""

import importlib
import multiprocessing
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial

from common import argument_parser, until_stopped

SCRIPTS = ("kernel_verification", "kernel_sampling", "kernel_attention", "kernel_ordering")


def compiled(script: str, case: object) -> str | None:
    """Compile a case of a script; returns what went wrong."""
    try:
        importlib.import_module(script).warm_up(case)
    except Exception as error:  # the script itself will say more
        return f"{script}: {case}: {type(error).__name__}: {error}"[:200]
    return None


def main() -> None:
    parser = argument_parser(__doc__, threads=False)
    parser.add_argument("--processes", type=int, default=14)
    arguments = parser.parse_args()
    begin = time.perf_counter()
    works: list[Callable[[], str | None]] = [
        partial(compiled, script, case)
        for script in SCRIPTS
        for case in importlib.import_module(script).cases(arguments.miniature)
    ]
    random.Random(0).shuffle(works)  # neighbours need the same variants, which would be compiled several times at once
    failed = []
    with until_stopped():
        if arguments.processes == 1:
            failed = [error for work in works if (error := work()) is not None]
        else:
            spawn = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(arguments.processes, mp_context=spawn) as pool:
                for done in as_completed([pool.submit(work) for work in works]):
                    failed += [done.result()] * (done.result() is not None)
    print(f"{len(works)} cases in {time.perf_counter() - begin:.0f} s, {len(failed)} failed", *failed, sep="\n")


if __name__ == "__main__":
    main()
