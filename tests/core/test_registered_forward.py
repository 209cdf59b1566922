"""A forward pass of a user's own serves the models of its type, and is held to their own logits."""

import re
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from heavypath.speculative import FORWARDS, Forward, SpeculativeDecoder
from heavypath.speculative.models.generic import TransformersForward

PROMPTS = torch.tensor([[3, 1, 4, 1, 5], [2, 6, 5, 3, 5]])


def gpt2(seed, layers=2):
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=31, n_positions=128, n_embd=16, n_layer=layers, n_head=2, bos_token_id=0, eos_token_id=0,
        initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "extend.md").read_text(encoding="utf-8")
EXAMPLE = {}
exec(re.search(r"^```python\n([^`]*class Gpt2Forward.*?)^torch", PAGE, re.S | re.M)[1], EXAMPLE)


class Gpt2Forward(EXAMPLE["Gpt2Forward"]):
    """That of the page on extensions; `calls` counts passes."""

    calls = 0

    def __call__(self, *arguments, **options):
        Gpt2Forward.calls += 1
        return super().__call__(*arguments, **options)


@pytest.fixture
def register(monkeypatch):
    return lambda make: monkeypatch.setitem(FORWARDS, "gpt2", make)


def test_a_registered_pass_serves_target_and_draft_and_writes_the_texts_of_transformers_own(register):
    target, draft = gpt2(1), gpt2(2, layers=1)
    options = {"max_new_tokens": 24, "temperature": 0.7, "eos_token_id": None}
    before = SpeculativeDecoder(target, draft, tree_size=7)
    expected = before.generate(PROMPTS, **options)
    assert type(before._target) is TransformersForward
    register(Gpt2Forward)
    decoder = SpeculativeDecoder(target, draft, tree_size=7)
    Gpt2Forward.calls = 0
    out = decoder.generate(PROMPTS, **options)
    assert Gpt2Forward.calls > out.stats.steps > 24
    assert torch.equal(out.sequences, expected.sequences)
    greedy = target.generate(PROMPTS, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(decoder.generate(PROMPTS, 24, eos_token_id=None).sequences, greedy)


class InRowOrder(Gpt2Forward):
    """Wrong: a node's cache row stands for its position."""

    def __call__(self, tokens, positions, cache_rows, *others, **options):
        return super().__call__(tokens, cache_rows, cache_rows, *others, **options)


class ShortSighted(Gpt2Forward):
    """Wrong for long sequences alone: tokens after the 40th have its position."""

    def __call__(self, tokens, positions, *others, **options):
        return super().__call__(tokens, positions.clamp(max=40), *others, **options)


class WithoutLayers(Gpt2Forward):
    def __init__(self, model, name):
        Forward.__init__(self, model, name)


class Failing(Gpt2Forward):
    def __call__(self, *arguments, **options):
        raise RuntimeError("no kernel for that")


@pytest.mark.parametrize(("make", "error", "message"), [
    (InRowOrder, ValueError, "for target of type 'gpt2' gives other logits than the model's own: after 3 tokens"),
    (ShortSighted, ValueError, "gives other logits than the model's own: after 64 tokens"),
    (WithoutLayers, TypeError, "a WithoutLayers, must set self.layers and self.windows in __init__"),
    (Failing, ValueError, "fails for a tree after 3 tokens: no kernel for that"),
    (lambda model, name: model, TypeError, "must be a class that inherits Forward, or return one; got GPT2LMHead"),
    (Forward, TypeError, "abstract"),
])  # fmt: skip
def test_a_pass_that_is_not_the_models_is_refused_when_a_decoder_is_made(make, error, message, register):
    register(make)
    with pytest.raises(error, match=message):
        SpeculativeDecoder(gpt2(1), gpt2(2))


def test_further_inputs_of_a_prompt_are_refused_by_a_pass_over_tokens(register):
    register(Gpt2Forward)
    decoder, embeddings = SpeculativeDecoder(gpt2(1), gpt2(2)), torch.zeros(2, 5, 16)
    with pytest.raises(ValueError, match="runs by Gpt2Forward, which reads tokens alone"):
        decoder.generate(PROMPTS, 4, model_inputs={"inputs_embeds": embeddings})
