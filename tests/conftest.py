"""Shared fixtures, and how the tests are run: long files first. What they take is said, and no test fails for it.

Without a GPU the kernels run in Triton's interpreter, which must be chosen before they are read.
"""

import gc
import json
import math
import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest

DURATIONS = Path(__file__).with_name("durations.json")  # seconds of each test; `make durations` writes it
BUDGET = 0.05  # seconds, of those: of a test that takes longer, as many variants run by default as it has time for
SHOWN = 10  # tests that a run names at its end
OF_WORKERS = pytest.StashKey()  # what the other processes of a run took of processors


def pytest_addoption(parser):
    parser.addoption(
        "--adversary", type=int, metavar="SEED", help="run kernels under tests/support/adversary.py with this seed"
    )
    parser.addoption("--durations-file", type=Path, metavar="FILE", help="write the seconds of each test there")
    parser.addoption("--every-variant", action="store_true", help="run all variants, however long a test takes")
    parser.addoption(
        "--rows", choices=("pairs", "triples", "today"), default="pairs",
        help="rows of the conformance suite: of all pairs, of all triples, or drawn at random anew each day",
    )  # fmt: skip


def pytest_configure(config):
    if config.getoption("--durations-file") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(config.getoption("--durations-file")))
    if not config.getoption("numprocesses", None):  # which has others run the tests, and needs no torch itself
        prepare()
        for name in ("command_line", "played_steps", "played_hub"):  # whose fixtures several folders use
            config.pluginmanager.import_plugin(name)


def prepare():
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests need no network; those of the Hub play it
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ.get("TRITON_INTERPRET") == "1":
        from interpreting import make_quick

        make_quick()
    # The tests are many small operations: more threads would only wait for each other.
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    from probed_once import remember_probes

    remember_probes()


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(config, items):
    """Long files come first, so that no process is left alone with one at the end."""
    seconds = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    if not config.getoption("--every-variant"):
        mark_variants(items, seconds)
    of_files = defaultdict(float)
    for name, duration in seconds.items():
        of_files[name.split("::")[0]] += duration
    items.sort(key=lambda item: -of_files[item.nodeid.split("::")[0]])
    gc.freeze()  # of what was imported nothing goes: to look through it takes as long as a short test
    gc.set_threshold(20_000)  # instead of 700 objects, which takes a fortieth of all time


def mark_variants(items, seconds):
    """Of a test that takes longer than its budget, some variants run by default, and the others nightly, as slow ones.

    The budget is BUDGET, or what a mark says. A test that is not recorded runs with all variants.
    """
    variants = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            variants[function_of(item.nodeid)].append(item)
    for name, several in variants.items():
        mark = several[0].get_closest_marker("budget")
        budget = mark.args[0] if mark else BUDGET
        share = budget / seconds.get(name, budget)
        if share < 1:
            mark_others(several, max(1, int(len(several) * share)))


def mark_others(several, count):
    """Mark all but `count` variants as slow: those stay in which most values appear, and that are far apart."""
    values = set()
    first = [several[len(several) * place // count] for place in range(count)]
    left = [*first, *(item for item in several if item not in first)]
    for _ in first:  # the next is one whose values have not been there; of those alike, one far from others
        item = max(left, key=lambda item: len(values_of(item) - values))
        left.remove(item)
        values |= values_of(item)
    for item in left:
        item.add_marker("slow")


def function_of(nodeid):
    """The test that a variant is one of."""
    return nodeid.split("[")[0]


def values_of(item):
    return {(name, str(value)) for name, value in item.callspec.params.items()}


def pytest_unconfigure():
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Write down what a test takes of a processor, in this process and those that it waited for."""
    before = os.times()
    try:
        return (yield)
    finally:
        item.user_properties.append(("processor_seconds", sum(os.times()[:4]) - sum(before[:4])))


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["processor_seconds"] = sum(os.times()[:4])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    taken = getattr(node, "workeroutput", {}).get("processor_seconds", 0.0)
    node.config.stash[OF_WORKERS] = node.config.stash.get(OF_WORKERS, 0.0) + taken


def pytest_terminal_summary(terminalreporter, config):
    """Say what the run took of processors, and the tests that took most."""
    reports = [
        each for several in terminalreporter.stats.values() for each in several if hasattr(each, "user_properties")
    ]
    seconds = {each.nodeid: dict(each.user_properties).get("processor_seconds", 0.0) for each in reports}
    longest = sorted(seconds, key=lambda name: -seconds[name])[:SHOWN]
    workers = config.stash.get(OF_WORKERS, 0.0)
    whole = sum(os.times()[: 2 if workers else 4]) + workers  # of which some are children that have been waited for
    terminalreporter.write_line(f"{whole:.0f} s of processors; the tests that took most:")
    for name in longest:
        terminalreporter.write_line(f"{seconds[name]:6.1f} s  {name}")


class Durations:
    """Adds up what the variants of each test take of processors."""

    def __init__(self, path):
        self.path, self.seconds = path, defaultdict(float)

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            self.seconds[function_of(report.nodeid)] += dict(report.user_properties)["processor_seconds"]

    def pytest_sessionfinish(self):
        known = json.loads(self.path.read_text()) if self.path.exists() else {}
        there = {name: seconds for name, seconds in known.items() if Path(name.split("::")[0]).exists()}
        there |= {name: round(seconds, 2) for name, seconds in self.seconds.items() if seconds >= 0.05}
        self.path.write_text(json.dumps(dict(sorted(there.items())), indent=1) + "\n")


@pytest.fixture(autouse=True)
def fixed_seed():
    import torch

    torch.manual_seed(0)


@pytest.fixture(params=[1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def adversary(request):
    """A context in which kernels run interleaved at random, and fail for races; under three seeds, one if in haste."""
    yield from _adversary(request.param)


@pytest.fixture(autouse=True)
def everywhere(request):
    """The same for all tests, under one seed, if the command line says so."""
    seed = request.config.getoption("adversary")
    yield from [None] if seed is None or "adversary" in request.fixturenames else _adversary(seed, everywhere=True)


def _adversary(seed, everywhere=False):
    if "ptx.plugin" in sys.modules:  # that of kernels as PTX
        from ptx.plugin import Adversary
    elif os.environ.get("TRITON_INTERPRET") == "1":
        from adversary import Adversary
    else:
        pytest.skip("the adversary needs Triton's interpreter, which runs where there is no GPU")
    with Adversary(seed, everywhere) as adversary:
        yield adversary


@pytest.fixture
def interpreter():
    """For a test that has Triton's interpreter run kernels on CPU tensors, which it does not where there is a GPU."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter, which is off where there is a GPU")


@pytest.fixture
def tried_anew(monkeypatch):
    """Every model is tried out, though it was tried before: see tests/support/probed_once.py."""
    monkeypatch.setattr("probed_once.REMEMBERED", False)


@pytest.fixture
def any_noise(monkeypatch):
    """Real timings count, however busy the machine is. What noise does is tested with made-up ones in test_costs."""
    from heavypath.speculative import gains
    from heavypath.speculative.costs import timing

    monkeypatch.setattr(timing, "MOST", math.inf)
    monkeypatch.setattr(timing, "MOST_MOVED", math.inf)
    monkeypatch.setattr(timing, "MOST_ROUNDS", 5)
    monkeypatch.setattr(gains, "ROUNDS_OF_GAINS", 1)


@pytest.fixture(scope="session")
def demo_pair():
    from heavypath.speculative import load_demo_pair

    return load_demo_pair()


@pytest.fixture(scope="module")
def tiny_pair():
    """A target and a smaller draft, which have opinions about seven tokens."""
    from tiny_models import tiny_llama

    return tiny_llama(1), tiny_llama(2, layers=1)


@pytest.fixture(scope="session")
def tokenizer(demo_pair):
    return demo_pair.tokenizer
