"""The memory that steps work in: the caches and the state of a batch, allocated once, for as many batches as fit."""

from typing import NamedTuple

from heavypath.speculative.decoding.graphs import Graphs
from heavypath.speculative.decoding.growth import Growth
from heavypath.speculative.decoding.request import Request
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.decoding.step import Stepped, StepPlan
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.models.caches import KeyValueCache, RowCache
from heavypath.speculative.models.forward import Forward


class Size(NamedTuple):
    """What a generation needs.

    sequences:   of the batch
    cache_rows:  of each cache
    new_tokens:  of a sequence
    stops:       end-of-sequence tokens
    count_slots: columns of the counts, as `commit` has them
    penalised:   1 where a repetition penalty needs the tokens seen, else 0
    """

    sequences: int
    cache_rows: int
    new_tokens: int
    stops: int
    count_slots: int
    penalised: int

    @classmethod
    def of(cls, request: Request, plan: StepPlan) -> "Size":
        """What a request needs that is decoded by a plan."""
        batch, width = request.prompt.shape
        return cls(
            sequences=batch,
            cache_rows=width + request.max_new_tokens + tree_rows(plan),
            new_tokens=request.max_new_tokens,
            stops=max(1, len(request.stops)),
            count_slots=plan.tree.depth * plan.tree.branching,
            penalised=int(request.processing is not None and request.processing.repetition_penalty != 1),
        )

    def covers(self, other: "Size") -> bool:
        """Whether a workspace of this size has room for another size."""
        return all(have >= need for have, need in zip(self, other, strict=True))

    def rounded(self) -> "Size":
        """A larger size, which more generations fit: small numbers as powers of two, the rest as multiples of 1,024."""
        small = self.sequences, max(8, self.stops), max(64, self.count_slots)
        sequences, stops, count_slots = (1 << (number - 1).bit_length() for number in small)
        cache_rows, new_tokens = (-(-number // 1024) * 1024 for number in (self.cache_rows, self.new_tokens))
        return Size(sequences, cache_rows, new_tokens, stops, count_slots, self.penalised)


def tree_rows(plan: StepPlan) -> int:
    """Cache rows that the trees of a plan take."""
    return plan.tree.slots if isinstance(plan.tree, Growth) else len(plan.tree)


class Workspace:
    """The caches of a target and, unless there is none, of a draft; the state of the batch; graphs of steps, if any."""

    def __init__(self, target: Forward, draft: Draft | None, size: Size, graphs: Graphs[Stepped] | None = None):
        self.size, self.graphs = size, graphs
        self._target, self._views = target, dict[int, tuple[Sequences, KeyValueCache, RowCache | None]]()
        self.target_cache = target.new_cache(size.sequences, size.cache_rows)
        self.draft_cache = None if draft is None else draft.new_cache(size.sequences, size.cache_rows)
        self.state = Sequences.room_for(
            size.sequences,
            new_tokens=size.new_tokens,
            stops=size.stops,
            vocab_size=target.vocab_size * size.penalised,
            count_slots=size.count_slots,
            device=target.device,
        )

    @property
    def cache_bytes(self) -> int:
        """Bytes of both caches."""
        return sum(cache.nbytes for cache in (self.target_cache, self.draft_cache) if cache is not None)

    def fits(self, size: Size, draft: Draft | None) -> bool:
        """Whether a generation of this size, drafted by `draft`, can use it."""
        return self.size.covers(size) and (self.draft_cache is not None or draft is None)

    def begin(self, request: Request, draft: Draft | None) -> None:
        """Put a request's prompts into the first slots, and all of their tokens but the last into the caches."""
        self.state.begin(
            request.prompt,
            request.lengths,
            new_tokens=request.max_new_tokens,
            stops=request.stops,
            sequence_ids=request.sequence_ids,
            seed=request.seed,
        )
        before_roots = request.prompt[:, :-1]
        if before_roots.shape[1] == 0:
            return
        _, target_cache, draft_cache = self.first(len(before_roots))
        self._target.prefill(before_roots, target_cache)
        if draft is not None and draft_cache is not None:
            draft.prefill(before_roots, draft_cache)

    def first(self, slots: int) -> tuple[Sequences, KeyValueCache, RowCache | None]:
        """Views of the state, the target's and the draft's cache for the first `slots` slots."""
        if slots not in self._views:
            draft_cache = None if self.draft_cache is None else self.draft_cache.first(slots)
            self._views[slots] = self.state.first(slots), self.target_cache.first(slots), draft_cache
        return self._views[slots]

    def move(self, source: int, destination: int) -> None:
        """Copy the sequence in slot `source` to slot `destination`, with its caches."""
        for part in (self.state, self.target_cache, self.draft_cache):
            if part is not None:
                part.move(source, destination)
