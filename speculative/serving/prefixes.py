"""Prefix cache of a service: rows of running and of ended sequences, reused by prompts that begin with the same tokens.

A prompt reuses the rows of its longest common prefix with any of these sequences, as `generate(past=)` does. Ended
sequences are copied into a bounded memory; when it is full, the least recently used one is dropped.

How much of a prompt was reused is reported, and shows in its time to first token. So without this memory
(`prefix_bytes` 0) sequences of different requests share nothing, not even while they run.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from heavypath.speculative.decoding.step import StepPlan
from heavypath.speculative.decoding.workspace import Workspace
from heavypath.speculative.models.caches import RowCache
from heavypath.speculative.models.text_cache import Caching, ModelRows, SharedPrefixes, TextCache

logger = logging.getLogger(__name__)
LEAST = 8  # tokens of the shortest sequence that is kept: copying fewer saves no time

Tokens = np.ndarray  # int64 [any]


def tokens_of(text: Sequence[int]) -> Tokens:
    """A sequence as an int64 array, which `common` compares."""
    return np.asarray(text, dtype=np.int64)


def common(one: Tokens, other: Tokens) -> int:
    """The length of the longest common prefix of two sequences."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


class Prefixes:
    """Finds cache rows that a prompt can reuse: those of running sequences, and copies of those that have ended.

    workspace:  the caches in which the running sequences have their rows
    most_bytes: memory for the rows of ended sequences; with 0 none are kept, and different requests share nothing
    nbytes:     bytes of the rows of ended sequences now
    """

    def __init__(self, plan: StepPlan, workspace: Workspace, most_bytes: int):
        self._plan = plan
        self._workspace = workspace
        self._most_bytes = most_bytes
        self._ended = OrderedDict[bytes, tuple[Tokens, TextCache]]()  # the most recently used comes last
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._ended)

    @property
    def across_requests(self) -> bool:
        """Whether a prompt may reuse rows of another request."""
        return self._most_bytes > 0

    def keep(self, slot: int, text: Tokens) -> None:
        """Copy the rows of a sequence that ends, for later prompts. Least recently used sequences make room for it.

        Kept sequences that are a prefix of it are dropped. A sequence of less than 8 tokens, or larger than the memory,
        is not kept, and nothing is dropped for it. If allocating the copy fails, everything is dropped.

        slot: the slot that has its rows
        text: all its tokens; the last token has no row yet
        """
        if len(text) < max(LEAST, 2) or not self._most_bytes:
            return
        slots = slice(slot, slot + 1)
        size = sum(cache.trimmed_bytes(slots, len(text) - 1) for _, cache, _ in self._caches())
        if size > self._most_bytes:
            return
        for key, (other, _) in [*self._ended.items()]:
            if common(other, text) == len(other):
                self._forget(key)
        while self.nbytes + size > self._most_bytes:
            self._forget(next(iter(self._ended)))
        try:
            cache = self._cache(slots, text, copied=True)
        except (RuntimeError, MemoryError) as error:  # on a CPU torch raises a plain RuntimeError
            logger.warning("texts that had ended are forgotten, since another could not be copied: %s", error)
            self.clear()
            return
        self._ended[text.tobytes()] = text, cache
        self.nbytes += cache.nbytes

    def clear(self) -> None:
        """Drop the rows of all ended sequences."""
        self._ended.clear()
        self.nbytes = 0

    def found(self, prompts: Sequence[Tokens], running: Sequence[Sequence[Tokens]]) -> "FoundPrefixes":
        """For each prompt, the sequence with the longest common prefix, if 2 tokens or more are common.

        running: for each prompt, the tokens of the sequences in the slots, from the first slot on; an empty array for a
                 sequence whose rows it may not reuse
        """
        return FoundPrefixes([self._best(prompt, texts) for prompt, texts in zip(prompts, running, strict=True)])

    def _best(self, prompt: Tokens, running: Sequence[Tokens]) -> TextCache | None:
        ended = [(common(text, prompt), key) for key, (text, _) in self._ended.items()]
        most, key = max(ended, default=(0, b""))
        others = [(common(text, prompt), slot) for slot, text in enumerate(running) if len(text) > 1]
        most_running, slot = max(others, default=(0, 0))
        if max(most, most_running) < 2:
            return None
        if most_running > most:
            return self._cache(slice(slot, slot + 1), running[slot], copied=False)
        self._ended.move_to_end(key)
        return self._ended[key][1]

    def _cache(self, slots: slice, text: Tokens, *, copied: bool) -> TextCache:
        """The rows of the sequence `text` in a slot, or a copy; without its last token, the root of the next tree."""
        texts = torch.from_numpy(text[None, :-1])
        models = []
        for forward, cache, unsure in self._caches():
            models.append(ModelRows(forward, cache.trimmed(slots, len(text) - 1) if copied else cache, unsure))
        return TextCache(texts, [0 if copied else slots.start], models)

    def _caches(self) -> Iterator[tuple[Caching, RowCache, int]]:
        """Each model, its cache, and how many of a sequence's last rows may be missing there."""
        plan = self._plan
        workspace = self._workspace
        yield plan.target, workspace.target_cache, 0
        draft = plan.draft
        for part, cache in draft.parts(workspace.draft_cache):
            if part.forward is not None:
                yield part.forward, cache, max(part.unsure_rows(plan.depth), draft.unsure_rows(plan.depth))

    def _forget(self, key: bytes) -> None:
        _, cache = self._ended.pop(key)
        self.nbytes -= cache.nbytes


class FoundPrefixes:
    """For each prompt of a batch, the cache of a sequence with the same beginning, or None.

    It stands for `TextCache` as `past` of a request, with a different sequence for each prompt. Call `shared` first.
    """

    def __init__(self, caches: list[TextCache | None]):
        self._caches = caches
        self._shared: list[SharedPrefixes | None] = []

    def shared(self, prompts: Tensor, most: list[int]) -> "FoundPrefixes":
        """Compare each prompt with its cached sequence. Returns this object, with the common prefixes.

        prompts: LongTensor [B, T]; most: for each prompt, how many tokens of it may be reused at most
        """
        self._shared = [
            None if cache is None else cache.shared(prompt[None], [limit])
            for cache, prompt, limit in zip(self._caches, prompts, most, strict=True)
        ]
        return self

    @property
    def lengths(self) -> list[int]:
        """For each prompt, the length of the common prefix; 0 without a cached sequence."""
        return [0 if each is None else each.lengths[0] for each in self._shared]

    def limited(self, lengths: list[int]) -> "FoundPrefixes":
        """The same prefixes, each cut to at most its length in `lengths`."""
        fewer = FoundPrefixes(self._caches)
        fewer._shared = [
            None if each is None else each.limited([length]) for each, length in zip(self._shared, lengths, strict=True)
        ]
        return fewer

    def copy_rows(self, forward: Caching, cache: RowCache) -> list[int]:
        """Copy the rows that `forward` computed for each prefix to sequence 0, 1, ... of `cache`; returns counts."""
        return [
            0 if each is None else each.copy_rows(forward, cache, first=place)[0]
            for place, each in enumerate(self._shared)
        ]
