"""Text of an answer while its tokens arrive: whole characters, and none of its stop string."""

import random

import pytest

from heavypath.speculative.http.text import StoppedText

TEXT = "def naïve(größe):\n    return '日本語 🎉🎉' + größe  # ünïcödé\n"


@pytest.fixture(scope="module")
def tokenizer(demo_pair):
    return demo_pair.tokenizer


def streamed(tokenizer, tokens, stops, sizes):
    """The pieces of a text whose tokens come in groups of these sizes, and what was counted."""
    text, pieces, place = StoppedText(tokenizer, tokenizer("x = 1\n").input_ids, stops), [], 0
    for size in sizes:
        pieces.append(text.add(tokens[place : place + size]))
        place += size
    pieces.append(text.end())
    return pieces, text


def test_pieces_are_whole_characters_and_make_up_the_text(tokenizer):
    tokens = tokenizer(TEXT).input_ids
    for seed in range(5):
        sizes = random.Random(seed).choices(range(1, 6), k=len(tokens))
        pieces, text = streamed(tokenizer, tokens, [], sizes)
        assert "".join(pieces) == TEXT
        assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
        assert text.tokens == len(tokens)


def test_half_a_character_at_the_end_is_shown_as_the_tokenizer_does(tokenizer):
    tokens = tokenizer("a🎉").input_ids[:-1]
    pieces, _ = streamed(tokenizer, tokens, [], [1] * len(tokens))
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert pieces[0] == "a"


@pytest.mark.parametrize("stop", ["größe", "🎉", "return", "e", "\n    ", "é\n", "語 🎉🎉' +", TEXT])
@pytest.mark.parametrize("group", [1, 3, 1000])
def test_text_ends_before_the_first_stop_string_wherever_tokens_begin(tokenizer, stop, group):
    tokens = tokenizer(TEXT).input_ids
    pieces, text = streamed(tokenizer, tokens, ["not there", stop], [group] * len(tokens))
    assert "".join(pieces) == TEXT[: TEXT.index(stop)]
    assert text.ended
    assert stop in tokenizer.decode(tokens[: text.tokens])
    assert stop not in tokenizer.decode(tokens[: text.tokens - 1])


def test_nothing_that_may_begin_a_stop_string_is_shown_too_soon(tokenizer):
    text = StoppedText(tokenizer, [1], ["aab", "abc"])
    letters = {letter: tokenizer(letter).input_ids for letter in "abc"}
    assert all(len(tokens) == 1 for tokens in letters.values())
    assert [text.add(letters[letter]) for letter in "aaabc"] == ["", "", "a", "", ""]
    assert text.ended
    text = StoppedText(tokenizer, [1], ["aab", "abc"])
    assert [text.add(letters[letter]) for letter in "aac"] == ["", "", "aac"]
    assert [text.add(letters[letter]) for letter in "ab"] == ["", ""]
    assert text.end() == "ab"
    assert not text.ended


def test_nothing_is_taken_after_the_stop_string(tokenizer):
    tokens = tokenizer("one two three").input_ids
    text = StoppedText(tokenizer, [1], ["two"])
    assert text.add(tokens) == "one "
    count = text.tokens
    assert text.add(tokens) == ""
    assert (text.end(), text.tokens) == ("", count)
