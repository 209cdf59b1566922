"""Stopping criteria, which see what transformers shows them, penalties by hand, and what is refused of both."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from texts_with_rules import PROMPTS, left_padded
from transformers import (
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    WatermarkingConfig,
    WatermarkLogitsProcessor,
)
from transformers.generation import ConfidenceCriteria

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.decoding.processing import Processing


class Watching(StoppingCriteria):
    """Ends a text that has `sum` in its new tokens; keeps what it was shown."""

    def __init__(self, begin, total):
        self.begin, self.total, self.seen = begin, total, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.tolist())
        return input_ids[:, self.begin :].sum(1) >= self.total


def test_a_penalty_and_a_minimum_by_hand():
    """Below a root with the token 1 are siblings with 2 and 3; token 4 is of the prompt, and 0 ends a text."""
    drafted = SimpleNamespace(
        tokens=torch.tensor([[1, 2, 3]]), subtree_end=torch.tensor([3, 2, 3]), depths=torch.tensor([0, 1, 1])
    )
    seen, end = torch.tensor([[False, False, False, False, True]]), torch.tensor([0])
    state = SimpleNamespace(seen=seen, stops=end, produced=torch.tensor([1]))
    logits = torch.tensor([1.0, 2, -2, 4, -4]).expand(1, 3, -1)
    expected = [[-math.inf, 1, -2, 4, -8], [1, 1, -4, 4, -8], [1, 1, -2, 2, -8]]
    assert Processing(2.0, 2).before_verifying(logits, drafted, state).tolist() == [expected]
    assert torch.equal(Processing(1.0, 0).before_verifying(logits, drafted, state), logits)


@pytest.mark.parametrize("method", ["autoregressive", "sequoia"])
def test_a_criterion_is_asked_once_for_each_new_token_and_no_more(method, tiny_pair):
    target, _ = tiny_pair
    tree = {} if method == "autoregressive" else {"tree_size": 5}
    decoder = SpeculativeDecoder(target, target, method, **tree)  # accepts whole blocks
    ours, theirs, ids = Watching(2, 40), Watching(2, 40), torch.tensor([[1, 2]])
    out = decoder.generate(ids, 40, stopping_criteria=[ours])
    expected = target.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([theirs]),
    )  # fmt: skip
    assert torch.equal(out.sequences, expected)
    assert 7 < expected.shape[1] < 42
    assert ours.seen == theirs.seen
    assert method == "autoregressive" or out.stats.tokens_per_step > 1.5


@pytest.mark.parametrize(("method", "temperature"), [("sequoia", 0.0), ("dyspec", 0.9)])
def test_a_text_cut_by_a_criterion_is_the_beginning_of_the_text(method, temperature, tiny_pair):
    decoder = SpeculativeDecoder(*tiny_pair, method)
    inputs = left_padded(PROMPTS)
    width = inputs["input_ids"].shape[1]
    options = inputs | {"max_new_tokens": 24, "temperature": temperature, "seed": 3}
    whole = decoder.generate(**options).sequences[:, width:]
    out = decoder.generate(**options, pad_token_id=0, stopping_criteria=[Watching(width, 25)])
    for text, cut in zip(whole, out.sequences[:, width:], strict=True):
        end = int((text.cumsum(0) < 25).sum()) + 1
        assert cut.tolist() == text[:end].tolist() + [0] * (cut.shape[0] - end)


def test_what_is_not_asked_for_is_not_done(tiny_pair, monkeypatch):
    def never(*_):
        raise AssertionError

    monkeypatch.setattr(Processing, "before_verifying", never)
    decoder = SpeculativeDecoder(*tiny_pair)
    plain = decoder.generate(torch.tensor([[1, 2]]), 12).sequences
    settings = {"repetition_penalty": 1, "min_new_tokens": 5}  # nothing can end it
    assert torch.equal(decoder.generate(torch.tensor([[1, 2]]), 12, **settings).sequences, plain)


@pytest.mark.parametrize(("options", "message"), [
    ({"repetition_penalty": 0.0}, r"repetition_penalty must be in 1e-30 .. 1e\+30, with .* stay finite, got 0.0"),
    ({"repetition_penalty": 1e-40}, r"repetition_penalty must be in 1e-30 .. 1e\+30, with .* stay finite, got 1e-40"),
    ({"repetition_penalty": float("nan")}, "got nan"),
    ({"repetition_penalty": float("inf")}, "got inf"),
    ({"repetition_penalty": "1.2"}, "got '1.2'"),
    ({"min_new_tokens": 5}, r"min_new_tokens must be in 0 .. max_new_tokens = 4, got 5"),
    ({"min_new_tokens": -1}, "min_new_tokens must be in 0 .. .* got -1"),
    ({"min_new_tokens": 1.5}, "min_new_tokens must be an integer, got 1.5"),
    ({"min_new_tokens": 2, "eos_token_id": range(7)}, "min_new_tokens=2, eos_token_id must leave a token .* all 7"),
    ({"stop_strings": "x"}, "stop_strings need tokenizer="),
    ({"stop_strings": []}, "stop_strings must be one or more strings that are not empty"),
    ({"stop_strings": ["a", ""]}, "stop_strings must be one or more strings that are not empty"),
    ({"stopping_criteria": 3}, "stopping_criteria must be a StoppingCriteriaList, got 3"),
    ({"stopping_criteria": [ConfidenceCriteria(0.5)]}, "ConfidenceCriteria needs the scores"),
    ({"stopping_criteria": [lambda ids, scores: None]}, "a stopping criterion must return .* got None"),
    ({"input_ids": torch.tensor([[1], [2]]), "stopping_criteria": [Watching(0, 1)]}, "pad_token_id or eos_token_id"),
])  # fmt: skip
def test_controls_that_cannot_be_met_are_refused(options, message, tiny_pair):
    with pytest.raises((ValueError, TypeError), match=message):
        SpeculativeDecoder(*tiny_pair).generate(**{"input_ids": torch.tensor([[1, 2]]), "max_new_tokens": 4} | options)


@pytest.mark.parametrize("strings", [["\n\n"], ["def", "class"], "):"], ids=str)
def test_a_vocabulary_is_read_once_for_the_same_stop_strings(strings, demo_pair, monkeypatch):
    """By the next texts, and by requests of a service; not where the tokenizer has become another one."""
    target, draft, tokenizer = demo_pair
    tokenizer, read = copy.deepcopy(tokenizer), []
    made = StopStringCriteria.__init__
    monkeypatch.setattr(StopStringCriteria, "__init__", lambda *given: read.append(given) or made(*given))
    decoder, prompt = SpeculativeDecoder(target, draft), tokenizer("x = ", return_tensors="pt").input_ids
    stops = {"stop_strings": strings, "tokenizer": tokenizer}
    first = decoder.generate(prompt, 12, **stops).sequences
    assert torch.equal(decoder.generate(prompt, 12, **stops).sequences, first)
    with decoder.serve(slots=1) as service:
        tokens = service.submit(prompt[0], 12, 0.0, **stops).result().tokens
    assert first[0, prompt.shape[1] :].tolist() == tokens
    assert len(read) == 1
    tokenizer.add_tokens(["<new>"])
    decoder.generate(prompt, 2, **stops)
    assert len(read) == 2


@pytest.mark.parametrize("context", [1, 2])
def test_the_table_of_a_watermark_is_drawn_once(context, tiny_pair, monkeypatch):
    drawn, made = [], WatermarkLogitsProcessor.__init__
    monkeypatch.setattr(
        WatermarkLogitsProcessor, "__init__", lambda *given, **named: drawn.append(1) or made(*given, **named)
    )
    config = WatermarkingConfig(bias=8.0, context_width=context, hashing_key=77)
    monkeypatch.setattr(tiny_pair[0], "generation_config", GenerationConfig(watermarking_config=config, pad_token_id=0))
    decoder, prompt = SpeculativeDecoder(*tiny_pair), torch.tensor([[1, 2, 3]])
    texts = [decoder.generate(prompt, 6).sequences for _ in range(3)]
    assert len(drawn) == 1
    config.hashing_key = 78
    other = decoder.generate(prompt, 6).sequences
    assert len(drawn) == 2
    assert torch.equal(texts[0], texts[2])
    assert torch.equal(other, tiny_pair[0].generate(prompt, max_new_tokens=6, attention_mask=torch.ones_like(prompt)))
