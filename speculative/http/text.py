"""Decode the tokens of one choice as they arrive, in whole characters, and stop at a stop string."""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Container, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from heavypath.speculative.output.text_stream import TextStream


class StoppedText:
    """Decodes tokens to text in whole characters, up to the first stop string, which is left out as in OpenAI's API.

    Stop strings are searched in the text, wherever tokens begin and end. Tokens are added one by one, so the result
    does not depend on how many of them a step produced. What may be the beginning of a stop string is held back until
    it is decided.

    prompt:  the tokens before the text, on which the decoding of the first new token may depend
    stops:   the stop strings
    silent:  tokens that are left out of the text, such as end-of-sequence tokens
    special: whether other special tokens are part of the text

    begins: for each token taken so far, the number of characters of text before it
    ended:  whether a stop string was found; later tokens are ignored
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        stops: Sequence[str],
        silent: Container[int] = (),
        *,
        special: bool = False,
    ):
        self.begins = list[int]()
        self.ended = False
        self._stops = stops
        self._silent = silent
        self._length = 0
        self._arrived: list[str] = []
        self._held = ""
        self._stream = TextStream(tokenizer, self._arrived.append, skip_special_tokens=not special)
        self._stream.put(torch.tensor(prompt, device="cpu"))

    @property
    def tokens(self) -> int:
        """How many tokens were taken, up to the one that completed a stop string."""
        return len(self.begins)

    def before(self, place: int | None = None) -> int:
        """How many tokens end before a character of the text, or before the first byte of it.

        place: the index of the character; None for the first one that was not returned yet
        """
        place = self._length - len(self._held) if place is None else place
        last = bisect_right(self.begins, place) - 1  # the last token that begins there or earlier
        if last < 0 or (last == self.tokens - 1 and self.begins[last] < self._length <= place):
            return last + 1
        return bisect_left(self.begins, self.begins[last])

    def add(self, tokens: Sequence[int]) -> str:
        """Add tokens. Returns the new text that is certain: whole characters that begin no stop string."""
        text = ""
        for token in tokens:
            if self.ended:
                break
            self.begins.append(self._length)
            if token not in self._silent:
                self._stream.put(torch.tensor([token], device="cpu"))
            text += self._certain()
        return text

    def end(self) -> str:
        """Return the text that was held back, after the last token. An incomplete character becomes U+FFFD."""
        if self.ended:
            return ""
        self._stream.end()
        text = self._certain()
        rest = self._held
        self._held = ""
        return text + rest

    def _certain(self) -> str:
        arrived = "".join(self._arrived)
        self._length += len(arrived)
        self._held += arrived
        self._arrived.clear()
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.ended = True
            text = self._held[: min(found)]
            self._held = ""
            return text
        keep = beginning(self._held, self._stops)
        text = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return text


def beginning(text: str, words: Collection[str]) -> int:
    """How many characters at the end of a text are the beginning of one of the words, but not all of it; 0 if none."""
    firsts = {word[0] for word in words}
    longest = min(len(text), max(map(len, words), default=1) - 1)
    for length in range(longest, 0, -1):
        if text[-length] in firsts and any(word.startswith(text[-length:]) for word in words):
            return length
    return 0
