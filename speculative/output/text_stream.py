"""Text as tokens arrive, one whole character after the other."""

from collections.abc import Callable

from torch import Tensor
from transformers import PreTrainedTokenizerBase

_CONTEXT = 8  # prompt tokens decoded along with the first new ones
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder makes of a character's first bytes


class TextStream:
    """A streamer for `generate`: calls `write` with each piece of new text.

    Tokens of a byte-level vocabulary may end within a character, so text is held back until its last character is
    whole. Special tokens are left out. The first `put` is the prompt, which is not written; the pieces written until
    `end` add up to the text after it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], object]):
        self._tokenizer, self._write = tokenizer, write
        self._tokens: list[int] | None = None  # the last ones written, then those not written yet
        self._written = 0  # how many of them

    def put(self, value: Tensor) -> None:
        """Take the prompt at first, then new tokens, of any shape."""
        if self._tokens is None:
            self._tokens = value.flatten()[-_CONTEXT:].tolist()
            self._written = len(self._tokens)
        elif value.numel():
            self._tokens += value.flatten().tolist()
            if not self._text(self._tokens).endswith(_UNFINISHED):
                self._flush(self._tokens)

    def end(self) -> None:
        """Write what was held back, and be ready for another prompt."""
        if self._tokens is not None:
            self._flush(self._tokens)
        self._tokens = None

    def _flush(self, tokens: list[int]) -> None:
        # Decoded behind what was written before: some vocabularies drop the space in front of a text's first word.
        self._write(self._text(tokens)[len(self._text(tokens[: self._written])) :])
        self._tokens = tokens[self._written :] or tokens
        self._written = len(self._tokens)

    def _text(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
