"""The text of one answer while its tokens arrive: whole characters, and up to its stop string."""

from collections.abc import Collection, Container, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from heavypath.speculative.output.text_stream import TextStream


class StoppedText:
    """Text in whole characters that ends before the first of `stops`, as OpenAI's API has it.

    Stop strings are looked for in the text that the client gets, wherever tokens begin and end. Tokens are looked at
    one by one, so the text does not depend on how many of them a step gave. What may be the beginning of a stop string
    is held back until it is known.

    tokens: how many were taken, up to the one that completed a stop string
    begins: for each of them, the characters of the text that came before it
    ended:  whether a stop string was found; nothing is taken after it

    silent: tokens that are no part of the text: those that end it; special: whether special tokens are
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
        self.begins, self.ended = list[int](), False
        self._stops, self._silent, self._length = stops, silent, 0
        self._arrived: list[str] = []
        self._held = ""
        self._stream = TextStream(tokenizer, self._arrived.append, skip_special_tokens=not special)
        self._stream.put(torch.tensor(prompt, device="cpu"))

    @property
    def tokens(self) -> int:
        """How many were taken."""
        return len(self.begins)

    def add(self, tokens: Sequence[int]) -> str:
        """The text that is certain by new tokens, and was not before."""
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
        """The rest, once no more tokens come. Half a character is then U+FFFD, as a tokenizer decodes it."""
        if self.ended:
            return ""
        self._stream.end()
        text = self._certain()
        rest, self._held = self._held, ""
        return text + rest

    def _certain(self) -> str:
        arrived = "".join(self._arrived)
        self._length += len(arrived)
        self._held += arrived
        self._arrived.clear()
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.ended = True
            text, self._held = self._held[: min(found)], ""
            return text
        keep = beginning(self._held, self._stops)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text


def beginning(text: str, words: Collection[str]) -> int:
    """The number of a text's last characters that may be the beginning of one of some words."""
    firsts = {word[0] for word in words}
    longest = min(len(text), max(map(len, words), default=1) - 1)
    for length in range(longest, 0, -1):
        if text[-length] in firsts and any(word.startswith(text[-length:]) for word in words):
            return length
    return 0
