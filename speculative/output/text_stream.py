"""`TextStream`: a streamer that decodes tokens to text as they arrive, in whole characters."""

from collections.abc import Callable

from torch import Tensor
from transformers import PreTrainedTokenizerBase

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what tokenizers return for an incomplete character
_CONTEXT = 8  # tokens of the prompt that are decoded together with the first new ones


class TextStream:
    """A streamer for `generate` that calls `write` with each piece of new text.

    Tokens of a byte-level vocabulary may end within a character, so text is held back until its last character is
    complete. Special tokens are left out, unless skip_special_tokens is False. The first `put` gets the prompt, which
    is not written. The pieces written until `end` make up the text after the prompt; a character that the prompt began
    and the new tokens complete is part of it.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], object], *, skip_special_tokens: bool = True
    ):
        self._tokenizer = tokenizer
        self._write = write
        self._skips = skip_special_tokens
        self._tokens: list[int] | None = None  # the last written tokens, then those not written yet
        self._written = 0  # how many of these are written

    def put(self, value: Tensor) -> None:
        """Add tokens, and write the text that is complete. The first call after creation or `end` gets the prompt.

        value: LongTensor of any shape
        """
        if self._tokens is None:
            self._tokens = value.flatten()[-_CONTEXT:].tolist()
            self._written = len(self._tokens)
        elif value.numel():
            self._tokens += value.flatten().tolist()
            if not self._text(self._tokens).endswith(UNFINISHED):
                self._flush(self._tokens)

    def end(self) -> None:
        """Write what was held back. The next `put` gets another prompt."""
        if self._tokens is not None:
            self._flush(self._tokens)
        self._tokens = None

    def _flush(self, tokens: list[int]) -> None:
        # Decoded together with tokens written before, since some tokenizers drop the space before the first word.
        before = tokens[: self._written]
        whole = self._text(tokens)
        old = self._text(before)
        if not whole.startswith(old):  # the prompt ends within a character, which is another one now
            old = old.rstrip(UNFINISHED)
        text = whole[len(old) :]
        self._write(text)
        # Special tokens that are left out are no context: the next word would be the first one of a text.
        self._tokens = tokens[self._written :] if text else before
        self._written = len(self._tokens)

    def _text(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=self._skips, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
