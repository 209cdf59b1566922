"""Compare two vocabularies: which tokens stand for the same bytes, and how one's tokens are spelt with the other's.

    target   " token" 5, "ization" 6, " tokenization" 7         draft   " token" 3, "ization" 4
    shared   5 is 3, 6 is 4                                      pieces  5 is [3], 6 is [4], 7 is [3, 4]

A token stands for bytes: vocabularies write a space as U+0120 or U+2581, and single bytes as letters or as <0x0A>.
Special tokens are equal if they have the same name, or if both are the beginning-of-text or both the end-of-text token.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

MOST_PIECES = 8  # a token that the draft lacks is spelt with at most this many of its tokens, the last ones
LEAST_SHARE = 0.05  # share of the target's tokens that must be common

Token = tuple[bool, bytes]  # (whether it is special, its bytes)


@dataclass(frozen=True, eq=False)
class Vocabularies:
    """The vocabularies of a target and a draft, from their tokenizers.

    Raises TypeError for a tokenizer that is not of the tokenizers library, and ValueError if too few tokens are common.
    """

    target: PreTrainedTokenizerBase
    draft: PreTrainedTokenizerBase
    _pieces: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for role, tokenizer in (("target", self.target), ("draft", self.draft)):
            if getattr(tokenizer, "backend_tokenizer", None) is None:
                raise TypeError(
                    f"the {role}'s tokenizer must be one of the tokenizers library, whose tokens have known bytes, got "
                    f"{type(tokenizer).__name__}"
                )
        if self.share < LEAST_SHARE:
            raise ValueError(
                f"a draft must have {LEAST_SHARE:.0%} of the target's tokens at least, got a tokenizer with {self}; "
                "take a draft whose tokenizer is more like the target's"
            )

    @cached_property
    def shared(self) -> dict[int, int]:
        """Maps each of the target's tokens that the draft also has to the draft's token. No two map to the same one."""
        own, other = ({token: index for index, token in _tokens(each)} for each in (self.target, self.draft))
        found = {index: other[token] for token, index in own.items() if token in other}
        for name in ("bos_token_id", "eos_token_id"):
            one = getattr(self.target, name)
            another = getattr(self.draft, name)
            if one is not None and another is not None and one not in found and another not in found.values():
                found[one] = another
        return found

    @property
    def share(self) -> float:
        """The number of common tokens divided by the size of the target's vocabulary."""
        return len(self.shared) / len(self.target.get_vocab())

    def __str__(self) -> str:
        return f"{len(self.shared)} of the target's {len(self.target.get_vocab())} tokens ({self.share:.0%})"

    def pieces(self, target_size: int, draft_size: int) -> tuple[Tensor, Tensor]:
        """How each of the target's V tokens is spelt with the draft's tokens.

        Returns LongTensor[V, m], the draft's tokens, right-aligned, and LongTensor[V], their number.

        A token that the draft lacks is spelt greedily, with the longest possible token first. Bytes that the draft has
        no token for are omitted.

        target_size, draft_size: vocabulary sizes of the models, which may differ from the tokenizers'

        The result is kept: a large vocabulary takes seconds.
        """
        sizes = (target_size, draft_size)
        if sizes not in self._pieces:
            self._pieces[sizes] = self._spelt(target_size, draft_size)
        return self._pieces[sizes]

    def _spelt(self, target_size: int, draft_size: int) -> tuple[Tensor, Tensor]:
        spelt = {token[1]: index for index, token in _tokens(self.draft) if not token[0] and index < draft_size}
        longest = max(map(len, spelt), default=0)
        nothing = next(index for index in (self.draft.unk_token_id, self.draft.eos_token_id, 0) if index is not None)
        found = [[nothing]] * target_size
        for index, (_, text) in _tokens(self.target):
            if index < target_size:
                found[index] = [*_spelling(text, spelt, longest)][-MOST_PIECES:] or found[index]
        for index, other in self.shared.items():
            if index < target_size and other < draft_size:
                found[index] = [other]
        most = max(map(len, found))
        padded = [[nothing] * (most - len(each)) + each for each in found]
        return torch.tensor(padded, device="cpu"), torch.tensor([*map(len, found)], device="cpu")


def _spelling(text: bytes, spelt: dict[bytes, int], longest: int) -> Iterator[int]:
    """The tokens of `spelt` that spell a text, greedily from the left."""
    begin = 0
    while begin < len(text):
        ends = range(min(len(text), begin + longest), begin, -1)
        end = next((end for end in ends if text[begin:end] in spelt), None)
        if end is not None:
            yield spelt[text[begin:end]]
        begin = begin + 1 if end is None else end


def _tokens(tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, Token]]:
    """All tokens by id, ordered so that of several with the same bytes, the one to use comes last.

    That is the one with the lowest id, except that a byte token such as <0x41> comes before all others.
    """
    words = Words(tokenizer)
    added = tokenizer.added_tokens_decoder
    found = []
    for word, index in tokenizer.get_vocab().items():
        text = word.encode() if index in added else words.bytes_of(word)
        found.append((not words.is_byte(word), -index, (index in added and added[index].special, text)))
    return [(-index, token) for _, index, token in sorted(found)]


class Words:
    """How a tokenizer of the tokenizers library writes the bytes of its tokens; added tokens are written as text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        fast: Any = tokenizer
        decoder = fast.backend_tokenizer.decoder
        kinds = b"" if decoder is None else decoder.__getstate__()
        self._letters = {letter: byte for byte, letter in bytes_to_unicode().items()} if b"ByteLevel" in kinds else {}
        self._marks_spaces = "▁".encode() in kinds or b"\\u2581" in kinds
        self._has_bytes = b"ByteFallback" in kinds

    def is_byte(self, word: str) -> bool:
        """Whether a word of the vocabulary is the number of a byte, as <0x41>."""
        return self._has_bytes and len(word) == 6 and word.startswith("<0x")

    def bytes_of(self, word: str) -> bytes:
        """The bytes that a word of the vocabulary stands for."""
        letters = self._letters
        if letters and all(letter in letters for letter in word):
            return bytes(letters[letter] for letter in word)
        if self.is_byte(word):
            return bytes([int(word[3:5], 16)])
        return (word.replace("▁", " ") if self._marks_spaces else word).encode()
