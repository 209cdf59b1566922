"""The result of `SpeculativeDecoder.generate`."""

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from heavypath.speculative.decoding.run import KEPT
from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.models.text_cache import TextCache


@dataclass(frozen=True, eq=False)
class Generation:
    """The result of `generate`.

    sequences: LongTensor[B, T + new]: the prompt as it was given, the new tokens, padding
    stats:     counts, acceptance and times, see `Statistics`
    scores, logits: where asked for, fp32 [B, V] for each new token, see `output.scores`

    A copy, by the modules copy or pickle, has no cache.
    """

    sequences: Tensor
    stats: Statistics
    scores: tuple[Tensor, ...] | None = field(default=None, repr=False)
    logits: tuple[Tensor, ...] | None = field(default=None, repr=False)
    _cache: weakref.ref[TextCache] | None = field(default=None, repr=False, compare=False)
    _kept: object = field(default=None, repr=False, compare=False)  # who keeps the cache, also without the decoder

    @property
    def cache(self) -> TextCache:
        """The models' rows of the texts, for `generate(..., past=out.cache)`.

        The decoder keeps the caches of its last two generations (in each thread that calls it); to have one for longer,
        hold on to out.cache. Raises RuntimeError if it is gone.
        """
        if self._cache is None:
            raise RuntimeError("a copy of a Generation has no cache; the original's .cache may still be there")
        cache = self._cache()
        if cache is None:
            raise RuntimeError(
                f"the cache of this text is gone: a decoder keeps those of its last {KEPT} generations; to have one "
                "for longer, hold on to out.cache itself"
            )
        return cache

    def __reduce__(self) -> tuple[type["Generation"], tuple[Any, ...]]:
        return Generation, (self.sequences, self.stats, self.scores, self.logits)
