"""Run tests against mutants, each in a process that is forked from one that has imported all libraries.

A run has a folder in which the package consists of links into the repository, but for the one file that is changed.
First each test file runs once without a change, under a profiler that says which functions each test reaches. A mutant
then meets the tests that reach its function alone: those that found its neighbours, then the quickest.
"""

import contextlib
import cProfile
import gc
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from mutants import Mutant

ROOT = Path(__file__).resolve().parents[2]
LINKS = {  # where the packages lie, as setup.py's links have them
    "heavypath/__init__.py": ROOT / "speculative/package/__init__.py",
    "heavypath/kernels": ROOT / "kernels",
    "heavypath/speculative": ROOT / "speculative",
}
MEMORY = 8 << 30  # bytes that a run may take
FIRST = 2.0  # seconds of the tests that run before the files of all others are read
MOST = 90  # seconds of the tests that a mutant meets, of which fewer fit on a slow computer


class Measured(NamedTuple):
    """A test as it ran without a change: its CPU seconds, and the functions it reached, as "file function"."""

    name: str
    seconds: float
    reached: frozenset[str]


class Result(NamedTuple):
    """What became of a mutant.

    found_by: a test's name, "import", a signal's name (SIGPROF after too long a time); "" if it survived
    tests:    how many tests reach its function and ran, but for those after the one that found it
    """

    found_by: str
    tests: int
    seconds: float


class Runner:
    """Runs tests of the folder `root` against mutants of its files, in `jobs` processes.

    links:        what is linked where in a run's folder, as {"heavypath/kernels": root / "kernels"}
    environment:  variables of the tests' processes
    """

    def __init__(self, root: Path, links: dict[str, Path], *, jobs: int = 1, environment: dict[str, str] | None = None):
        self.root, self.links, self.jobs, self.environment = root, links, jobs, environment or {}
        self.found_by: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def measured(self, files: list[str]) -> Iterator[tuple[str, list[Measured]]]:
        """The tests of each file that pass."""
        work = {file: lambda place, file=file: self._measure(file, place) for file in files}
        for file, answer, _, seconds in _each(work, lambda _: 3600.0, self.jobs):
            if answer is None:
                raise RuntimeError(f"{file} was killed after {seconds:.0f} seconds")
            print(f"{file}: {len(answer)} tests, {seconds:.0f} s", flush=True)
            yield file, [Measured(name, seconds, frozenset(reached)) for name, seconds, reached in answer]

    def results(self, mutants: list[tuple[Mutant, str]], tests: list[Measured]) -> Iterator[tuple[Mutant, Result]]:
        """What becomes of mutants, each with its file's text, as they are done."""
        meeting, work = {}, {}
        for mutant, source in mutants:
            meeting[mutant] = self._meeting(mutant, tests)
            if meeting[mutant]:
                work[mutant] = lambda place, each=(mutant, source): self._meet(*each, meeting[each[0]], place)
            else:
                yield mutant, Result("", 0, 0.0)
        for mutant, answer, killed, seconds in _each(work, lambda mutant: 120 + 20 * _sum(meeting[mutant]), self.jobs):
            found_by = killed if answer is None else answer
            if "::" in found_by:
                for where in (mutant.function, mutant.file):
                    self.found_by[where][found_by] += 1
            yield mutant, Result(found_by, len(meeting[mutant]), seconds)

    def _meeting(self, mutant: Mutant, tests: list[Measured]) -> list[Measured]:
        """The tests that reach a mutant's function, quickest first, of MOST seconds."""
        name, kept = f"{mutant.file} {mutant.function}", []
        for test in sorted((test for test in tests if name in test.reached), key=lambda test: test.seconds):
            if kept and _sum(kept) + test.seconds > MOST:
                break
            kept.append(test)
        return kept

    def _meet(self, mutant: Mutant, source: str, tests: list[Measured], place: Path) -> str:
        """Run tests against a mutant: by what it was found."""
        sys.dont_write_bytecode = True
        self._enter(place, self.root / mutant.file, mutant.applied(source))
        here, near = self.found_by[mutant.function], self.found_by[mutant.file]
        tests = sorted(tests, key=lambda test: (-here[test.name], -near[test.name], test.seconds))
        first = next((place for place in range(len(tests)) if _sum(tests[:place]) > FIRST), len(tests))
        for part in filter(None, (tests[:first], tests[first:])):
            watch = _Watch(part)
            code = self._pytest(place, dict.fromkeys(test.name.split("::")[0] for test in part), watch, "-x")
            if watch.failed:
                return watch.failed[0]
            if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                return "import"
        return ""

    def _measure(self, file: str, place: Path) -> list[tuple[str, float, list[str]]]:
        self._enter(place)
        recorder = _Recorder(self.root)
        code = self._pytest(place, [file], recorder)
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise RuntimeError(f"pytest ended with {code!r}")
        return recorder.answer()

    def _enter(self, place: Path, changed: Path | None = None, text: str = "") -> None:
        """Have this process, which was forked for it, import the package from a folder with one file changed."""
        link_all(self.links, place, changed, text)
        os.chdir(self.root)
        os.environ |= self.environment | {"PYTHONPATH": str(place), "HYPOTHESIS_STORAGE_DIRECTORY": f"{place}/examples"}
        sys.path.insert(0, str(place))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))

    def _pytest(self, place: Path, files, plugin, *more: str) -> int:
        options = ["-q", "-p", "no:cacheprovider", f"--basetemp={place}/tests", f"--rootdir={self.root}"]
        options += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
        return pytest.main([*options, *more, *files], plugins=[plugin])


def _sum(tests: list[Measured]) -> float:
    return sum(test.seconds for test in tests)


def link_all(links: dict[str, Path], place: Path, changed: Path | None = None, text: str = "") -> None:
    """Put links into a folder by their names, as `Runner` has them, with one file changed."""
    for name, source in links.items():
        (place / name).parent.mkdir(exist_ok=True)
        _link(place / name, source, changed, text)


def _link(link: Path, source: Path, changed: Path | None, text: str) -> None:
    """A link to a file or folder; but the changed file is written there, and folders above it are made.

    Of these nothing that was compiled is linked: it could be taken for the changed file's.
    """
    if source == changed:
        link.write_text(text)
    elif changed is not None and changed.is_relative_to(source):
        link.mkdir()
        for each in source.iterdir():
            if each.name != "__pycache__":
                _link(link / each.name, each, changed, text)
    else:
        link.symlink_to(source)


class _Recorder:
    """A plugin of pytest: which functions of files below `root` each test reaches, also by its fixtures."""

    def __init__(self, root: Path):
        self.root, self.files = root, {}
        self.importing, self.fixtures = set(), defaultdict(set)
        self.items, self.failed = {}, set()
        self.profiler, self.of_threads = cProfile.Profile(builtins=False, subcalls=False), set()
        self._listen()

    def _listen(self) -> set:
        """Begin to note what is called, in this thread and new ones: the code objects that ran since the last time."""
        self.profiler.disable()
        ran = self._codes()
        self.profiler, self.of_threads = cProfile.Profile(builtins=False, subcalls=False), set()
        self.profiler.enable()
        of_threads = self.of_threads
        threading.setprofile(lambda frame, event, _: of_threads.add(frame.f_code) if event == "call" else None)
        return ran

    def _codes(self) -> set:
        return {entry.code for entry in self.profiler.getstats()} | self.of_threads

    def pytest_collection_finish(self):
        self.importing = self._listen()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        before = set() if fixturedef.scope == "function" else self._codes()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                self.fixtures[fixturedef.argname] |= self._codes() - before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self._listen()
        since = time.process_time()
        try:
            return (yield)
        finally:
            self.items[item.nodeid] = time.process_time() - since, self._listen(), item.fixturenames

    def pytest_runtest_logreport(self, report):
        if not report.passed:
            self.failed.add(report.nodeid)

    def answer(self) -> list[tuple[str, float, list[str]]]:
        self.profiler.disable()
        threading.setprofile(None)
        found = []
        for name, (seconds, codes, fixtures) in self.items.items():
            if name not in self.failed:
                every = codes.union(self.importing, *(self.fixtures[fixture] for fixture in fixtures))
                found.append((name, seconds, sorted({self._name(code) for code in every} - {""})))
        return found

    def _name(self, code) -> str:
        """A code object as "file function"; "" for one of other folders."""
        file = self.files.get(code.co_filename)
        if file is None:
            path = Path(code.co_filename).resolve()
            inside = os.path.isabs(code.co_filename) and path.is_relative_to(self.root)
            file = str(path.relative_to(self.root)) if inside else ""
            self.files[code.co_filename] = file
        return file and f"{file} {code.co_qualname.partition('.<locals>')[0]}"


class _Watch:
    """A plugin of pytest: these tests alone, in their order, each in ten times the CPU time that it took before."""

    def __init__(self, tests: list[Measured]):
        self.place = {test.name: place for place, test in enumerate(tests)}
        self.seconds = {test.name: test.seconds for test in tests}
        self.failed = []

    def pytest_collection_modifyitems(self, items):
        items[:] = sorted(
            (item for item in items if item.nodeid in self.place), key=lambda item: self.place[item.nodeid]
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        signal.setitimer(signal.ITIMER_PROF, 10 + 10 * self.seconds[item.nodeid])  # SIGPROF ends the process
        return (yield)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid)


def _each(work: dict, limit: Callable[..., float], jobs: int) -> Iterator[tuple]:
    """Do each piece of work in a process: its key, what it returns or None, the signal that ended it, and seconds."""
    waiting, running = list(work), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            key = waiting.pop(0)
            place = Path(tempfile.mkdtemp(prefix="mutant-"))
            running[_fork(work[key], place)] = key, place, time.monotonic()
        time.sleep(0.02)
        for process, (key, place, since) in list(running.items()):
            seconds = time.monotonic() - since
            ended, status = os.waitpid(process, os.WNOHANG)
            if not ended and seconds < limit(key):
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)  # it, or what it has left
            status = status if ended else os.waitpid(process, 0)[1]
            del running[process]
            answer = None
            if not os.WIFSIGNALED(status):
                if status:
                    raise RuntimeError((place / "output").read_text()[-5000:])
                answer = json.loads((place / "answer.json").read_text())
            yield key, answer, signal.Signals(os.WTERMSIG(status)).name if answer is None else "", seconds
            shutil.rmtree(place, ignore_errors=True)


def _fork(work: Callable, place: Path) -> int:
    """Start a process that does a piece of work and writes what it returns."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        os.setsid()
        gc.freeze()  # what is here already: pytest collects garbage several times
        output = os.open(place / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        (place / "answer.json").write_text(json.dumps(work(place)))
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)
