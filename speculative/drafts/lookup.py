"""Prompt lookup: a draft without a model that proposes what followed the last tokens earlier in the same sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.kernels.native.retrieval import look_up
from heavypath.kernels.numbers import whole
from heavypath.kernels.retrieval.latest import latest_logprobs
from heavypath.kernels.retrieval.ranges import Appended, store_tokens
from heavypath.speculative.drafts.draft import Draft, Draftable, Feed
from heavypath.speculative.drafts.indexed import IndexedCache, text_cache
from heavypath.speculative.drafts.kinds import as_draft
from heavypath.speculative.models.caches import RowCache
from heavypath.speculative.models.forward import Forward
from heavypath.speculative.trees.tails import Usual, of_lookup


@dataclass(frozen=True)
class PromptLookup(Draftable):
    """A draft without a model: proposes what followed the last tokens earlier in the same sequence (n-gram lookup).

    It finds the longest suffix, of min_ngram to max_ngram tokens, that occurred before, and proposes the tokens that
    followed it. The latest occurrence gets half of the probability, the one before it half of the rest, and so on. Pass
    it to SpeculativeDecoder instead of a draft model. Source: Saxena 2023, "Prompt lookup decoding"; in transformers it
    is prompt_lookup_num_tokens.
    """

    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        for name in ("max_ngram", "min_ngram"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"PromptLookup needs 1 <= min_ngram <= max_ngram, got {self.min_ngram} and {self.max_ngram}"
            )


class NgramCache(RowCache):
    """The cache of lookups: for each token, the tokens before it, and it with the tokens before it.

    With M = max_ngram = 2, in the sequence a b c, the row of c has the key a b and the value b c.

    keys: LongTensor[B, 1, rows, M], the M tokens before the token; -1 before the sequence's first token
    values: LongTensor[B, 1, rows, M], the M - 1 tokens before the token, then the token itself
    """

    def __init__(self, batch: int, rows: int, length: int, device: torch.device):
        keys = torch.full((batch, 1, rows, length), -1, device=device)
        super().__init__(keys, torch.full_like(keys, -1))


class LookupDraft(Draft):
    """The `Draft` of `PromptLookup`: an attention over the sequence, in which a token's key is the tokens before it."""

    name = "prompt lookup"
    can_rest = True

    def __init__(self, options: PromptLookup, vocab_size: int, device: torch.device):
        self._options = options
        self.vocab_size = vocab_size
        self._device = device

    def new_cache(self, batch: int, rows: int) -> RowCache:
        """An empty cache of `rows` rows for each of `batch` sequences, with the rows of `NgramCache`."""
        cache = NgramCache(batch, rows, self._options.max_ngram, self._device)
        return text_cache(cache.keys, cache.values, self.vocab_size)

    def prefill(self, tokens: Tensor, cache: Any, starts: Sequence[int] | None = None) -> None:
        """Cache right-padded sequences LongTensor[B, T]; rows of padding are overwritten before they are read.

        starts: the row of each sequence's first token; default: 0
        """
        store_tokens(tokens, cache.keys[:, 0], cache.values[:, 0], starts)

    def usual_acceptance(self, temperature: float) -> Usual:
        """The usual acceptance of lookups, which is lower if the target samples."""
        return of_lookup(temperature)

    def __call__(self, feed: Feed, cache: Any) -> Tensor:
        """fp32 logits [B, n, V] after each node: -inf for all tokens if no suffix occurred before.

        For a step's first feed, only those after the root.
        """
        if isinstance(cache, IndexedCache):
            nodes = cache.with_nodes(feed)
            shortest = self._options.min_ngram
            return look_up(nodes, shortest, vocab_size=self.vocab_size, after_last=feed.news > 0)
        nodes = Appended(feed.tokens, feed.cache_rows, feed.parent_rows)
        return latest_logprobs(
            nodes,
            feed.prefix_lengths,
            cache.keys[:, :, : feed.visible_rows],
            cache.values[:, :, : feed.visible_rows],
            shortest=self._options.min_ngram,
            is_chain=feed.news > 0,
            vocab_size=self.vocab_size,
        )


@as_draft.register
def _(given: PromptLookup, target: Forward, model: PreTrainedModel) -> Draft:
    return LookupDraft(given, target.vocab_size, target.device)
