"""The target of the tests of drafts."""

import pytest


@pytest.fixture(scope="module")
def target():
    """In fp64: random weights with opinions make much of rounding."""
    from tiny_models import tiny_llama  # which imports kernels, once tests/conftest.py has looked for a GPU

    return tiny_llama(0, max_position_embeddings=256).double()
