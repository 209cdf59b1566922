"""The memory of decoding steps: the caches and the state of a batch, allocated once and reused by batches that fit."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from heavypath.kernels.commit import StateField
from heavypath.speculative.decoding.drafted import Lap
from heavypath.speculative.decoding.prefill import blocks_of, most_missing_first, pieces, rows_of_a_pass
from heavypath.speculative.decoding.request import Request
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.decoding.step import Step, Stepped, StepPlan
from heavypath.speculative.drafts.changes import LogitChange
from heavypath.speculative.drafts.draft import NO_DRAFT
from heavypath.speculative.models.caches import KeyValueCache, RowCache
from heavypath.speculative.models.text_cache import ModelRows, TextCache
from heavypath.speculative.names import load

logger = logging.getLogger(__name__)

Launch = Callable[[Lap], Stepped]  # runs a step in a workspace


class Size(NamedTuple):
    """The sizes that a generation needs.

    sequences:   number of sequences of the batch
    cache_rows:  rows of each sequence in each cache
    new_tokens:  the most new tokens of a sequence
    stops:       number of end-of-sequence tokens, at least 1
    count_slots: columns of `counts` in `commit`
    penalised:   1 if a repetition penalty needs the tokens seen, else 0
    """

    sequences: int
    cache_rows: int
    new_tokens: int
    stops: int
    count_slots: int
    penalised: int

    @classmethod
    def of(cls, request: Request, plan: StepPlan) -> "Size":
        """Return the size that decoding this request by this plan needs."""
        batch, width = request.prompt.shape
        penalised = 0
        if request.processing is not None and request.processing.repetition_penalty != 1:
            penalised = 1
        return cls(
            sequences=batch,
            cache_rows=width + request.max_new_tokens + plan.rows,
            new_tokens=request.max_new_tokens,
            stops=max(1, len(request.stops)),
            count_slots=plan.depth * plan.branching,
            penalised=penalised,
        )

    def covers(self, other: "Size") -> bool:
        """Whether a workspace of this size is large enough for the other size."""
        return all(have >= need for have, need in zip(self, other, strict=True))

    def rounded(self) -> "Size":
        """Round up, so that more generations fit: small numbers to powers of two, the others to multiples of 1,024."""
        return Size(
            sequences=_power_of_two(self.sequences),
            cache_rows=_multiple_of_1024(self.cache_rows),
            new_tokens=_multiple_of_1024(self.new_tokens),
            stops=_power_of_two(max(8, self.stops)),
            count_slots=_power_of_two(max(64, self.count_slots)),
            penalised=self.penalised,
        )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _multiple_of_1024(number: int) -> int:
    return math.ceil(number / 1024) * 1024


class Launcher:
    """Runs the steps of a workspace, call by call. Subclasses replay steps that they have captured or recorded.

    outlives: whether its workspace is kept for the next generation
    """

    outlives = False

    def prepare(self, step: Step, launch: Launch) -> None:
        """Compile kernels for this step without executing it; here there is nothing to compile."""

    def run(self, step: Step, slots: int, launch: Launch, lap: Lap, *, again: bool) -> Stepped:
        """Run a step in the first `slots` slots, and return its result.

        launch: runs the step call by call, with a `Lap`; lap: called with the name of each phase when it ends
        again: whether the same step is likely to run again
        """
        return launch(lap)


class Workspace:
    """The caches of a target and of a draft (if there is one), the state of the batch, and the launcher of its steps.

    order: the sequence of the request that is in each of the first slots at the beginning
    """

    def __init__(self, plan: StepPlan, size: Size, launcher: Launcher):
        target = plan.target
        draft = plan.draft
        self.size = size
        self.launcher = launcher
        self.changes: tuple[LogitChange, ...] = ()  # changes of logits that run on the host, of the current generation
        if launcher.outlives:
            self._home = torch.cuda.current_stream()
            self._left: Any = None  # the event at the end of the last generation
        self._target = target
        self._draft = draft
        self._behind = dict[int, int]()  # rows that a resting draft has read of each sequence, see `rest_or_catch_up`
        self.order: list[int] = []
        self._views = dict[int, tuple[Sequences, KeyValueCache, RowCache]]()
        self.target_cache = target.new_cache(size.sequences, size.cache_rows)
        self.draft_cache = draft.new_cache(size.sequences, size.cache_rows)
        self.state = Sequences.room_for(
            size.sequences,
            new_tokens=size.new_tokens,
            stops=size.stops,
            vocab_size=target.vocab_size * size.penalised,
            count_slots=size.count_slots,
            device=target.device,
        )
        mebibytes = self.cache_bytes / 2**20
        rows = f"{size.sequences} sequences of {size.cache_rows} rows"
        logger.debug("a workspace: %.1f MiB of caches, %s", mebibytes, rows)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Use the workspace on the current stream, for the block, after its last use on another stream.

        A generation ends while its last step is still running. So the stream that uses the workspace next waits for
        that step, and so does the stream on which the memory was allocated, since it may reuse freed memory.
        """
        stream = torch.cuda.current_stream()
        if self._left is not None:
            stream.wait_event(self._left)
        try:
            yield
        finally:
            self._left = stream.record_event()
            self._home.wait_event(self._left)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the target's and the draft's cache."""
        return self.target_cache.nbytes + self.draft_cache.nbytes

    def most_visible(self, plan: StepPlan) -> int:
        """Return the most cache rows that a prefix may have, so that there is room for a tree of the plan after it."""
        return self.size.cache_rows - plan.rows

    def fits(self, size: Size, plan: StepPlan) -> bool:
        """Whether a generation of this size, by this plan, can use the workspace."""
        same_target = plan.target is self._target
        same_draft = plan.draft is NO_DRAFT or plan.draft is self._draft
        return same_target and same_draft and self.size.covers(size)

    def begin(self, request: Request, plan: StepPlan) -> list[int]:
        """Put a request's prompts into the first slots, and prefill all tokens except the last of each.

        Returns for each slot how many tokens of the prompt the target did not compute, because their rows were in the
        request's past. (A draft that is not a model computes its rows again, which costs nothing.) Sequences with the
        most missing tokens come first, so that those with few take no part in later passes.
        """
        order = most_missing_first(request)
        *_, reused = self.beginning(request, plan, order=order)
        return reused

    def beginning(
        self, request: Request, plan: StepPlan, chunk: int | None = None, order: list[int] | None = None
    ) -> Iterator[list[int]]:
        """Do what `begin` does, piece by piece: a pass reads at most `chunk` tokens of each prompt (None for all).

        order: the sequence in each slot (default: 0, 1, ...)

        Yields the result of `begin` after each piece.
        """
        batch = len(request.prompt)
        self.order = [*range(batch)] if order is None else order
        members = torch.tensor(self.order, device=request.prompt.device)
        self._put(request, members)
        before_roots = request.prompt[members, :-1]  # [B, T]
        counts = request.lengths[members] - 1  # [B], of these tokens
        draft = plan.draft
        rests = draft is not NO_DRAFT and plan.tree.depth == 0  # such a draft reads nothing until it drafts
        self._behind = {}
        if rests:
            self._behind = dict.fromkeys(range(batch), 0)
        _, target_cache, draft_cache = self.first(batch)
        target_cache.begin(counts)
        draft_cache.begin(counts)
        inputs = request.inputs
        if before_roots.shape[1] == 0 and inputs is None:
            yield [0] * batch
            return
        ends = counts.tolist()
        parts = draft.parts(draft_cache)
        cached, in_parts = self._copy_past(request.past, before_roots, ends, parts)
        rows_of_pass = rows_of_a_pass(plan, in_one_pass=inputs is not None)
        blocks = blocks_of(ends, cached, rows_of_pass)
        reused = [*cached]
        for block in blocks:
            for slot, start in enumerate(block.starts):
                reused[slot] = min(reused[slot], start)
        if inputs is not None:
            taps = draft.taps(draft_cache)
            cached = inputs.begin(target_cache, taps, reused)
            blocks = blocks_of(ends, cached, rows_of_pass)
        for texts, starts in pieces(before_roots, blocks, chunk):
            _, in_target, in_draft = self.first(len(texts))
            taps = draft.taps(in_draft)
            self._target.prefill(texts, in_target, starts, taps)
            yield reused
        if rests:
            self._behind = dict(zip(self.order, in_parts[0], strict=True))
            yield reused
            return
        for number, (part, cache) in enumerate(parts):
            if part.overlap is None:
                part.prefill(before_roots, cache)
                continue
            piecewise: Any = part  # whose prefill takes `starts`
            blocks = blocks_of(ends, in_parts[number], rows_of_pass)
            for texts, starts in pieces(before_roots, blocks, chunk, part.overlap):
                _, _, in_draft = self.first(len(texts))
                _, in_part = draft.parts(in_draft)[number]
                piecewise.prefill(texts, in_part, starts)
                yield reused
        yield reused

    def _put(self, request: Request, members: Tensor) -> None:
        """Put a request's sequences into the first slots; members: LongTensor[B], the sequence in each slot."""
        self.state.begin(
            request.prompt[members],
            request.lengths[members],
            new_tokens=request.max_new_tokens,
            stops=request.stops,
            sequence_ids=request.sequence_ids[members],
            seed=request.seed,
            members=members,
        )
        self.changes = ()
        if request.processors is not None:
            processed = load("ProcessedSteps").of(request)
            self.changes = (processed,)

    def _copy_past(
        self, past: TextCache | None, texts: Tensor, ends: list[int], parts: Sequence[tuple[Any, Any]]
    ) -> tuple[list[int], list[list[int]]]:
        """Copy the rows that `past` has of texts LongTensor[B, T], of which the first `ends` tokens count.

        parts: those of the draft, with their caches

        Returns how many rows the target's cache then has of each text, and how many that of each part.
        """
        batch = len(texts)
        none = [0] * batch
        if past is None:
            return none, [none for _ in parts]
        shared = past.shared(texts, ends)
        lengths = shared.lengths
        in_parts = []
        for part, cache in parts:
            copied = none
            if part.forward is not None:
                copied = shared.copy_rows(part.forward, cache)
            if part.reads_target:  # a head must have cached all tokens that the target does not compute again
                lengths = [*map(min, lengths, copied)]
            in_parts.append(copied)
        _, target_cache, _ = self.first(batch)
        cached = shared.limited(lengths).copy_rows(self._target, target_cache)
        for number, (part, _) in enumerate(parts):
            if part.reads_target:  # its last entry depends on the next token, which may be another one now
                in_parts[number] = [max(0, rows - 1) for rows in cached]
        return cached, in_parts

    def rest_or_catch_up(self, request: Request, before: StepPlan, after: StepPlan, slots: int) -> None:
        """Let the draft rest, or catch up, when steps change from one plan to another; waits for the device.

        A step that drafts nothing gives the draft nothing to read. So before the first of such steps the number of
        tokens that it has read of each sequence is stored. Before the next step that drafts, it reads the tokens
        written since.

        slots: the number of running slots
        """
        drafted = before.tree.depth > 0
        drafts = after.tree.depth > 0
        if drafted and not drafts:
            self._rest(slots)
        if drafts and not drafted:
            self._catch_up(request, after, slots)

    def _rest(self, slots: int) -> None:
        """Store how many rows the draft's cache has of the sequences in the first slots.

        The cache may lack an accepted leaf, the token before the root.
        """
        numbers = self.state.numbers[:, :slots].cpu()
        lengths = numbers[StateField.LENGTHS].tolist()
        members = numbers[StateField.MEMBER].tolist()
        for member, length in zip(members, lengths, strict=True):
            self._behind[member] = max(0, length - 1)

    def _catch_up(self, request: Request, plan: StepPlan, slots: int) -> None:
        """Let the draft read the tokens before the roots of the first slots that it has not read."""
        state, _, cache = self.first(slots)
        draft = cast(Any, plan.draft)
        assert draft.can_rest
        numbers = state.numbers.cpu()
        members = numbers[StateField.MEMBER]
        lengths = self._text_lengths(request, numbers)
        cache.reads_to(lengths.to(state.root.device))
        on_device = members.to(request.prompt.device)
        texts = self._texts(request)[on_device]
        have = [self._behind.pop(member) for member in members.tolist()]
        rows_of_pass = rows_of_a_pass(plan)
        blocks = blocks_of(lengths.tolist(), have, rows_of_pass)
        for tokens, starts in pieces(texts, blocks, None):
            _, _, in_draft = self.first(len(tokens))
            draft.prefill(tokens, in_draft, starts)
        logger.debug("the draft has caught up with %d texts", slots)

    def _texts(self, request: Request) -> Tensor:
        """Return the tokens of all sequences so far, LongTensor[B, T + M]; undefined after a sequence's end."""
        new = self.state.output[: len(request.prompt)]  # [B, M]
        most = new.shape[1]
        column = torch.arange(most, device=new.device)
        position = request.lengths[:, None] + column  # [B, M], of the new tokens
        texts = pad(request.prompt, (0, most))
        return texts.scatter(1, position, new)

    def _text_lengths(self, request: Request, numbers: Tensor) -> Tensor:
        """Return the tokens before the roots in some slots, LongTensor[b] on the CPU.

        They are the lengths in the target's cache, but not more than an ended sequence has tokens: more may have been
        accepted. numbers: of these slots, on the CPU
        """
        members = numbers[StateField.MEMBER]
        prompts = request.lengths.cpu()[members]
        written = prompts + numbers[StateField.PRODUCED]
        return written.minimum(numbers[StateField.LENGTHS])

    def finish(self, request: Request, plan: StepPlan, rows: int | None = None) -> TextCache:
        """Return a decoded request's sequences, or their first `rows` tokens, with their cache rows.

        If another generation will use the same memory, the rows are copied.
        """
        draft = plan.draft
        batch = len(request.prompt)
        numbers = self.state.numbers[:, :batch].cpu()
        slots = numbers[StateField.MEMBER].argsort()
        lengths = self._text_lengths(request, numbers)[slots]
        if rows is None:
            rows = int(lengths.max())
        texts = self._texts(request)[:, :rows].cpu()  # [B, width]
        column = torch.arange(texts.shape[1], device="cpu")
        is_token = column < lengths[:, None]
        texts = texts.where(is_token, -1)

        kept = self._kept(self.target_cache, texts)
        models = [ModelRows(self._target, kept)]
        missed = 0  # rows that a resting draft lacks
        for member, read in self._behind.items():
            missed = max(missed, int(lengths[member]) - read)
        for part, cache in draft.parts(self.draft_cache):
            if part.forward is None:
                continue
            unsure = 0
            if not part.keeps_state:
                unsure = max(part.unsure_rows(plan.depth), draft.unsure_rows(plan.depth), missed)
            kept = self._kept(cache, texts)
            models.append(ModelRows(part.forward, kept, unsure))
        seen = request.inputs and request.inputs.seen
        return TextCache(texts, slots.tolist(), models, seen)

    def _kept(self, cache: RowCache, texts: Tensor) -> RowCache:
        """The cache, or a copy of the rows of texts [B, any], if another generation will use the same memory."""
        if not self.launcher.outlives:
            return cache
        sequences, width = texts.shape
        return cache.trimmed(slice(sequences), width)

    def first(self, slots: int) -> tuple[Sequences, KeyValueCache, RowCache]:
        """Return views of the state, the target's and the draft's cache for the first `slots` slots."""
        if slots not in self._views:
            state = self.state.first(slots)
            target_cache = self.target_cache.first(slots)
            draft_cache = self.draft_cache.first(slots)
            self._views[slots] = (state, target_cache, draft_cache)
        return self._views[slots]

    def swap(self, one: int, other: int, rows: int | None = None) -> None:
        """Exchange the sequences in two slots, with their first `rows` cache rows (None: all)."""
        self.state.swap(one, other)
        for cache in (self.target_cache, self.draft_cache):
            cache.swap(one, other, rows)

    def receive(self, slot: int, source: "Workspace", of: int, rows: int) -> None:
        """Copy the sequence in slot `of` of `source` (maybe this workspace) to `slot`; its caches have `rows` rows."""
        self.state.receive(slot, source.state, of)
        self.target_cache.receive(slot, source.target_cache, of, rows)
        self.draft_cache.receive(slot, source.draft_cache, of, rows)
