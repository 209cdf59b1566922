"""`Generation`: the result of `SpeculativeDecoder.generate`."""

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from heavypath.speculative.decoding.run import KEPT
from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.models.text_cache import TextCache


@dataclass(frozen=True, eq=False)
class Generation:
    """The result of `SpeculativeDecoder.generate`.

    sequences: LongTensor[B, T + new]: the prompt as it was given, the new tokens, padding
    stats:     counts, acceptance and times
    logits:    if requested, for each new token the target's logits that it was chosen by, fp32 [B, V]; otherwise None
    scores:    the same after logits processors, temperature and filters

    A copy, made by the modules copy or pickle, has no cache.
    """

    sequences: Tensor
    stats: Statistics
    scores: tuple[Tensor, ...] | None = field(default=None, repr=False)
    logits: tuple[Tensor, ...] | None = field(default=None, repr=False)
    _cache: weakref.ref[TextCache] | None = field(default=None, repr=False, compare=False)
    _kept: object = field(default=None, repr=False, compare=False)  # holds the cache, even if the decoder is gone

    @property
    def cache(self) -> TextCache:
        """The cached keys and values of the sequences, for `generate(..., past=out.cache)`.

        The decoder keeps the caches of its last two generations (in each thread that calls it). Keep a reference to
        out.cache to have one for longer. Raises RuntimeError if the cache is gone.
        """
        if self._cache is None:
            raise RuntimeError("a copy of a Generation has no cache; the original's .cache may still be there")
        cache = self._cache()
        if cache is None:
            raise RuntimeError(
                f"the cache of this generation is gone: a decoder keeps the caches of its last {KEPT} generations; to "
                "keep one for longer, keep a reference to out.cache"
            )
        return cache

    def __reduce__(self) -> tuple[type["Generation"], tuple[Any, ...]]:
        return Generation, (self.sequences, self.stats, self.scores, self.logits)
