"""The plain chain of demo/chain.py writes the target's law and its greedy text."""

from types import SimpleNamespace

import pytest
import torch
from statistical import SIGNIFICANCE, chi_square_p_value, joint_counts
from tiny_models import assert_same_text, exact_law, tiny_llama, transformers_greedy

from heavypath.kernels.filtering import Filters
from heavypath.speculative.demo import chain, demo_prompts

PROMPT, LENGTH, VOCAB_SIZE = torch.tensor([3, 1, 2]), 4, 4


class Remembered:
    """A model that answers a text seen before from memory: there are few texts, and each is asked for often."""

    def __init__(self, model):
        self.model, self.forwards, self._answers = model, 0, {}

    def __call__(self, ids):
        self.forwards += 1
        text = tuple(ids[0].tolist())
        if text not in self._answers:
            self._answers[text] = self.model(ids).logits
        return SimpleNamespace(logits=self._answers[text])


@pytest.fixture(scope="module")
def tiny_pair():
    return tuple(Remembered(tiny_llama(seed, VOCAB_SIZE, layers=3 - seed)) for seed in (1, 2))


def test_the_law_of_four_tokens_is_the_targets(tiny_pair):
    generator, options = torch.Generator().manual_seed(5), {"draft_length": 3, "temperature": 0.7}
    drawn = [chain.chain_decode(*tiny_pair, PROMPT[None], LENGTH, generator=generator, **options) for _ in range(1500)]
    counts = joint_counts(torch.cat(drawn)[:, len(PROMPT) :], VOCAB_SIZE)
    law = exact_law(tiny_pair[0].model, PROMPT, Filters(0.7), LENGTH)
    assert chi_square_p_value(counts, law) > SIGNIFICANCE


@pytest.mark.parametrize("draft_length", [0, 1, 4])
@pytest.mark.few(2)
def test_there_are_exactly_as_many_new_tokens_as_asked_for_and_greedy_ones_are_those_of_transformers(
    draft_length, tiny_pair
):
    for max_new_tokens in range(8):
        text = chain.chain_decode(*tiny_pair, PROMPT[None], max_new_tokens, draft_length)
        assert text.shape == (1, len(PROMPT) + max_new_tokens)
        assert torch.equal(text[0, : len(PROMPT)], PROMPT)
    target = tiny_pair[0].model
    text = chain.chain_decode(*tiny_pair, PROMPT[None], 24, draft_length, temperature=0)
    assert_same_text(target, text, transformers_greedy(target, PROMPT[None], 24))


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_draft_that_is_the_target_is_always_accepted(temperature):
    """5 forwards write 5 tokens each, and a 6th the last 2; the draft writes 4 and then 1 of them."""
    target, draft = Remembered(tiny_llama(1)), Remembered(tiny_llama(1))
    chain.chain_decode(target, draft, PROMPT[None], 27, draft_length=4, temperature=temperature)
    assert (target.forwards, draft.forwards) == (6, 5 * 4 + 1)


def test_laws_that_differ_by_rounding_alone_leave_a_token_to_recover(monkeypatch):
    """Draft: 1/64 for each token. Target: the drafted token has 1/64 - 2**-29, and the others 1/64 after rounding."""

    def draft(ids):
        return SimpleNamespace(logits=torch.zeros(1, ids.shape[1], 64))

    def target(ids):
        logits = torch.zeros(1, ids.shape[1], 64)
        logits[0, -2, ids[0, -1]] = -(2**-23)
        return SimpleNamespace(logits=logits)

    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(1 - 2**-24))  # the largest coin: a rejection
    assert chain.chain_decode(target, draft, PROMPT[None], 2, draft_length=1).shape == (1, len(PROMPT) + 2)


def test_the_command_prints_the_text_and_how_many_forwards_it_took(capsys):
    chain.main()
    text, count = capsys.readouterr().out.rsplit("\n\n", 1)
    assert text.startswith(demo_prompts()[3])
    assert len(text) > len(demo_prompts()[3]) + 64
    forwards = int(count.split()[3])
    assert count == f"64 tokens in {forwards} target forwards: {64 / forwards:.2f} tokens per forward\n"
    assert 13 <= forwards <= 45
