"""Make mutants of the functions that decide the text, and fail for one that no test finds.

    python tests/mutants/run.py                     a mutant of each function, the same ones every time
    python tests/mutants/run.py --area commit --most 20 --jobs 4

Where one survives, write a test that finds it; if no test can, say so in EQUIVALENT.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path[0] = str(ROOT / "tests/support")

from mutant_runs import Result, Runner  # noqa: E402
from mutants import Mutant, chosen, mutants  # noqa: E402

EQUIVALENT = {  # mutants by their keys, and why no test can find them
    (
        "kernels/commit.py", "_commit_kernel",
        "emitted = tl.load(tokens_ptr + node, mask=place < length, other=0)",
        "emitted = tl.load(tokens_ptr + node, mask=place < length, other=(-1))", 0,
    ): "the next line puts another number there",
}  # fmt: skip
LIBRARIES = (
    "torch", "numpy", "scipy.stats", "triton.language", "triton.runtime.interpreter", "hypothesis",
    "transformers.models.llama.modeling_llama", "transformers.generation", "torch.nn.functional", "accelerate",
)  # fmt: skip


LINKS = {  # where the packages lie, as setup.py's links have them
    "heavypath/__init__.py": ROOT / "speculative/package/__init__.py",
    "heavypath/kernels": ROOT / "kernels",
    "heavypath/speculative": ROOT / "speculative",
}


class Area(NamedTuple):
    """Files of the package, and the tests that are to find mutants of their functions.

    native: whether the tests first run compiled code where there is some, or the references; then the other way
    """

    files: tuple[str, ...]
    tests: tuple[str, ...]
    native: bool = False


AREAS = {
    "verification": Area(
        ("kernels/verification.py", "kernels/verifying/*.py", "kernels/typical/*.py", "kernels/nodes.py"),
        (
            "tests/kernels/test_verif*.py", "tests/kernels/test_traversal.py", "tests/kernels/test_held.py",
            "tests/kernels/test_laws.py", "tests/kernels/test_top_down.py", "tests/kernels/test_typical.py",
            "tests/kernels/test_adversary.py", "tests/mutants/test_mutations.py", "tests/core/test_own_verifier.py",
        ),
    ),
    "sampling": Area(
        (
            "kernels/sampling*.py", "kernels/filtering.py", "kernels/filter_cuts.py", "kernels/noise.py",
            "kernels/sequence_scores.py", "kernels/trees/*.py",
        ),
        (
            "tests/kernels/test_sampling.py", "tests/kernels/test_filter*.py", "tests/kernels/test_noise.py",
            "tests/kernels/test_sequence_scores.py", "tests/kernels/test_levels.py", "tests/kernels/test_slots.py",
            "tests/kernels/test_adversary.py", "tests/mutants/test_mutations.py",
            "tests/mutants/test_survivors.py", "tests/core/test_growing.py",
        ),
    ),
    "attention": Area(
        ("kernels/tree_attention.py", "kernels/attention/*.py"),
        (
            "tests/kernels/test_tree_attention.py", "tests/kernels/test_windows.py", "tests/kernels/test_sharing.py",
            "tests/kernels/test_launches.py", "tests/kernels/test_adversary.py", "tests/mutants/test_survivors.py",
        ),
    ),
    "commit": Area(
        ("kernels/commit.py",),
        ("tests/kernels/test_commit.py", "tests/kernels/test_adversary.py", "tests/mutants/test_mutations.py"),
    ),
    "compaction": Area(
        ("kernels/cache_compaction.py",),
        (
            "tests/kernels/test_cache_compaction.py", "tests/kernels/test_adversary.py",
            "tests/mutants/test_mutations.py", "tests/mutants/test_survivors.py",
        ),
    ),
    "step": Area(
        tuple(f"speculative/decoding/{name}.py" for name in ("step", "drafted", "drafting", "noise_rows", "sequences")),
        (
            "tests/core/test_step.py", "tests/core/test_decoder.py", "tests/conformance",
            "tests/mutants/test_mutations.py",
        ),
        native=True,
    ),
}  # fmt: skip


def main() -> int:
    given = arguments()
    for library in LIBRARIES:
        import_module(library)
    for plugin in entry_points(group="pytest11"):
        plugin.load()
    survived, measured = [], {True: {}, False: {}}  # tests of files that several areas have, by whether it is native
    for name in given.area or AREAS:
        area, several = AREAS[name], of_files(AREAS[name].files, given.most)
        runners = [
            Runner(ROOT, LINKS, jobs=given.jobs, environment={} if native else {"HEAVYPATH_NATIVE": "0"})
            for native in (area.native, not area.native)
        ]
        print(f"{name}: {len(several)} mutants; which tests reach their functions?", flush=True)
        files = test_files(area)
        of_file = measured[area.native]
        of_file |= runners[0].measured([file for file in files if file not in of_file])
        for mutant, result in outcomes(*runners, several, [test for file in files for test in of_file[file]]):
            print(said(mutant, result), flush=True)
            if not result.found_by and mutant.key not in EQUIVALENT:
                survived.append(said(mutant, result))
    print(f"\n{len(survived)} mutants survived that are not in EQUIVALENT", *survived, sep="\n")
    return bool(survived)


def outcomes(
    first: Runner, second: Runner, several: list[tuple[Mutant, str]], tests: list
) -> Iterator[tuple[Mutant, Result]]:
    """What becomes of mutants in one runner, and of those that survive there in another, but for Triton's kernels."""
    sources, survived = dict(several), []
    for mutant, result in first.results(several, tests):
        kernel = re.search(rf"@triton\.jit[^@]*?\ndef {mutant.function}\(", sources[mutant])
        if result.found_by or not result.tests or kernel:
            yield mutant, result
        else:
            survived.append((mutant, sources[mutant]))
    yield from second.results(survived, tests)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--area", action="append", choices=AREAS, help="of the code (default: all); may be repeated")
    parser.add_argument("--most", type=int, default=1, help="mutants of a function (default: 1)")
    parser.add_argument("--all", dest="most", action="store_const", const=None, help="all mutants, which takes days")
    parser.add_argument("--jobs", type=int, default=2, help="processes, about 1 GB each (default: 2)")
    return parser.parse_args()


def of_files(patterns: tuple[str, ...], most: int | None) -> list[tuple[Mutant, str]]:
    """The chosen mutants of files, each with the file's text."""
    found = []
    for path in (path for pattern in patterns for path in sorted(ROOT.glob(pattern))):
        source = path.read_text()
        of_file = mutants(str(path.relative_to(ROOT)), source)
        found += [(mutant, source) for mutant in chosen(of_file, source, most)]
    return found


def test_files(area: Area) -> list[str]:
    """The test files of an area."""
    paths = [path for pattern in area.tests for path in sorted(ROOT.glob(pattern))]
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("test_*.py")))]
    return [str(file.relative_to(ROOT)) for file in files]


def said(mutant: Mutant, result: Result) -> str:
    """A line that says what became of a mutant."""
    how = f"found by {result.found_by}" if result.found_by else f"SURVIVED {result.tests} tests"
    where = f"{mutant.file}:{mutant.line} {mutant.function}"
    return f"{where}: {shorter(mutant.original)} -> {shorter(mutant.replacement)}: {how}, {result.seconds:.0f} s"


def shorter(text: str, most: int = 90) -> str:
    return text if len(text) <= most else text[: most - 4] + " ..."


if __name__ == "__main__":
    sys.exit(main())
