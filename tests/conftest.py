"""Shared fixtures. Without a GPU the kernels run in Triton's interpreter, which must be chosen before they are read."""

import math
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


pytest_plugins = ["command_line", "played_steps"]  # whose fixtures several folders use


def pytest_addoption(parser):
    parser.addoption(
        "--adversary", type=int, metavar="SEED", help="run kernels under tests/support/adversary.py with this seed"
    )


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(params=[1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def adversary(request):
    """A context in which kernels run interleaved at random, and fail for races; under three seeds, one if in haste."""
    yield from _adversary(request.param)


@pytest.fixture(autouse=True)
def everywhere(request):
    """The same for all tests, under one seed, if the command line says so."""
    seed = request.config.getoption("adversary")
    yield from [None] if seed is None or "adversary" in request.fixturenames else _adversary(seed)


def _adversary(seed):
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the adversary needs Triton's interpreter, which runs where there is no GPU")
    from adversary import Adversary

    with Adversary(seed) as adversary:
        yield adversary


@pytest.fixture
def interpreter():
    """For a test that has Triton's interpreter run kernels on CPU tensors, which it does not where there is a GPU."""
    if torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter, which is off where there is a GPU")


@pytest.fixture
def any_noise(monkeypatch):
    """Real timings count, however busy the machine is. What noise does is tested with made-up ones in test_costs."""
    from heavypath.speculative.costs import timing

    monkeypatch.setattr(timing, "MOST", math.inf)
    monkeypatch.setattr(timing, "MOST_MOVED", math.inf)
    monkeypatch.setattr(timing, "MOST_ROUNDS", 5)


@pytest.fixture(scope="session")
def demo_pair():
    from heavypath.speculative import load_demo_pair

    return load_demo_pair()
