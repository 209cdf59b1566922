"""A request whose processors fail: it ends alone, and the requests in its steps have the texts that they have alone."""

import itertools
import threading

import pytest
import torch
from conformance_parts import tokenizer_of
from serving_cases import VOCAB, alone, held, tiny_llama
from texts_with_rules import EOS

from heavypath.speculative import Grammar, SpeculativeDecoder

PROMPT, OTHER, NEW = [1, 2, 3, 4], [5, 6, 0, 2], 18
GREEDY = {"max_new_tokens": NEW, "temperature": 0.0, "eos_token_id": None}


@pytest.fixture(scope="module")
def decoder():
    return SpeculativeDecoder(tiny_llama(1), tiny_llama(7), "ersd", tree_size=4)


def likely(scores, token=0):
    scores = scores.clone()
    scores[:, token] += 100
    return scores


class EveryFifth:
    """Counts its calls, and makes a token likely in each fifth."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return likely(scores) if self.calls % 5 == 0 else scores


class Iterated:
    """The same with an iterator, which cannot be seen."""

    def __init__(self):
        self.numbers = itertools.count(1)

    def __call__(self, input_ids, scores):
        return likely(scores) if next(self.numbers) % 5 == 0 else scores


class FromLength:
    """Counts its calls, and fails at texts of a length: it raises, or leaves no token."""

    def __init__(self, length, raises):
        self.length, self.raises, self.calls = length, raises, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if input_ids.shape[1] < self.length:
            return scores
        if self.raises:
            raise OSError("lost")
        return scores - torch.inf


class InCall:
    """Fails in one of its calls, whatever is decoded: locks count them, which nobody can undo."""

    def __init__(self, call):
        self.call, self.log, self.locks = call, [], [threading.Lock() for _ in range(200)]

    def __call__(self, input_ids, scores):
        number = next(index for index, each in enumerate(self.locks, 1) if each.acquire(blocking=False))
        self.log = [*self.log, number]
        if number == self.call:
            raise OSError("lost")
        return scores


KINDS = {"seen": EveryFifth, "unseen": Iterated}


def beside(decoder, good, bad, ends=None):
    """The texts, or the errors, of two requests that begin in the same step."""
    with decoder.serve(slots=2, max_tokens=64) as service:
        with held(service):
            sent = [service.submit(PROMPT, **GREEDY, logits_processor=[good])]
            sent += [service.submit(OTHER, **GREEDY | {"eos_token_id": ends}, logits_processor=bad)]
        found = []
        for each in sent:
            try:
                found.append(each.result(60).tokens)
            except (OSError, ValueError) as error:
                found.append(error)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("length", [4, 5, 7, 10])
def test_a_request_that_fails_at_a_length_leaves_the_texts_beside_it(decoder, length, raises, kind):
    """Where its logits are dead, and where its processor raises in a first call."""
    expected = alone(decoder, PROMPT, GREEDY, 0, logits_processor=[KINDS[kind]()])
    text, error = beside(decoder, KINDS[kind](), [FromLength(length, raises)])
    assert text == expected
    assert isinstance(error, OSError if raises else ValueError), error


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_fails_in_any_of_its_calls_leaves_the_texts_beside_it(decoder, kind):
    """Of its calls some are a node's first, others repeat that of an accepted node."""
    expected = alone(decoder, PROMPT, GREEDY, 0, logits_processor=[KINDS[kind]()])
    for call in range(1, 13):
        text, _ = beside(decoder, KINDS[kind](), [InCall(call)])
        assert text == expected, call


def test_a_call_that_cannot_be_undone_is_not_tried_again(decoder):
    """A second call would find the iterator one further, and answer."""

    class Fails(Iterated):
        def __call__(self, input_ids, scores):
            if next(self.numbers) == 4:
                raise OSError("lost")
            return scores

    expected = alone(decoder, PROMPT, GREEDY, 0, logits_processor=[EveryFifth()])
    text, error = beside(decoder, EveryFifth(), [Fails()])
    assert text == expected
    assert isinstance(error, OSError)


def test_a_call_that_raises_changes_nothing_of_an_object_that_requests_share(decoder):
    class Fails(EveryFifth):
        def __call__(self, input_ids, scores):
            scores = super().__call__(input_ids, scores)
            if input_ids[0, 0] == OTHER[0]:
                raise OSError("lost")
            return scores

    expected = alone(decoder, PROMPT, GREEDY, 0, logits_processor=[EveryFifth()])
    shared = Fails()
    text, error = beside(decoder, shared, [shared])
    assert text == expected
    assert isinstance(error, OSError)


def test_a_text_that_its_grammar_does_not_allow_fails_beside_others_as_it_does_alone(decoder):
    pytest.importorskip("llguidance")

    def anything(input_ids, scores):
        return torch.where(scores == -torch.inf, 0.0, scores - 100)

    expected = alone(decoder, PROMPT, GREEDY, 0, logits_processor=[EveryFifth()])
    text, error = beside(decoder, EveryFifth(), [Grammar.regex("(ab)+", tokenizer_of(VOCAB)), anything], EOS)
    assert text == expected
    assert isinstance(error, ValueError)
    assert "are not of the sequence's grammar" in str(error)
