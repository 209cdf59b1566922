"""Recall: a draft without a model, which proposes what followed the last tokens in texts that were written before."""

import threading
from collections import deque
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.kernels.retrieval.corpus import SortedCorpus, sort_corpus
from heavypath.speculative.drafts.draft import Draft, Draftable
from heavypath.speculative.drafts.kinds import as_draft
from heavypath.speculative.drafts.retrieval import MOST_NGRAM, CorpusCopy, RetrievalDraft
from heavypath.speculative.models.forward import Forward, host_can_read

MOST_TOKENS = 2**22  # kept: to sort so many takes seconds
_AFTER = 16  # as much as a 16th of what is sorted may wait to be sorted with it
_NOTHING = SortedCorpus(torch.zeros(0, dtype=torch.int32, device="cpu"), torch.zeros(0, dtype=torch.long, device="cpu"))
_LAST = np.iinfo(np.int64).max  # above every step


class Recall(Draftable):
    """A draft without a model that learns: what followed the last tokens in texts that it has drafted before.

    It has the law of `Retrieval`, over the texts that decoders with it wrote last, and earlier in the text itself. Each
    text is taken in when it has ended: its new tokens, and the last ones of its prompt. They are sorted anew when a
    16th as many have come. Source: Oliaro et al. 2024, "SuffixDecoding", arXiv 2411.04975, whose global tree this is.

        SpeculativeDecoder(target, Mixture([draft, Recall()]))

    tokens: kept at most, the oldest texts go first; 12 bytes each, on a GPU there
    max_ngram: tokens that are looked for, at most

    The text's law is exact whatever was learned. Under one seed, greedy text and that of "ersd" stay the same; texts of
    other methods are other samples after other texts. Whoever can time answers can find out what others were answered.
    Raises ValueError for numbers out of range.
    """

    def __init__(self, tokens: int = 65_536, *, max_ngram: int = 8):
        if not 1 <= max_ngram <= MOST_NGRAM:
            raise ValueError(f"max_ngram must be in 1 .. {MOST_NGRAM}, got {max_ngram}")
        if not 2 * max_ngram <= tokens <= MOST_TOKENS:
            raise ValueError(f"tokens must be in {2 * max_ngram} .. {MOST_TOKENS}, got {tokens}")
        self.tokens, self.max_ngram, self.largest = tokens, max_ngram, 0
        self.vocab_size: int | None = None
        self._lock = threading.Lock()
        self._texts = deque[np.ndarray]()
        self._kept = self._sorted = self._waiting = 0  # tokens, with one between texts
        self._corpus = self._sort()
        self._copies: WeakValueDictionary[torch.device, LearningCopy] = WeakValueDictionary()

    def serve(self, vocab_size: int) -> None:
        """Draft for a target of so many tokens. Raises ValueError if it has learned for one of another vocabulary."""
        if self.vocab_size not in (None, vocab_size):
            raise ValueError(
                f"{self} keeps texts of a vocabulary of {self.vocab_size} tokens, got a target of {vocab_size}; make "
                "a Recall for each vocabulary"
            )
        self.vocab_size = vocab_size

    def learn(self, text: np.ndarray) -> None:
        """Take in a text, integers [T]; of a longer one than is kept its last tokens."""
        text = text[-(self.tokens - 1) :]
        with self._lock:
            self._texts.append(text)
            self._kept += len(text) + 1
            self._waiting += len(text) + 1
            while self._kept > self.tokens:
                self._kept -= len(self._texts.popleft()) + 1
            if self._waiting * _AFTER >= self._sorted:
                self._corpus, self._sorted, self._waiting = self._sort(), self._kept, 0
                for copy in self._copies.values():
                    copy.take(self._corpus)

    def forget(self) -> None:
        """Forget all texts."""
        with self._lock:
            self._texts.clear()
            self._kept = self._sorted = self._waiting = 0
            self._corpus = self._sort()
            for copy in self._copies.values():
                copy.take(self._corpus)

    def _sort(self) -> SortedCorpus:
        """All texts, in as many entries as may be kept, so that shapes stay: those left over come after all steps."""
        followers, steps = sort_corpus(self._texts, self.max_ngram) if self._texts else _NOTHING
        size, all_steps = len(steps), torch.full((self.tokens,), _LAST, dtype=torch.long, device="cpu")
        all_steps[:size] = steps // size * self.tokens + steps % size
        return SortedCorpus(torch.cat([followers, followers.new_zeros(self.tokens - size)]), all_steps)

    def on(self, device: torch.device) -> "LearningCopy":
        """The sorted texts on a device, which all decoders there share."""
        with self._lock:
            copy = self._copies.get(device)
            if copy is None:
                copy = self._copies[device] = LearningCopy(SortedCorpus(*(one.to(device) for one in self._corpus)))
        return copy

    def __repr__(self) -> str:
        return f"Recall({self.tokens} tokens, max_ngram={self.max_ngram})"


class LearningCopy(CorpusCopy):
    """Sorted texts on a device, in the same memory there: CUDA graphs read it. On the host steps go on with the old."""

    def take(self, corpus: SortedCorpus) -> None:
        """Have these texts instead."""
        if host_can_read(self.corpus.steps.device):
            self.corpus = corpus
            return
        for own, new in zip(self.corpus, corpus, strict=True):
            own.copy_(new)


class RecallDraft(RetrievalDraft):
    """`Recall` at work. The ranges in its cache are of the texts as they were."""

    name = "recall"
    renews = True

    def __init__(self, recall: Recall, vocab_size: int, device: torch.device):
        super().__init__(recall, vocab_size, device)
        recall.serve(vocab_size)
        self._recall = recall

    def learn(self, prompts: Tensor, lengths: Tensor, new: Tensor, counts: Tensor) -> None:
        """Take in texts, see `Draft.learn`."""
        for prompt, length, tokens, count in zip(prompts, lengths.tolist(), new, counts.tolist(), strict=True):
            before = prompt[max(0, length - self._recall.max_ngram) : length]
            self._recall.learn(torch.cat([before, tokens[:count].to(before.device)]).cpu().numpy())


@as_draft.register
def _(given: Recall, target: Forward, model: PreTrainedModel) -> Draft:
    return RecallDraft(given, target.vocab_size, target.device)
