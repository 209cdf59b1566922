"""Streamed pieces add up to the text, and no character is ever cut."""

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from heavypath.speculative.output.text_stream import TextStream

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture
def byte_level(demo_pair):
    return demo_pair.tokenizer


def streamed(tokenizer, prompt, steps):
    pieces = []
    stream = TextStream(tokenizer, pieces.append)
    stream.put(torch.tensor([prompt]))
    for step in steps:
        stream.put(torch.tensor(step, dtype=torch.long))
    stream.end()
    return pieces


@pytest.mark.parametrize("step", [1, 2, 5])
def test_characters_of_several_bytes_come_whole(byte_level, step):
    text = 'naïve = "日本語 🙂🙃", Ω\n\tx = 1  # déjà vu'
    tokens = byte_level(text)["input_ids"]
    assert any(UNFINISHED in byte_level.decode([token]) for token in tokens)
    steps = [tokens[i : i + step] for i in range(0, len(tokens), step)]
    pieces = streamed(byte_level, byte_level("x")["input_ids"], steps)
    assert "".join(pieces) == text
    assert not any(UNFINISHED in piece for piece in pieces)


def test_bytes_that_never_become_a_character_are_written_at_the_end(byte_level):
    first_byte_of_four = byte_level("🙂")["input_ids"][:1]
    a = byte_level("a")["input_ids"]
    assert streamed(byte_level, a, [a, first_byte_of_four]) == ["a", UNFINISHED]
    assert "".join(streamed(byte_level, a, [first_byte_of_four, a])) == f"{UNFINISHED}a"


def test_special_tokens_are_left_out(byte_level):
    a, end = byte_level("a")["input_ids"], [byte_level.eos_token_id]
    assert "".join(streamed(byte_level, a, [a, end])) == "a"


def test_spaces_that_a_vocabulary_drops_in_front_of_a_text_are_kept():
    words = Tokenizer(WordLevel({"▁one": 0, "▁two": 1, "▁three": 2}))
    words.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert tokenizer.decode([1]) == "two"
    assert streamed(tokenizer, [0], [[1], [2], [], [0]]) == [" two", " three", " one", ""]


def test_a_stream_takes_one_prompt_after_the_other(byte_level):
    pieces = []
    stream = TextStream(byte_level, pieces.append)
    for text in ("one", "two"):
        stream.put(torch.tensor([byte_level("prompt")["input_ids"]]))
        stream.put(torch.tensor(byte_level(text)["input_ids"]))
        stream.end()
    assert "".join(pieces) == "onetwo"
