"""Watchers, which are called at each step of a generation: streamers, stopping criteria, traces and scores."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from heavypath.speculative.decoding.request import Request
from heavypath.speculative.decoding.run import SlotNumbers, Watcher
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.decoding.step import Stepped, StepPlan
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.ranks.peers import Peers

if TYPE_CHECKING:
    from heavypath.speculative.output.scores import Chosen
    from heavypath.speculative.processors.stopping import Stopping

OnStep = Callable[[Stepped, Sequences, Sequences], None]  # called with a step's results, the state before and after


class Streamer(Protocol):
    """The methods of transformers' streamers: `put` gets the prompt, then new tokens; `end` comes last."""

    def put(self, value: Tensor) -> None: ...  # noqa: D102
    def end(self) -> None: ...  # noqa: D102


def checked_streamers(given: Streamer | Sequence[Streamer] | None, batch: int) -> list[Streamer]:
    """The streamers as a list with one for each of `batch` sequences; an empty list for None.

    Raises ValueError for another number of streamers, and TypeError for an object without `put` and `end`.
    """
    streamers = [] if given is None else list(given) if isinstance(given, Sequence) else [given]
    if given is not None and len(streamers) != batch:
        many = f"{len(streamers)} streamers" if isinstance(given, Sequence) else "one streamer"
        raise ValueError(f"streamer must be one for each sequence, got {many} for a batch of {batch}")
    for streamer in streamers:
        if not callable(getattr(streamer, "put", None)) or not callable(getattr(streamer, "end", None)):
            raise TypeError(f"streamer must have put(tokens) and end(), as transformers' have, got {streamer!r}")
    return streamers


class Streaming(Watcher):
    """Passes each sequence's tokens to its streamer: the prompt at once, new tokens after each step."""

    def __init__(self, streamers: Sequence[Streamer], request: Request):
        self._streamers = streamers
        self._given = [0] * len(streamers)
        for streamer, prompt, length in zip(streamers, request.prompt, request.lengths, strict=True):
            streamer.put(prompt[None, :length].cpu())

    def looks_at(self, state: Sequences) -> Tensor:
        """The tensor to copy to the host after each step: the new tokens of the sequences, LongTensor[B, M]."""
        return state.output[: len(self._streamers)]

    def see(self, stepped: Stepped, state: Sequences, rows: Sequence[SlotNumbers], looked: Tensor | None) -> None:
        """Called after each step: pass new tokens on, and end the streamers of sequences that have ended.

        rows: the numbers of each slot; looked: the host's copy of the new tokens
        """
        assert looked is not None
        for row in rows:
            streamer = self._streamers[row.member]
            streamer.put(looked[row.member, self._given[row.member] : row.produced].clone())
            self._given[row.member] = row.produced
            if row.left == 0:
                streamer.end()


class Criteria(Watcher):
    """Calls stopping criteria after each step. With several processes only the first one calls them."""

    waits = True

    def __init__(self, stopping: "Stopping", peers: Peers):
        self._stopping = stopping
        self._peers = peers
        self._checked: dict[int, int] = {}  # up to how many tokens each sequence has been checked

    def ends(self, rows: Sequence[SlotNumbers], state: Sequences) -> dict[int, int]:
        """For each sequence that ends now, by its index: how many of its new tokens it keeps."""

        def check() -> dict[int, int]:
            kept = {
                row.member: self._stopping.kept(
                    row.member, state.output[row.member, : row.produced], self._checked.get(row.member, 0)
                )
                for row in rows
            }
            return {member: count for member, count in kept.items() if count is not None}

        ends = self._peers.decided(check)
        self._checked |= {row.member: row.produced for row in rows}
        return ends


class Observing(Watcher):
    """Calls `observe` after each step, with the step's results and the state before and after it.

    lap: called with "trace" after that, to measure times
    """

    waits = True

    def __init__(self, observe: OnStep, lap: Callable[[str], object]):
        self._observe = observe
        self._lap = lap

    def before(self, state: Sequences) -> None:
        """Copy the state before the step."""
        self._before = replace(state, numbers=state.numbers.clone())

    def see(self, stepped: Stepped, state: Sequences, rows: Sequence[SlotNumbers], looked: Tensor | None) -> None:
        """Call the function with the results of the step, and the state before and after it."""
        self._observe(stepped, self._before.first(len(stepped.verified.length)), state)
        self._lap("trace")


@contextmanager
def watching(
    request: Request,
    plan: StepPlan,
    method: str,
    draft: Draft,
    options: Mapping[str, Any],
    lap: Callable[[str], object],
) -> Iterator[tuple[list[Watcher], "Chosen | None"]]:
    """A context with the watchers that a call of `generate` needs, and the collector of logits, None if not requested.

    method, draft: for the header of a trace
    options: those of the call (`GenerateOptions`): streamer, trace, tokenizer, output_scores, output_logits
    lap: called with the name of a phase when it ends, to measure times
    """
    streamers = checked_streamers(options.get("streamer"), len(request.prompt))
    streamers, trace = plan.peers.of_first(streamers, options.get("trace"))
    watchers: list[Watcher] = [] if request.stopping is None else [Criteria(request.stopping, plan.peers)]
    if streamers:
        with plan.peers.holding():
            watchers.append(Streaming(streamers, request))
    chosen = None
    with ExitStack() as files:
        if trace is not None:
            from heavypath.speculative.output.trace import recording

            tokenizer = options.get("tokenizer")
            recorder = files.enter_context(recording(trace, tokenizer, method, plan.rules, plan.target, draft, request))
            watchers.append(Observing(recorder.step, lap))
        if options.get("output_scores") or options.get("output_logits"):
            from heavypath.speculative.output.scores import Chosen

            chosen = Chosen(len(request.prompt))
            watchers.append(Observing(chosen.step, lap))
        yield watchers, chosen
