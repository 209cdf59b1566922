"""Shared fixtures. Without a GPU the kernels run in Triton's interpreter, which must be chosen before they are read."""

import math
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture
def interpreter():
    """For a test that has Triton's interpreter run kernels on CPU tensors, which it does not where there is a GPU."""
    if torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter, which is off where there is a GPU")


@pytest.fixture
def any_noise(monkeypatch):
    """Real timings count, however busy the machine is. What noise does is tested with made-up ones in test_costs."""
    from heavypath.speculative import costs

    monkeypatch.setattr(costs, "MOST", math.inf)
    monkeypatch.setattr(costs, "MOST_MOVED", math.inf)
    monkeypatch.setattr(costs, "MOST_ROUNDS", 5)


@pytest.fixture(scope="session")
def demo_pair():
    from heavypath.speculative import load_demo_pair

    return load_demo_pair()
