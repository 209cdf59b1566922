"""Shared fixtures."""

import pytest
import torch


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def demo_pair():
    from heavypath.speculative import load_demo_pair

    return load_demo_pair()
