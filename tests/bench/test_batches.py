"""Batches of prompts in bench/, and the standard errors over them, by cases that a person can check."""

import importlib
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_llama

from heavypath.speculative import SpeculativeDecoder, TokenTree

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def batches():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        yield importlib.import_module("batches")


def stats(tokens, steps):
    return SimpleNamespace(tokens_of=torch.tensor(tokens), steps_of=torch.tensor(steps))


def test_tokens_per_forward_and_its_error_by_hand(batches):
    """15 tokens in 6 steps; without one prompt 2 or 3, each 0.5 from their mean: sqrt(1 / 2 (0.25 + 0.25))."""
    assert batches.tokens_per_forward(stats([9, 6], [3, 3])) == pytest.approx((2.5, 0.5))
    # The same prompts twice: a prompt's seeds are one unit.
    assert batches.tokens_per_forward(stats([4, 5, 2, 4], [1, 2, 1, 2]), seeds=2) == pytest.approx((2.5, 0.5))


def test_a_mean_has_its_usual_standard_error(batches):
    tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    found = batches.tokens_per_forward(stats(tokens.tolist(), [1] * 8))
    assert found == pytest.approx((float(tokens.double().mean()), float(tokens.double().std()) / math.sqrt(8)))


def test_a_gain_is_paired_by_prompt(batches):
    """Half as many tokens again after each prompt: the gain is 50%, and sure."""
    assert batches.gain(stats([9, 6], [3, 3]), stats([6, 4], [3, 3])) == pytest.approx((0.5, 0))
    assert batches.gain(stats([9, 6], [3, 3]), stats([6, 6], [3, 3])) == pytest.approx((0.25, 0.25))


def test_one_prompt_has_no_standard_error(batches):
    value, error = batches.tokens_per_forward(stats([9], [3]))
    assert value == 3
    assert math.isnan(error)


def test_a_batch_decodes_each_prompt_as_alone(batches):
    """Greedy, whatever the padding; each prompt as often as there are seeds."""
    model = tiny_llama(1)
    prompts = [torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6, 0, 2]])]
    texts = batches.batch_of(prompts, 2)
    assert texts.mask.sum(1).tolist() == [3, 3, 5, 5]
    decoder = SpeculativeDecoder(model, tiny_llama(2), "chain", tree=TokenTree.chain(2))
    options = {"max_new_tokens": 5, "temperature": 0.0}
    together = decoder.generate(texts.tokens, **texts.options, **options).sequences[:, -5:]
    alone = [decoder.generate(prompt, eos_token_id=None, **options).sequences[0, -5:] for prompt in prompts]
    assert together.tolist() == [alone[0].tolist()] * 2 + [alone[1].tolist()] * 2
