"""Retrieval: a draft without a model that proposes what followed the last tokens in a corpus of texts."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heavypath.kernels.native.retrieval import retrieve
from heavypath.kernels.numbers import whole
from heavypath.kernels.retrieval.corpus import MOST_TOKENS, SortedCorpus, sort_corpus
from heavypath.kernels.retrieval.followers import follower_logprobs
from heavypath.kernels.retrieval.ranges import Appended, append_tokens, renew_ranges, store_texts, store_tokens
from heavypath.speculative.drafts.draft import Draft, Draftable, Feed
from heavypath.speculative.drafts.indexed import IndexedCache, text_cache
from heavypath.speculative.drafts.kinds import as_draft
from heavypath.speculative.drafts.texts import Text, tokens_of
from heavypath.speculative.models.caches import RowCache
from heavypath.speculative.models.forward import Forward
from heavypath.speculative.trees.tails import Usual, of_retrieval

FORMAT = "heavypath retrieval 1"
MOST_NGRAM = 64


class Retrieval(Draftable):
    """A draft without a model: proposes what followed the last tokens in a corpus of your texts, and in the sequence
    itself.

    It proposes the tokens that followed the longest matching suffix of at most max_ngram tokens, and with the remaining
    probability those of shorter suffixes, in proportion to their counts; formula in `kernels/retrieval/followers.py`.
    Pass it to SpeculativeDecoder instead of a draft model. Source: He et al. 2024, "REST: Retrieval-Based Speculative
    Decoding".

        Retrieval([Path("src"), Path("notes.txt")], tokenizer).save("mine.safetensors")     # a few seconds a million
        SpeculativeDecoder(target, Retrieval.load("mine.safetensors"))                      # read as it is needed

    texts: each a str (the text itself), a Path (a file, or a folder: every text file in it), or tokens: a list of
        integers or a LongTensor[any]
    tokenizer: the target's, for texts that are not tokens; its end-of-text token, if any, is appended to each of them

    It takes 12 bytes for each token, on the target's device; a loaded one is memory-mapped. Raises ValueError or
    TypeError for texts without tokens, for tokens outside 0 .. 2**31 - 3, and for files that are not UTF-8.
    """

    def __init__(self, texts: Iterable[Text], tokenizer: PreTrainedTokenizerBase | None = None, *, max_ngram: int = 8):
        max_ngram = whole("max_ngram", max_ngram)
        if not 1 <= max_ngram <= MOST_NGRAM:
            raise ValueError(f"max_ngram must be in 1 .. {MOST_NGRAM}, got {max_ngram}")
        tokens = tokens_of(texts, tokenizer)
        count = sum(map(len, tokens))
        if not count or count + len(tokens) > MOST_TOKENS:
            raise ValueError(
                f"Retrieval needs texts of 1 .. {MOST_TOKENS} tokens in all, got {count} in {len(tokens)} texts"
            )
        self.max_ngram = max_ngram
        self.tokens = count
        self.largest = max(int(text.max()) for text in tokens if len(text))
        self.vocabulary = None if tokenizer is None else _fingerprint(tokenizer)
        self._corpus = sort_corpus(tokens, max_ngram)
        self._copies: WeakValueDictionary[torch.device, CorpusCopy] = WeakValueDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """Return what copy and pickle take: all except the copies on devices."""
        return {name: value for name, value in vars(self).items() if name != "_copies"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of another `Retrieval`."""
        vars(self).update(state)
        self._copies = WeakValueDictionary()

    def save(self, path: str | Path) -> None:
        """Write the corpus to a file for `load`, 12 bytes for each token."""
        facts = {"max_ngram": self.max_ngram, "tokens": self.tokens, "largest": self.largest}
        metadata = {name: str(fact) for name, fact in facts.items()} | {"format": FORMAT}
        if self.vocabulary is not None:
            metadata["vocabulary"] = self.vocabulary
        save_file(self._corpus._asdict(), path, metadata)

    @classmethod
    def load(cls, path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> "Retrieval":
        """Load a file that `save` wrote. It is memory-mapped, so parts that are not used are not read.

        tokenizer: the target's; if given, a corpus of another vocabulary is refused

        Raises FileNotFoundError, or ValueError for another kind of file, and for one of another version.
        """
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise ValueError(
                        f"{str(path)!r} must be a file of {FORMAT!r}, which Retrieval.save writes, got "
                        f"{metadata.get('format', 'one of something else')!r}; make it again from its texts"
                    )
                corpus = SortedCorpus(*(file.get_tensor(name) for name in SortedCorpus._fields))
        except SafetensorError as error:
            raise ValueError(f"{str(path)!r} must be a file that Retrieval.save wrote, but: {error}") from None
        vocabulary = metadata.get("vocabulary")
        if vocabulary is not None and tokenizer is not None and vocabulary != _fingerprint(tokenizer):
            raise ValueError(
                f"{str(path)!r} has tokens of another vocabulary than the target's; make it again with its tokenizer"
            )
        loaded = cls.__new__(cls)
        loaded.max_ngram, loaded.tokens, loaded.largest = (
            int(metadata[name]) for name in ("max_ngram", "tokens", "largest")
        )
        loaded.vocabulary = vocabulary
        loaded._corpus = corpus
        loaded._copies = WeakValueDictionary()
        return loaded

    def on(self, device: torch.device) -> "CorpusCopy":
        """The sorted corpus on a device, shared by all decoders there."""
        copy = self._copies.get(device)
        if copy is None:
            copy = self._copies[device] = CorpusCopy(SortedCorpus(*(field.to(device) for field in self._corpus)))
        return copy

    def __repr__(self) -> str:
        return f"Retrieval({self.tokens} tokens, max_ngram={self.max_ngram})"


class KnownTexts(Protocol):
    """What a `RetrievalDraft` looks up in: a `Retrieval` or a `Recall`.

    largest: the largest token in it; max_ngram: the most last tokens that are looked up
    """

    largest: int
    max_ngram: int

    def on(self, device: torch.device) -> "CorpusCopy": ...  # noqa: D102


class CorpusCopy:
    """A corpus on a device; it is freed when no draft uses it."""

    def __init__(self, corpus: SortedCorpus):
        self.corpus = corpus


class RetrievalDraft(Draft):
    """The `Draft` of `Retrieval`, which proposes tokens by their counts after the last tokens in the corpus.

    A row of its cache has the last 1 .. M tokens, and the range of the sorted corpus in which each suffix is found.

    renews: whether the corpus can change between steps; each step then begins by finding the ranges again

    Raises ValueError if the corpus has tokens that the target lacks.
    """

    name = "retrieval"
    can_rest = True
    renews = False

    def __init__(self, retrieval: KnownTexts, vocab_size: int, device: torch.device):
        if retrieval.largest >= vocab_size:
            raise ValueError(
                f"the texts of {retrieval} must have tokens in 0 .. {vocab_size - 1}, the target's vocabulary, got "
                f"{retrieval.largest}; make it with the target's tokenizer"
            )
        self._longest = retrieval.max_ngram
        self._vocab_size = vocab_size
        self._device = device
        self.known = retrieval.on(device)

    def new_cache(self, batch: int, rows: int) -> RowCache:
        """An empty cache of `rows` rows for each of `batch` sequences, in the form of `kernels/retrieval/ranges.py`."""
        keys = torch.full((batch, 2, rows, self._longest), -1, device=self._device)
        return text_cache(keys, torch.full_like(keys, -1), self._vocab_size)

    def prefill(self, tokens: Tensor, cache: Any, starts: Sequence[int] | None = None) -> None:
        """Cache right-padded sequences LongTensor[B, T]; rows of padding are overwritten before they are read.

        starts: the row of each sequence's first token; default: 0
        """
        if self.renews:
            store_tokens(tokens, cache.keys[:, 1], cache.values[:, 1], starts)
        else:
            store_texts(self.known.corpus, tokens, cache.keys, cache.values, starts)

    def usual_acceptance(self, temperature: float) -> Usual:
        """The usual acceptance of retrieval, lower above temperature 0: sampled output repeats itself less."""
        return of_retrieval(temperature)

    def __call__(self, feed: Feed, cache: Any) -> Tensor:
        """fp32 logits [B, n, V] after each node; -inf for tokens that never followed its last token.

        For a step's first feed, the compiled kernel returns only the logits after the root.
        """
        if isinstance(cache, IndexedCache):
            nodes = cache.with_nodes(feed)
            is_first = feed.news > 0
            return retrieve(
                nodes, self.known, renews=self.renews and is_first, vocab_size=self._vocab_size, after_last=is_first
            )
        if self.renews and feed.news > 0:
            renew_ranges(self.known.corpus, feed.parent_rows[:, 0].clamp(min=0), cache.keys, cache.values)
        corpus = self.known.corpus
        keys = cache.keys
        values = cache.values
        append_tokens(corpus, Appended(feed.tokens, feed.cache_rows, feed.parent_rows), keys, values)
        return follower_logprobs(
            corpus, feed.cache_rows, feed.prefix_lengths, keys, values, vocab_size=self._vocab_size
        )


@as_draft.register
def _(given: Retrieval, target: Forward, model: PreTrainedModel) -> Draft:
    return RetrievalDraft(given, target.vocab_size, target.device)


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of a tokenizer's vocabulary, by which a saved corpus of another one is recognised."""
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        digest.update(f"{index} {token}\n".encode())
    return digest.hexdigest()
