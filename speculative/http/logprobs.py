"""Log-probabilities of tokens in the shapes of OpenAI's API."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from heavypath.speculative.serving.logprobs import TokenLogprob

LEAST = -9999.0  # in the place of -inf, which JSON does not have


class Spelling:
    """The texts of single tokens, as many as have been asked for."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, token: int) -> str:
        """The text of a token; a part of a character is U+FFFD."""
        if token not in self._known:
            self._known[token] = str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))
        return self._known[token]

    def completion(self, scored: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        """As /v1/completions has them; offset: of the first token in the text.

        A text's first token, which nothing comes before, has null.
        """
        tokens = [self.of(each.token) for each in scored]
        return {
            "tokens": tokens,
            "token_logprobs": [None if each.logprob is None else max(LEAST, each.logprob) for each in scored],
            "top_logprobs": [None if each.logprob is None else self._by_text(each) for each in scored],
            "text_offset": [*accumulate(map(len, tokens[:-1]), initial=offset)] if tokens else [],
        }

    def chat(self, scored: Sequence[TokenLogprob]) -> dict[str, Any]:
        """As /v1/chat/completions has them."""
        content = []
        for each in scored:
            likeliest = [self._one(token, logprob) for token, logprob in each.likeliest]
            content.append(self._one(each.token, each.logprob) | {"top_logprobs": likeliest})
        return {"content": content, "refusal": None}

    def _one(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self.of(token)
        return {"token": text, "logprob": max(LEAST, logprob or 0.0), "bytes": [*text.encode(errors="replace")]}

    def _by_text(self, scored: TokenLogprob) -> dict[str, float]:
        """Of tokens with the same text, such as parts of characters, the likeliest."""
        found: dict[str, float] = {}
        for token, logprob in [*scored.likeliest, (scored.token, scored.logprob or 0.0)]:
            found.setdefault(self.of(token), max(LEAST, logprob))
        return found
