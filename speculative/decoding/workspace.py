"""The memory that steps work in: the caches and the state of a batch, allocated once, for as many batches as fit."""

from typing import NamedTuple

from heavypath.speculative.decoding.graphs import Graphs
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.decoding.step import Stepped
from heavypath.speculative.drafts.drafts import Cache, Draft
from heavypath.speculative.models.caches import KeyValueCache
from heavypath.speculative.models.forward import Forward


class Size(NamedTuple):
    """What a generation needs.

    sequences; rows of the caches; new_tokens of a sequence; stops, its end-of-sequence tokens; places of counts, as
    `commit` has them; penalised: 1 where a repetition penalty is, else 0
    """

    sequences: int
    rows: int
    new_tokens: int
    stops: int
    places: int
    penalised: int

    def covers(self, other: "Size") -> bool:
        """Whether another fits into it."""
        return all(have >= need for have, need in zip(self, other, strict=True))

    def rounded(self) -> "Size":
        """A larger one, that fits more often: sequences and what is small to powers of two, the rest to 1,024."""
        small = self.sequences, max(8, self.stops), max(64, self.places)
        sequences, stops, places = (1 << (number - 1).bit_length() for number in small)
        rows, new_tokens = (-(-number // 1024) * 1024 for number in (self.rows, self.new_tokens))
        return Size(sequences, rows, new_tokens, stops, places, self.penalised)


class Workspace:
    """Caches of a target and, unless there is none, of a draft; the state of the batch; graphs of steps, if any."""

    def __init__(self, target: Forward, draft: Draft | None, size: Size, graphs: Graphs[Stepped] | None = None):
        self.size, self.graphs = size, graphs
        self._views: dict[int, tuple[Sequences, KeyValueCache, Cache | None]] = {}
        self.target_cache = target.new_cache(size.sequences, size.rows)
        self.draft_cache = None if draft is None else draft.new_cache(size.sequences, size.rows)
        self.state = Sequences.room_for(
            size.sequences, size.new_tokens, size.stops, target.vocab_size * size.penalised, size.places, target.device
        )

    @property
    def cache_bytes(self) -> int:
        """Of both caches."""
        return sum(cache.nbytes for cache in (self.target_cache, self.draft_cache) if cache is not None)

    def first(self, slots: int) -> tuple[Sequences, KeyValueCache, Cache | None]:
        """State, target's and draft's cache of the first slots; the same memory."""
        if slots not in self._views:
            draft_cache = None if self.draft_cache is None else self.draft_cache.first(slots)
            self._views[slots] = self.state.first(slots), self.target_cache.first(slots), draft_cache
        return self._views[slots]

    def move(self, source: int, destination: int) -> None:
        """Take the sequence in one slot to another, with its caches."""
        for part in (self.state, self.target_cache, self.draft_cache):
            if part is not None:
                part.move(source, destination)
