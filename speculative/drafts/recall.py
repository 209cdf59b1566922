"""Recall: a draft without a model that proposes what followed the last tokens in earlier generated sequences."""

import threading
from collections import deque
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.kernels.numbers import whole
from heavypath.kernels.retrieval.corpus import SortedCorpus, sort_corpus
from heavypath.speculative.drafts.draft import Draft, Draftable
from heavypath.speculative.drafts.kinds import as_draft
from heavypath.speculative.drafts.retrieval import MOST_NGRAM, CorpusCopy, RetrievalDraft
from heavypath.speculative.models.forward import Forward, host_can_read

MOST_TOKENS = 2**22  # limit for kept tokens: sorting this many takes seconds
_AFTER = 16  # all sequences are sorted again when unsorted tokens reach a 16th of the sorted ones
_NOTHING = SortedCorpus(torch.zeros(0, dtype=torch.int32, device="cpu"), torch.zeros(0, dtype=torch.long, device="cpu"))
_LAST = np.iinfo(np.int64).max  # larger than every step


class Recall(Draftable):
    """A draft without a model that learns: it proposes what followed the last tokens in sequences decoded with it
    before.

    Its distribution is that of `Retrieval`, over the latest sequences of all decoders that use it, and the current
    sequence. When a sequence has ended, its new tokens and the last tokens of its prompt are added. All tokens are
    sorted again when their number has grown by a 16th. Source: Oliaro et al. 2024, "SuffixDecoding", arXiv 2411.04975;
    this is its global tree.

        SpeculativeDecoder(target, Mixture([draft, Recall()]))

    tokens: the most that are kept; the oldest sequences are removed first. 12 bytes each, on the target's device
    max_ngram: the most last tokens that are looked up

    The output has the target's distribution whatever was learned. With the same seed, the output at temperature 0 and
    of "ersd" never depends on what was learned; other methods give other samples. Anyone who can time responses may
    find out what was generated for others. Raises TypeError for numbers that are not integers, and
    ValueError for numbers out of range.
    """

    def __init__(self, tokens: int = 65_536, *, max_ngram: int = 8):
        tokens = whole("tokens", tokens)
        max_ngram = whole("max_ngram", max_ngram)
        if not 1 <= max_ngram <= MOST_NGRAM:
            raise ValueError(f"max_ngram must be in 1 .. {MOST_NGRAM}, got {max_ngram}")
        if not 2 * max_ngram <= tokens <= MOST_TOKENS:
            raise ValueError(f"tokens must be in {2 * max_ngram} .. {MOST_TOKENS}, got {tokens}")
        self.tokens = tokens
        self.max_ngram = max_ngram
        self.largest = 0
        self.vocab_size: int | None = None
        self._lock = threading.Lock()
        self._texts = deque[np.ndarray]()
        self._kept = self._sorted = self._waiting = 0  # numbers of tokens, plus one separator for each sequence
        self._corpus = self._sort()
        self._copies: WeakValueDictionary[torch.device, LearningCopy] = WeakValueDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """Return what copy and pickle take: all except the lock and the copies on devices. The list of texts is new."""
        with self._lock:
            state = vars(self) | {"_texts": self._texts.copy()}
        del state["_lock"], state["_copies"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of another `Recall`, with a lock of its own."""
        vars(self).update(state)
        self._lock = threading.Lock()
        self._copies = WeakValueDictionary()

    def serve(self, vocab_size: int) -> None:
        """Note that a target with this vocabulary size uses it; ValueError if a target of another size did before."""
        if self.vocab_size not in (None, vocab_size):
            raise ValueError(
                f"{self} keeps sequences for a vocabulary of {self.vocab_size} tokens, got a target of {vocab_size}; "
                "make a Recall for each vocabulary"
            )
        self.vocab_size = vocab_size

    def learn(self, text: np.ndarray) -> None:
        """Add a sequence, integers [T]; if it is longer than what is kept, its last tokens."""
        text = text[-(self.tokens - 1) :]
        with self._lock:
            self._texts.append(text)
            self._kept += len(text) + 1
            self._waiting += len(text) + 1
            while self._kept > self.tokens:
                self._kept -= len(self._texts.popleft()) + 1
            if self._waiting * _AFTER >= self._sorted:
                self._corpus = self._sort()
                self._sorted = self._kept
                self._waiting = 0
                for copy in self._copies.values():
                    copy.take(self._corpus)

    def forget(self) -> None:
        """Remove all sequences."""
        with self._lock:
            self._texts.clear()
            self._kept = self._sorted = self._waiting = 0
            self._corpus = self._sort()
            for copy in self._copies.values():
                copy.take(self._corpus)

    def _sort(self) -> SortedCorpus:
        """The kept sequences sorted for lookup, padded to the most that can be kept, so that shapes never change.

        Padding sorts last.
        """
        followers, steps = sort_corpus(self._texts, self.max_ngram) if self._texts else _NOTHING
        size = len(steps)
        all_steps = torch.full((self.tokens,), _LAST, dtype=torch.long, device="cpu")
        all_steps[:size] = steps // size * self.tokens + steps % size
        return SortedCorpus(torch.cat([followers, followers.new_zeros(self.tokens - size)]), all_steps)

    def on(self, device: torch.device) -> "LearningCopy":
        """The sorted sequences on a device, shared by all decoders there."""
        with self._lock:
            copy = self._copies.get(device)
            if copy is None:
                copy = self._copies[device] = LearningCopy(SortedCorpus(*(one.to(device) for one in self._corpus)))
        return copy

    def __repr__(self) -> str:
        return f"Recall({self.tokens} tokens, max_ngram={self.max_ngram})"


class LearningCopy(CorpusCopy):
    """Sorted sequences on a device. On a GPU they are updated in place, because CUDA graphs read that memory.

    On the host they are replaced, so a running step keeps using the old ones.
    """

    def take(self, corpus: SortedCorpus) -> None:
        """Replace the sequences by those of `corpus`, of the same shapes."""
        if host_can_read(self.corpus.steps.device):
            self.corpus = corpus
            return
        for own, new in zip(self.corpus, corpus, strict=True):
            own.copy_(new)


class RecallDraft(RetrievalDraft):
    """The `Draft` of `Recall`: a `RetrievalDraft` whose corpus grows by the sequences that it has drafted for.

    Ranges in its cache refer to the corpus as it was when they were written, so each step finds them again.
    """

    name = "recall"
    renews = True

    def __init__(self, recall: Recall, vocab_size: int, device: torch.device):
        super().__init__(recall, vocab_size, device)
        recall.serve(vocab_size)
        self._recall = recall

    def learn(self, prompts: Tensor, lengths: Tensor, new: Tensor, counts: Tensor) -> None:
        """Add the new tokens of finished sequences, and the last tokens of their prompts; arguments as in `Draft`."""
        for prompt, length, tokens, count in zip(prompts, lengths.tolist(), new, counts.tolist(), strict=True):
            before = prompt[max(0, length - self._recall.max_ngram) : length]
            self._recall.learn(torch.cat([before, tokens[:count].to(before.device)]).cpu().numpy())


@as_draft.register
def _(given: Recall, target: Forward, model: PreTrainedModel) -> Draft:
    return RecallDraft(given, target.vocab_size, target.device)
