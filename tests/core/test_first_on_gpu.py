"""What to know first on a GPU: texts are those of a CPU, with CUDA graphs and without, and the graphs are there.

In fp32, where a GPU's other order of sums changes a token once in a hundred thousand. On a GPU that is only played
(tests/support/stand_in_gpu.py) it runs in miniature.
"""

import logging

import pytest
import torch
from gpu_cases import MINIATURE, prompts, pytestmark, size  # noqa: F401
from tiny_models import tiny_llama

from heavypath.speculative import SpeculativeDecoder, load_demo_pair

SAMPLINGS = [{"temperature": 0.0}, {"temperature": 0.8}][size(0, 1) :]
PROMPTS, NEW_TOKENS = (size(2, 1), 9), size(64, 4)
TREE = {"tree_size": size(16, 3), "verifier": "rejection"}  # a CPU has another verifier if it is not told


def models():
    """A pair on the CPU, in fp32."""
    if MINIATURE:
        return [tiny_llama(seed, layers=1, hidden_size=32, vocab_size=50) for seed in (1, 2)]
    return load_demo_pair()[:2]


@pytest.fixture(autouse=True)
def nothing_fails(caplog):
    """Where a step cannot be captured, a warning says so, and it runs eagerly."""
    yield
    warnings = [record for record in caplog.get_records("call") if record.levelno >= logging.WARNING]
    assert not [record.getMessage() for record in warnings if record.name.startswith("heavypath")]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_texts_are_those_of_a_cpu(sampling):
    def text(device, **graphs):
        decoder = SpeculativeDecoder(*(model.to(device) for model in models()), "sequoia", **TREE, **graphs)
        out = decoder.generate(prompts(*PROMPTS).to(device), NEW_TOKENS, seed=5, eos_token_id=None, **sampling)
        assert not graphs.get("cuda_graphs") or len(decoder.runner.idle.launcher.graphs) > 0
        return out.sequences.cpu()

    expected = text("cpu")
    for graphs in (False, True):
        assert torch.equal(text("cuda", cuda_graphs=graphs), expected)
