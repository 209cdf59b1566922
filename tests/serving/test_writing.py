"""Answers with many log-probabilities are written beside the event loop, a place of the text at a time."""

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from heavypath.speculative.http.answers import ChatAnswer, CompletionAnswer, Counted, Piece
from heavypath.speculative.http.errors import compact
from heavypath.speculative.http.logprobs import Spelling
from heavypath.speculative.http.requests import ChatRequest, CompletionRequest
from heavypath.speculative.http.writing import FEW, Writing, in_pieces
from heavypath.speculative.serving.logprobs import TokenLogprob

CHAT = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "logprobs": True})
TEXT = CompletionRequest.model_validate({"prompt": "x", "logprobs": 0})
KINDS = {"chat": (ChatAnswer, CHAT), "text": (CompletionAnswer, TEXT)}


@pytest.fixture(params=KINDS)
def answer(request, tokenizer):
    kind, body = KINDS[request.param]
    return kind(SimpleNamespace(name="name", measured=False), body, Spelling(tokenizer), "fingerprint")


def text_of(places, index=0):
    scored = [TokenLogprob(place, -0.5, [(each, -1.0 * each) for each in range(20)]) for place in range(places)]
    return Piece(index, "abc", "length", scored)


@pytest.mark.parametrize("content", [
    {}, [], {"a": []}, [{}, None, 1.5, "\ud800\u2028"], {"a": {"b": [{"c": [{"d": [1, {"e": 2}]}]}]}, "f": [[], [1]]},
], ids=str)  # fmt: skip
def test_pieces_together_are_the_same_json(content):
    expected = json.dumps(content, separators=(",", ":"))
    for levels in range(7):
        assert "".join(in_pieces(content, levels)) == expected == compact(content)
    assert compact({"a": map(str, [1, 2])}) == "".join(in_pieces({"a": map(str, [1, 2])})) == '{"a":["1","2"]}'


def test_a_number_that_json_does_not_have_is_an_error():
    for write in (compact, lambda content: "".join(in_pieces(content))):
        with pytest.raises(ValueError, match="not JSON compliant"):
            write({"a": [float("nan")]})


def test_no_piece_has_more_than_one_place(answer):
    pieces = [*in_pieces(answer.whole([text_of(40), text_of(40, 1)], Counted(1, 80), None))]
    assert len(pieces) > 80
    assert max(map(len, pieces)) < 2500


def test_tokens_that_differ_by_a_space_before_them_have_two_texts():
    """Also with a vocabulary that drops a text's first space, as Llama 2 has."""
    words = Tokenizer(WordLevel({"one": 0, "▁one": 1, "▁": 2, "</s>": 3}))
    words.decoder = decoders.Metaspace(prepend_scheme="first")
    spelling = Spelling(PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>"))
    scored = [TokenLogprob(1, -0.5, [(1, -0.5), (0, -1.0), (2, -2.0), (3, -3.0)])]
    found = spelling.completion(scored, 0)
    assert found["tokens"] == [" one"]
    assert [*found["top_logprobs"]] == [{" one": -0.5, "one": -1.0, " ": -2.0, "</s>": -3.0}]
    assert [each["bytes"] for each in spelling.chat(scored)["content"]] == [[*b" one"]]


def test_the_thread_is_there_before_it_is_needed(monkeypatch):
    """Later there may be no memory for one."""
    writing = Writing()
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("begun too late"))
    assert asyncio.run(writing.written(lambda: [1], FEW + 1)) == "[1]"
