"""Make mutants of the functions that decide the text, and fail for one that no test finds.

    python tests/mutants/run.py                     a mutant of each function, the same ones every time
    python tests/mutants/run.py --area commit --most 20 --jobs 4 --json mutants.json
    python tests/mutants/run.py --only mutants.json --checkout OTHER    what survived, against the tests of OTHER

`survivors.json` says of each of the usual mutants that no test can find why not. Where one survives that is not there,
write a test that finds it.
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path[0] = str(ROOT / "tests/support")

from mutant_runs import Measured, Result, Runner  # noqa: E402
from mutants import Mutant, chosen, mutants  # noqa: E402

LISTED = Path(__file__).with_name("survivors.json")
LIBRARIES = (
    "torch", "numpy", "scipy.stats", "triton.language", "triton.runtime.interpreter", "hypothesis",
    "transformers.models.llama.modeling_llama", "transformers.generation", "torch.nn.functional", "accelerate",
)  # fmt: skip


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
            "tests/mutants/test_mutations.py",
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
    checkout = (given.checkout or ROOT).resolve()
    wanted = only(given.only) if given.only else None
    work, start = {}, time.monotonic()
    for name in given.area or AREAS:
        several = of_files(AREAS[name].files, given.most)
        work[name] = [(mutant, source) for mutant, source in several if wanted is None or mutant.key in wanted]
    left = sum(map(len, work.values()))
    print(f"{left} mutants")
    done: list[tuple[Mutant, Result]] = []
    measured: dict[tuple[str, bool], list[Measured]] = {}  # tests of files that several areas have
    for name, several in work.items():
        area, already = AREAS[name], len(done)
        if not several:
            continue
        first, second = (
            Runner(
                ROOT, links(ROOT), checkout, jobs=given.jobs, most_seconds=given.most_seconds,
                environment={} if native else {"HEAVYPATH_NATIVE": "0"},
            )
            for native in (area.native, not area.native)
        )  # fmt: skip
        print(f"{name}: {len(several)} mutants; which tests reach their functions?", flush=True)
        files = test_files(area, checkout)
        for file, tests in first.measured([file for file in files if (file, area.native) not in measured]):
            measured[file, area.native] = tests
            print(f"{name}: {file}, {len(tests)} tests, {sum(test.seconds for test in tests):.0f} s", flush=True)
        tests, since = [test for file in files for test in measured[file, area.native]], time.monotonic()
        for mutant, result in outcomes(first, second, several, tests):
            done.append((mutant, result))
            left -= 1
            minutes = (time.monotonic() - since) / (len(done) - already) * left / 60
            print(said(mutant, result), f"[{left} left, {minutes:.0f} min]", flush=True)
            if given.json:
                given.json.write_text(json.dumps([kept(*each) for each in done], indent=1) + "\n")
    return summary(done, (time.monotonic() - start) / 60, strict=checkout == ROOT)


def outcomes(
    first: Runner, second: Runner, several: list[tuple[Mutant, str]], tests: list[Measured]
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
    parser.add_argument("--only", type=Path, help="those that survived, in a file that --json wrote")
    parser.add_argument("--jobs", type=int, default=2, help="processes, about 1 GB each (default: 2)")
    parser.add_argument("--most-seconds", type=float, default=30, help="of the tests that a mutant meets (default: 30)")
    parser.add_argument("--checkout", type=Path, help="a checkout whose tests run (default: this one)")
    parser.add_argument("--json", type=Path, help="where to write the results")
    return parser.parse_args()


def links(root: Path) -> dict[str, Path]:
    """Where the packages lie, as setup.py's links have them."""
    return {
        "heavypath/__init__.py": root / "speculative/package/__init__.py",
        "heavypath/kernels": root / "kernels",
        "heavypath/speculative": root / "speculative",
    }


def of_files(patterns: tuple[str, ...], most: int | None) -> list[tuple[Mutant, str]]:
    """The chosen mutants of files, each with the file's text."""
    found = []
    for path in (path for pattern in patterns for path in sorted(ROOT.glob(pattern))):
        source = path.read_text()
        of_file = mutants(str(path.relative_to(ROOT)), source)
        found += [(mutant, source) for mutant in chosen(of_file, source, most)]
    return found


def test_files(area: Area, checkout: Path) -> list[str]:
    """The test files of an area."""
    paths = [path for pattern in area.tests for path in sorted(checkout.glob(pattern))]
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("test_*.py")))]
    return [str(file.relative_to(checkout)) for file in files]


def said(mutant: Mutant, result: Result) -> str:
    """A line that says what became of a mutant."""
    how = f"found by {result.found_by}" if result.found_by else f"SURVIVED {result.tests} tests"
    where = f"{mutant.file}:{mutant.line} {mutant.function}"
    return f"{where}: {shorter(mutant.original)} -> {shorter(mutant.replacement)}: {how}, {result.seconds:.0f} s"


def shorter(text: str, most: int = 90) -> str:
    return text if len(text) <= most else text[: most - 4] + " ..."


def kept(mutant: Mutant, result: Result) -> dict:
    """A mutant and its result as JSON has them."""
    names = ("file", "function", "original", "replacement", "occurrence")
    return (
        dict(zip(names, mutant.key, strict=True))
        | {"operator": mutant.operator, "line": mutant.line}
        | result._asdict()
    )


def only(path: Path) -> set[tuple]:
    """The keys of the mutants that survived in an earlier run."""
    names = ("file", "function", "original", "replacement", "occurrence")
    return {tuple(each[name] for name in names) for each in json.loads(path.read_text()) if not each["found_by"]}


def summary(done: list[tuple[Mutant, Result]], minutes: float, *, strict: bool) -> int:
    """Say which mutants survived without being listed, and which listed ones are found: the exit status."""
    listed = {
        (each["file"], each["function"], each["original"], each["replacement"], each["occurrence"])
        for each in json.loads(LISTED.read_text())
    }
    survived = [(mutant, result) for mutant, result in done if not result.found_by]
    unlisted = [each for each in survived if each[0].key not in listed]
    print(
        f"\n{len(done)} mutants, {len(survived)} survived, {len(unlisted)} not in {LISTED.name}; {minutes:.0f} minutes"
    )
    for mutant, result in done:
        if result.found_by and mutant.key in listed:
            print(f"no longer survives, take it out of {LISTED.name}: {said(mutant, result)}")
    for mutant, result in unlisted:
        print(said(mutant, result))
    return bool(unlisted and strict)


if __name__ == "__main__":
    sys.exit(main())
