"""The target of the tests of drafts."""

import pytest
from tiny_models import tiny_llama


@pytest.fixture(scope="module")
def target():
    """In fp64: random weights with opinions make much of rounding."""
    return tiny_llama(0, max_position_embeddings=256).double()
