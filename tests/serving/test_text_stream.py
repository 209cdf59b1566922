"""Text while its tokens arrive: pieces add up to it, no character is ever cut, and none of a stop string is shown."""

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from heavypath.speculative.http.text import StoppedText
from heavypath.speculative.output.text_stream import TextStream

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
TEXT = "def naïve(größe):\n\treturn '日本語 🎉🎉' + größe  # ünïcödé Ω\n"


def streamed(tokenizer, *texts):
    """The pieces of some texts in turn; each is a prompt and steps of tokens."""
    pieces = []
    stream = TextStream(tokenizer, pieces.append)
    for prompt, *steps in texts:
        stream.put(torch.tensor([prompt]))
        for step in steps:
            stream.put(torch.tensor(step, dtype=torch.long))
        stream.end()
    return pieces


@pytest.mark.parametrize("size", [1, 2, 5])
def test_characters_of_several_bytes_come_whole_one_text_after_the_other(tokenizer, size):
    tokens, prompt = tokenizer(TEXT).input_ids, tokenizer("x").input_ids
    assert any(UNFINISHED in tokenizer.decode([token]) for token in tokens)
    steps = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    pieces = streamed(tokenizer, [prompt, *steps], [prompt, *steps])
    assert "".join(pieces) == 2 * TEXT
    assert not any(UNFINISHED in piece for piece in pieces)


def test_bytes_that_never_become_a_character_are_written_and_special_tokens_are_not(tokenizer):
    first_byte_of_four, a = tokenizer("🙂").input_ids[:1], tokenizer("a").input_ids
    assert streamed(tokenizer, [a, a, first_byte_of_four]) == ["a", UNFINISHED]
    assert "".join(streamed(tokenizer, [a, first_byte_of_four, a])) == f"{UNFINISHED}a"
    assert "".join(streamed(tokenizer, [a, a, [tokenizer.eos_token_id]])) == "a"


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_that_a_prompt_begins_is_written_where_it_becomes_whole(cut, size, tokenizer):
    tokens = tokenizer("a🙂é").input_ids
    prompt, rest = tokens[: -6 + cut], tokens[-6 + cut :]
    steps = [rest[i : i + size] for i in range(0, len(rest), size)]
    assert "".join(streamed(tokenizer, [prompt, *steps])) == "🙂é"
    a = tokenizer("a").input_ids
    assert "".join(streamed(tokenizer, [prompt, a, a])) == "aa", "it never becomes one"


def test_spaces_that_a_vocabulary_drops_in_front_of_a_text_are_kept():
    words = Tokenizer(WordLevel({"▁one": 0, "▁two": 1, "▁three": 2}))
    words.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert tokenizer.decode([1]) == "two"
    assert streamed(tokenizer, [[0], [1], [2], [], [0]]) == [" two", " three", " one", ""]


@pytest.mark.parametrize("steps", [[[1], [3], [2]], [[1], [3], [3], [2]], [[3], [1, 3], [2]], [[3, 1], [3, 2]]])
def test_a_special_token_that_is_left_out_takes_no_space_with_it(steps):
    words = Tokenizer(WordLevel({"▁one": 0, "▁two": 1, "▁three": 2, "</s>": 3}))
    words.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    assert "".join(streamed(tokenizer, [[0], *steps])) == " two three"
    assert "".join(streamed(tokenizer, [[0, 3], *steps])) == " two three"


@pytest.mark.parametrize("stop", ["größe", "🎉", "return", "e", "\n\t", "é Ω", "語 🎉🎉' +", TEXT, None])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_servers_text_ends_before_the_first_stop_string_wherever_tokens_begin(tokenizer, stop, size):
    tokens = tokenizer(TEXT).input_ids
    text = StoppedText(tokenizer, tokenizer("x = 1\n").input_ids, ["not there", stop or "nor here"])
    shown = "".join(text.add(tokens[i : i + size]) for i in range(0, len(tokens), size))
    assert text.add(tokens if stop else []) == "", "nothing is taken after the stop string"
    assert shown + text.end() == TEXT[: TEXT.index(stop) if stop else None]
    assert text.ended == bool(stop)
    if stop:
        assert stop in tokenizer.decode(tokens[: text.tokens])
        assert stop not in tokenizer.decode(tokens[: text.tokens - 1])
    else:
        assert text.tokens == len(tokens)


def test_nothing_that_may_begin_a_stop_string_is_shown_too_soon_and_the_rest_at_the_end(tokenizer):
    def shown(letters):
        text = StoppedText(tokenizer, [1], ["aab", "abc"])
        return [text.add(tokenizer(letter).input_ids) for letter in letters] + [text.end(), text.ended]

    assert shown("aaabc") == ["", "", "a", "", "", "", True]
    assert shown("aac") == ["", "", "aac", "", False]
    assert shown("ab") == ["", "", "ab", False]
    cut = StoppedText(tokenizer, [1], [])
    assert cut.add(tokenizer("a🎉").input_ids[:-1]) + cut.end() == tokenizer.decode(tokenizer("a🎉").input_ids[:-1])
