"""Rows of texts that were decoded, for prompts that begin alike: of those that run, and of some that have ended.

A prompt takes over the rows of its longest common prefix with any of these texts, as `generate(past=)` does. Texts that
have ended are copies, in a bounded memory; where it is full, the one that was used last the longest time ago goes.

How much of a prompt is taken over is told, and shows in its time. Where there is no such memory, texts of different
requests therefore share nothing, not while they run either.
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
LEAST = 8  # tokens of a text that is kept: copying fewer saves no time

Tokens = np.ndarray  # int64 [any]


def tokens_of(text: Sequence[int]) -> Tokens:
    """The tokens as they are compared."""
    return np.asarray(text, dtype=np.int64)


def common(one: Tokens, other: Tokens) -> int:
    """The number of first tokens that two texts have in common."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


class Prefixes:
    """The rows of texts in a workspace, and of texts that have ended.

    most_bytes: of the latter; 0 keeps none, and texts of different requests share nothing
    """

    def __init__(self, plan: StepPlan, workspace: Workspace, most_bytes: int):
        self._plan, self._workspace, self._most_bytes = plan, workspace, most_bytes
        self._ended = OrderedDict[bytes, tuple[Tokens, TextCache]]()  # the one used last comes last
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._ended)

    @property
    def across_requests(self) -> bool:
        """True if a prompt may take rows of another request's text."""
        return self._most_bytes > 0

    def keep(self, slot: int, text: Tokens) -> None:
        """Keep the rows of the text in a slot, which ends. Its last token has no row yet.

        Texts that it begins with are kept no longer. One that is larger than the memory is not kept, and no other goes
        for it. Where there is no memory for it, all that was kept goes.
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
        except (RuntimeError, MemoryError) as error:  # without a GPU torch has no error of its own for this
            logger.warning("texts that had ended are forgotten, since another could not be copied: %s", error)
            self.clear()
            return
        self._ended[text.tobytes()] = text, cache
        self.nbytes += cache.nbytes

    def clear(self) -> None:
        """Keep no text any more."""
        self._ended.clear()
        self.nbytes = 0

    def found(self, prompts: Sequence[Tokens], running: Sequence[Sequence[Tokens]]) -> "FoundPrefixes":
        """The texts that prompts begin most like.

        running: for each prompt the text in each slot that is in use, from the first on; empty where it may not take it
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
        """The rows of the text in a slot: all but the last token's, which is the root of its next tree."""
        texts = torch.from_numpy(text[None, :-1])
        models = []
        for forward, cache, unsure in self._caches():
            models.append(ModelRows(forward, cache.trimmed(slots, len(text) - 1) if copied else cache, unsure))
        return TextCache(texts, [0 if copied else slots.start], models)

    def _caches(self) -> Iterator[tuple[Caching, RowCache, int]]:
        """Each model, its cache, and how many of a text's last rows may be missing there."""
        plan, workspace = self._plan, self._workspace
        yield plan.target, workspace.target_cache, 0
        draft = plan.draft
        for part, cache in [] if draft is None or workspace.draft_cache is None else draft.parts(workspace.draft_cache):
            if draft is not None and part.forward is not None:
                yield part.forward, cache, max(part.unsure_rows(plan.depth), draft.unsure_rows(plan.depth))

    def _forget(self, key: bytes) -> None:
        _, cache = self._ended.pop(key)
        self.nbytes -= cache.nbytes


class FoundPrefixes:
    """For each prompt of a batch the cache of a text that begins alike, or None: a `past` of a request."""

    def __init__(self, caches: list[TextCache | None]):
        self._caches = caches
        self._shared: list[SharedPrefixes | None] = []

    def shared(self, prompts: Tensor, most: list[int]) -> "FoundPrefixes":
        """See `TextCache.shared`."""
        self._shared = [
            None if cache is None else cache.shared(prompt[None], [limit])
            for cache, prompt, limit in zip(self._caches, prompts, most, strict=True)
        ]
        return self

    @property
    def lengths(self) -> list[int]:
        """See `SharedPrefixes`."""
        return [0 if each is None else each.lengths[0] for each in self._shared]

    def limited(self, lengths: list[int]) -> "FoundPrefixes":
        """See `SharedPrefixes.limited`."""
        fewer = FoundPrefixes(self._caches)
        fewer._shared = [
            None if each is None else each.limited([length]) for each, length in zip(self._shared, lengths, strict=True)
        ]
        return fewer

    def copy_rows(self, forward: Caching, cache: RowCache) -> list[int]:
        """See `SharedPrefixes.copy_rows`."""
        return [
            0 if each is None else each.copy_rows(forward, cache, first=place)[0]
            for place, each in enumerate(self._shared)
        ]
