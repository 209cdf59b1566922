"""Log-probabilities of tokens in the format of OpenAI's API. Long lists are `map` objects, see `writing`."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from heavypath.speculative.drafts.vocabularies import Words
from heavypath.speculative.output.text_stream import UNFINISHED
from heavypath.speculative.serving.logprobs import TokenLogprob

LEAST = -9999.0  # replaces -inf, which JSON cannot express


class Spelling:
    """Writes log-probabilities with the texts of their tokens, which it caches."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._words = None if getattr(tokenizer, "backend_tokenizer", None) is None else Words(tokenizer)
        self._known: dict[int, tuple[str, list[int]]] = {}

    def of(self, token: int) -> str:
        """The text of a token; an incomplete character is U+FFFD."""
        return self._spelled(token)[0]

    def completion(self, scored: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        """The `logprobs` object of a choice or event of /v1/completions.

        A token without a log-probability, the first of a prompt, has null.

        offset: characters of the text before the first of these tokens
        """
        tokens = [self.of(each.token) for each in scored]
        return {
            "tokens": tokens,
            "token_logprobs": [None if each.logprob is None else max(LEAST, each.logprob) for each in scored],
            "top_logprobs": map(self._by_text, scored),
            "text_offset": [*accumulate(map(len, tokens[:-1]), initial=offset)] if tokens else [],
        }

    def chat(self, scored: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The `logprobs` object of a choice or event of /v1/chat/completions."""
        return {"content": map(self._with_likeliest, scored), "refusal": None}

    def _with_likeliest(self, scored: TokenLogprob) -> dict[str, Any]:
        likeliest = [self._one(token, logprob) for token, logprob in scored.likeliest]
        return self._one(scored.token, scored.logprob) | {"top_logprobs": likeliest}

    def _one(self, token: int, logprob: float | None) -> dict[str, Any]:
        text, content = self._spelled(token)
        return {"token": text, "logprob": max(LEAST, logprob or 0.0), "bytes": content}

    def _spelled(self, token: int) -> tuple[str, list[int]]:
        """The text of a token within a text, and its bytes, which may be a part of a character."""
        if token not in self._known:
            text = self._decoded([token])
            if UNFINISHED not in text:  # some vocabularies drop the space before the first word of a text
                text = self._decoded([token, token])[len(text) :]
            content = text.encode(errors="replace")
            if UNFINISHED in text and self._words is not None and token not in self._tokenizer.added_tokens_decoder:
                word: Any = self._tokenizer.convert_ids_to_tokens(token)
                content = self._words.bytes_of(word)
            self._known[token] = text, [*content]
        return self._known[token]

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

    def _by_text(self, scored: TokenLogprob) -> dict[str, float] | None:
        """The log-probabilities by text of the likeliest tokens and the token itself; None if the token has none.

        If tokens have the same text, as incomplete characters have, the likeliest one counts.
        """
        if scored.logprob is None:
            return None
        found: dict[str, float] = {}
        for token, logprob in [*scored.likeliest, (scored.token, scored.logprob)]:
            found.setdefault(self.of(token), max(LEAST, logprob))
        return found
