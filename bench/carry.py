"""Compile kernels here for a GPU that is elsewhere, and carry them there, so that they are not compiled on its time.

    python bench/carry.py make FOLDER [--arch 90] [--case TEXT]   # here, for a compute capability of 9.0
    python bench/carry.py place FOLDER                            # there, wherever the folder lies now
    TRITON_CACHE_DIR=FOLDER python ...                            # there, whatever launches kernels

FOLDER is a cache of Triton's, of which machine code and its description are kept. It serves the same kernels, of this
version of the package, under the same wheel of Triton: one of the same version, for the same version of Python. Others
are compiled as ever. Cases are those of compile_cases.py, which launch all kernels. Triton writes down where each
file lies, so a folder that was moved is placed. `make` says how many kernels it compiled, and how many were there;
bench/gpu.sh takes build/carried if that is there. Triton 3.6 compiles a small launcher in C for each signature besides,
with the machine's own compiler.
"""

import argparse
import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

KEPT = ("cubin", "json")


def compile_into(folder: Path, arch: int, names: Sequence[str]) -> Counter[bool]:
    """How many kernels of these cases were compiled (False), and how many were there (True); in its own process."""
    os.environ.pop("TRITON_INTERPRET", None)
    import triton
    from compile_cases import CASES
    from machine_code import compile_for

    found: dict[str, bool] = {}

    def compiled(*, metadata: Any, cache_hit: bool, **_: object) -> None:
        found.setdefault(metadata["hash"], cache_hit)

    triton.knobs.cache.dir = str(folder)
    triton.knobs.compilation.listener = compiled
    compile_for(arch, lambda kernel: None)
    for name in names:
        CASES[name]()
    return Counter(found.values())


def make(folder: Path, arch: int, text: str) -> Counter[bool]:
    """Compile the cases whose names contain a text, in as many processes as there are processors."""
    from compile_cases import CASES

    names = [name for name in CASES if text in name]
    if not names:
        raise SystemExit(f"no case has {text!r} in its name; there are {', '.join(CASES)}")
    folder.mkdir(parents=True, exist_ok=True)
    place(folder)
    count = min(len(os.sched_getaffinity(0)), len(names))
    with ProcessPoolExecutor(count, get_context("spawn")) as processes:
        parts = [processes.submit(compile_into, folder, arch, names[start::count]) for start in range(count)]
        found = sum((part.result() for part in parts), Counter[bool]())
    place(folder)
    return found


def place(folder: Path) -> None:
    """Have a cache name its files where they lie, and keep those only that launches read."""
    for group in folder.glob("*/__grp__*.json"):
        at = {name: group.with_name(name).resolve() for name in json.loads(group.read_text())["child_paths"]}
        kept = {name: str(path) for name, path in at.items() if path.suffix.strip(".") in KEPT}
        group.write_text(json.dumps({"child_paths": kept}))
        for name in at.keys() - kept.keys():
            at[name].unlink(missing_ok=True)
    for path in folder.glob("*/tmp.*"):
        shutil.rmtree(path, ignore_errors=True)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "place"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", type=int, choices=[80, 90, 100], default=90)
    parser.add_argument("--case", default="", help="only cases whose names contain this")
    given = parser.parse_args(words)
    if given.what == "place":
        if not given.folder.is_dir():
            parser.error(f"{given.folder} is no folder; `make` makes one")
        place(given.folder)
        return
    found = make(given.folder, given.arch, given.case)
    size = sum(path.stat().st_size for path in given.folder.rglob("*") if path.is_file())
    print(f"{found[False]} kernels compiled, {found[True]} were there; {size / 1e6:.1f} MB in {given.folder}")


if __name__ == "__main__":
    main()
