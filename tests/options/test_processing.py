"""Repetition penalty, least lengths and stopping criteria: transformers' own, along every path."""

import pytest
import torch
from texts_with_rules import PROMPTS, left_padded
from tiny_models import tiny_llama
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation import (
    ConfidenceCriteria,
)

from heavypath.speculative import SpeculativeDecoder, TokenTree
from heavypath.speculative.decoding.device_tree import device_tree
from heavypath.speculative.decoding.drafting import root_alone
from heavypath.speculative.decoding.processing import Processing
from heavypath.speculative.decoding.sequences import Sequences


@pytest.fixture(scope="module")
def tiny_pair():
    return tiny_llama(1), tiny_llama(2, layers=1)


def by_transformers(model, prompt, **settings):
    """transformers' greedy text of a prompt alone, LongTensor[new]."""
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None} | settings
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :]


def test_a_penalty_counts_the_prompt_and_the_path_and_counts_a_token_once():
    """After the root 2 and its child 0: tokens 1, 2 of the text, at the child also 0; token 3 is another branch's."""
    shape = device_tree(TokenTree([-1, 0, 0]), 1, torch.device("cpu"))
    prompt, length = torch.tensor([[1, 1, 2]]), torch.tensor([3])
    sequences = Sequences.room_for(1, new_tokens=4, stops=1, vocab_size=5, count_slots=1, device=prompt.device)
    options = {"new_tokens": 4, "stops": torch.tensor([4]), "sequence_ids": torch.tensor([0]), "seed": 0}
    sequences.begin(prompt, length, **options)
    drafted = root_alone(sequences, torch.zeros(1, 1), shape)._replace(tokens=torch.tensor([[2, 0, 3]]))
    logits = torch.tensor([4.0, 4.0, -4.0, 4.0, 4.0]).expand(1, 3, 5).clone()
    out = Processing(2.0, 1)(logits, drafted, sequences)
    nothing = -torch.inf
    assert out[0].tolist() == [[4, 2, -8, 4, nothing], [2, 2, -8, 4, 4], [4, 2, -8, 2, 4]]


class Watching(StoppingCriteria):
    """Ends a text that has `sum` in its new tokens; keeps what it was shown."""

    def __init__(self, begin, total):
        self.begin, self.total, self.seen = begin, total, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.tolist())
        return input_ids[:, self.begin :].sum(1) >= self.total


@pytest.mark.parametrize("method", ["autoregressive", "sequoia", "spectr", "rsd-s"])
def test_a_criterion_is_asked_once_for_each_new_token_and_no_more(method, tiny_pair):
    target, _ = tiny_pair
    decoder = SpeculativeDecoder(target, target, method)  # accepts whole blocks
    ours, theirs = Watching(2, 40), Watching(2, 40)
    out = decoder.generate(torch.tensor([[1, 2]]), 40, stopping_criteria=[ours])
    expected = by_transformers(target, [1, 2], max_new_tokens=40, stopping_criteria=StoppingCriteriaList([theirs]))
    assert out.sequences[0, 2:].tolist() == expected.tolist()
    assert 5 < len(expected) < 40
    assert ours.seen == theirs.seen
    assert method == "autoregressive" or out.stats.tokens_per_step > 1.5


@pytest.mark.parametrize("method", ["autoregressive", "specinfer", "sequoia", "dyspec"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_text_cut_by_a_criterion_is_the_beginning_of_the_text(method, temperature, tiny_pair):
    decoder = SpeculativeDecoder(*tiny_pair, method)
    inputs = left_padded(PROMPTS)
    width = inputs["input_ids"].shape[1]
    whole = decoder.generate(**inputs, max_new_tokens=24, temperature=temperature, seed=3).sequences[:, width:]
    out = decoder.generate(
        **inputs, max_new_tokens=24, temperature=temperature, seed=3, pad_token_id=0,
        stopping_criteria=[Watching(width, 25)],
    )  # fmt: skip
    for text, cut in zip(whole, out.sequences[:, width:], strict=True):
        end = int((text.cumsum(0) < 25).sum()) + 1
        assert cut.tolist() == text[:end].tolist() + [0] * (cut.shape[0] - end)


def test_a_streamer_gets_the_cut_text(tiny_pair):
    tokens = []

    class Recorder:
        def put(self, value):
            tokens.extend(value.flatten().tolist())

        def end(self):
            tokens.append("end")

    out = SpeculativeDecoder(*tiny_pair).generate(
        torch.tensor([[1, 2]]), 24, stopping_criteria=[Watching(2, 17)], streamer=Recorder()
    )
    assert tokens == [*out.sequences[0].tolist(), "end"]


def test_what_is_not_asked_for_is_not_done(tiny_pair, monkeypatch):
    def never(*_):
        raise AssertionError

    monkeypatch.setattr(Processing, "__call__", never)
    decoder = SpeculativeDecoder(*tiny_pair)
    plain = decoder.generate(torch.tensor([[1, 2]]), 12).sequences
    settings = {"repetition_penalty": 1, "min_new_tokens": 5}  # nothing can end it
    assert torch.equal(decoder.generate(torch.tensor([[1, 2]]), 12, **settings).sequences, plain)


@pytest.mark.parametrize(("options", "message"), [
    ({"repetition_penalty": 0.0}, "repetition_penalty must be a finite number > 0, got 0.0"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty must be a finite number > 0, got inf"),
    ({"repetition_penalty": "1.2"}, "repetition_penalty must be a finite number > 0, got '1.2'"),
    ({"min_new_tokens": 5}, r"min_new_tokens must be in 0 .. max_new_tokens = 4, got 5"),
    ({"min_new_tokens": -1}, "min_new_tokens must be in 0 .. .* got -1"),
    ({"min_new_tokens": 1.5}, "min_new_tokens must be an integer, got 1.5"),
    ({"stop_strings": "x"}, "stop_strings need tokenizer="),
    ({"stop_strings": []}, "stop_strings must be one or more strings that are not empty"),
    ({"stop_strings": ["a", ""]}, "stop_strings must be one or more strings that are not empty"),
    ({"stopping_criteria": 3}, "stopping_criteria must be a StoppingCriteriaList, got 3"),
    ({"stopping_criteria": [ConfidenceCriteria(0.5)]}, "ConfidenceCriteria needs the scores"),
    ({"input_ids": torch.tensor([[1], [2]]), "stopping_criteria": [Watching(0, 1)]}, "pad_token_id or eos_token_id"),
])  # fmt: skip
def test_controls_that_cannot_be_met_are_refused(options, message, tiny_pair):
    with pytest.raises((ValueError, TypeError), match=message):
        SpeculativeDecoder(*tiny_pair).generate(**{"input_ids": torch.tensor([[1, 2]]), "max_new_tokens": 4} | options)
