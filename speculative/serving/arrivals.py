"""Submitted requests, and the bounded queue in which they wait for a slot. Clients take turns."""

import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.kernels.sequence_scores import settings_of
from heavypath.speculative.decoding.request import Request
from heavypath.speculative.decoding.run import SlotNumbers
from heavypath.speculative.serving.completion import Completed, Completion, Reason
from heavypath.speculative.serving.logprobs import logprobs_of
from heavypath.speculative.serving.prefixes import Tokens, tokens_of

# Greedy requests are drafted at this temperature. It is low enough that noise does not change the order of the
# likeliest tokens, and high enough that the probabilities of other tokens do not underflow.
GREEDY_DRAFT = Filters(temperature=2.0**-7)


class QueueFull(RuntimeError):  # noqa: N818 - as the standard library calls its own
    """Raised by `submit`: the queue, or the client's share of it, is full. Try again later."""


class Closed(RuntimeError):  # noqa: N818
    """Raised by `submit`: the service takes no more requests, because it was closed or an error has ended it."""


class ModelChanged(RuntimeError):  # noqa: N818
    """The error of a request whose target was changed while it was decoded, or whose models cannot be decoded now."""


@dataclass(eq=False)
class Arrival:
    """A checked request for one sequence, from its submission to its end: what was requested, and how far it is.

    draft_filters: temperature and filters by which the draft is sampled for it
    clock:         returns the time in seconds
    deadline:      the value of `clock` from which the request is ended; None for no limit
    client, group: who submitted it, and which of the client's groups it belongs to; clients and groups take turns
    logprobs, prompt_logprobs: how many of the likeliest tokens to report at each position, in addition to the token
                               itself; None for no log-probabilities
    completion:    what other threads read: tokens, log-probabilities, the end
    submitted, began, first: values of `clock` at submission, when its prompt's turn came, and at its first new tokens;
                             None before that
    tokens, steps: new tokens so far, and the number of steps that it took part in
    row:           in a slot, the row of `Sequences.output` to which steps write its new tokens
    seen, nodes:   how many tokens steps have produced for it, and how many tree nodes the target has scored
    prompt:        its tokens, int64 [T]
    stops:         end-of-sequence tokens
    processors:    its logits processors
    """

    request: Request
    draft_filters: Filters
    clock: Callable[[], float]
    deadline: float | None
    client: Hashable = None
    group: Hashable = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    completion: Completion = field(default_factory=Completion)
    submitted: float = field(init=False)
    began: float | None = None
    first: float | None = None
    tokens: list[int] = field(default_factory=list)
    steps: int = 0
    row: int = -1
    seen: int = 0
    nodes: int = 0
    has_ended: bool = False

    def __post_init__(self) -> None:
        self.submitted = self.clock()
        self.prompt = tokens_of(self.request.prompt[0].tolist())
        self.stops = frozenset(self.request.stops.tolist())
        self.processors = self.request.processors[0] if self.request.processors else []

    @property
    def prompt_length(self) -> int:
        """The number of tokens of the prompt."""
        return self.request.prompt.shape[1]

    @property
    def text(self) -> Tokens:
        """The prompt and the new tokens so far, int64 [T + new]."""
        return np.concatenate([self.prompt, tokens_of(self.tokens)])

    @property
    def left(self) -> int:
        """How many new tokens may still come."""
        return self.request.max_new_tokens - len(self.tokens)

    def settings(self) -> Tensor:
        """The sampling settings, fp64 [2, 4]: the target's, then the draft's, as `settings_of` makes them from filters.

        A draft of temperature 0 gets those of `GREEDY_DRAFT`.
        """
        draft = self.draft_filters if self.draft_filters.temperature > 0 else GREEDY_DRAFT
        rows = [settings_of(self.request.filters), settings_of(draft)]
        return torch.tensor(rows, dtype=torch.float64, device=self.request.prompt.device)

    def interrupted(self) -> Reason | None:
        """Why the request has to end before its next step: "cancelled" or "deadline"; None if it may continue."""
        if self.completion.is_cancelled:
            return "cancelled"
        if self.deadline is not None and self.clock() >= self.deadline:
            return "deadline"
        return None

    def take(
        self, numbers: SlotNumbers, output: Tensor, logits: Callable[[int], Tensor] | None
    ) -> Reason | Exception | None:
        """Add the tokens of a step and pass them to readers. Returns why the sequence ends, or None if it continues.

        Tokens after an end-of-sequence token, or after what `request.stopping` recognises, are dropped.

        numbers: counts of its slot after the step; an error of the step is returned as an exception
        output:  LongTensor [slots, any] on the host: all new tokens of each row
        logits:  given n, returns the target's logits [n, V] that chose the step's first n tokens; None for no logprobs
        """
        if numbers.left < 0:
            return numbers.error("")
        new = output[self.row, self.seen : numbers.produced].tolist()
        nodes = numbers.nodes - self.nodes
        self.nodes = numbers.nodes
        self.seen = numbers.produced
        self.steps = numbers.steps
        before = len(self.tokens)
        end = next((place for place, token in enumerate(new, 1) if token in self.stops), None)
        kept = new[:end]
        if self.request.stopping is not None:
            text = torch.tensor(self.tokens + kept, device=self.request.prompt.device)
            stopped = self.request.stopping.kept(0, text, before)
            if stopped is not None:
                kept = kept[: stopped - before]
                end = stopped - before
        if kept and self.first is None:
            self.first = self.clock()
        self.tokens += kept
        scored = []
        if logits is not None and self.logprobs is not None and kept:
            scored = logprobs_of(logits(len(kept)), kept, self.logprobs)
        self.completion.emit(kept, nodes, scored)
        return "stop" if end is not None else "length" if self.left == 0 else None

    def end(self, outcome: Reason | Exception) -> None:
        """End the request: pass to its readers a `Completed` with the reason, or an error, which they raise."""
        self.has_ended, now = True, self.clock()
        if isinstance(outcome, Exception):
            self.completion.end(outcome)
            return
        self.completion.end(
            Completed(
                tokens=list(self.tokens),
                reason=outcome,
                prompt_tokens=self.prompt_length,
                reused_tokens=self.completion.reused_tokens,
                steps=self.steps,
                seconds_waiting=(now if self.began is None else self.began) - self.submitted,
                seconds_to_first=None if self.first is None else self.first - self.submitted,
                seconds=now - self.submitted,
            )
        )


class Arrivals:
    """The bounded queue of requests that wait for a slot. It may be used from several threads.

    Clients take turns, a client's groups take turns, and the requests of a group are served in order of submission.
    With one client and one group this is first come, first served.

    A client may fill half of the queue, so that others have room. Requests without a client (None) may fill all of it.

    most: how many requests may wait
    """

    def __init__(self, most: int):
        self.most = most
        self._waiting: dict[Hashable, dict[Hashable, deque[Arrival]]] = {}  # by client and group, the next one first
        self._count = 0
        self._lock = threading.RLock()  # used directly: Ctrl-C within Condition.__enter__ would leave it locked
        self._changed = threading.Condition(self._lock)
        self._is_open = True
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return self._count

    @property
    def is_open(self) -> bool:
        """Whether new requests are accepted."""
        return self._is_open

    def check_open(self) -> None:
        """Raise Closed if the service is closed, with the error that ended it as the cause, if there was one."""
        if not self._is_open:
            ended = "" if self._error is None else f"; it has ended by an error: {self._error}"
            raise Closed(f"the service is closed and takes no more requests{ended}") from self._error

    def put(self, arrival: Arrival) -> None:
        """Add a request.

        Raises QueueFull if the queue is full or requests of this client fill half of it, and Closed after `close`.
        """
        with self._lock:
            self.check_open()
            if self._count >= self.most and _going_on(self._all()) >= self.most:
                raise QueueFull(f"{self.most} requests are waiting, as many as may; try again later, or with queue=")
            client = arrival.client
            share = max(1, self.most // 2)
            requests = self._waiting.get(client, {})
            if client is not None and _going_on(each for texts in requests.values() for each in texts) >= share:
                raise QueueFull(f"{share} requests of this client are waiting, as many as may of one; try again later")
            self._waiting.setdefault(client, requests).setdefault(arrival.group, deque()).append(arrival)
            self._count += 1
            self._changed.notify_all()

    def pop(
        self,
        may: Callable[[Hashable, Collection[Hashable]], bool] = lambda *_: True,
        fits: Callable[[Arrival], bool] = lambda _: True,
    ) -> Arrival | None:
        """Remove and return the next request of the first client that `may`; None if there is none or it does not fit.

        may:  given a client and all clients with waiting requests, whether the client's turn may come now
        fits: given the request whose turn it is, whether it can be taken now; if not, no other is tried
        """
        with self._lock:
            client = next((each for each in self._waiting if may(each, self._waiting)), _NOBODY)
            if client is _NOBODY:
                return None
            group, texts = next(iter(self._waiting[client].items()))
            if not fits(texts[0]):
                return None
            requests = self._waiting.pop(client)  # put back at the end
            del requests[group]
            arrival = texts.popleft()
            if texts:
                requests[group] = texts
            if requests:
                self._waiting[client] = requests
            self._count -= 1
            return arrival

    def interrupted(self) -> list[tuple[Arrival, Reason]]:
        """Remove and return the waiting requests that are cancelled or past their deadline, with the reasons."""
        with self._lock:
            found: list[tuple[Arrival, Reason]] = []
            for each in self._all():
                if (reason := each.interrupted()) is not None:
                    found.append((each, reason))
            for each, _ in found:
                requests = self._waiting[each.client]
                requests[each.group].remove(each)
                if not requests[each.group]:
                    del requests[each.group]
                if not requests:
                    del self._waiting[each.client]
            self._count -= len(found)
            return found

    def close(self, error: BaseException | None = None) -> None:
        """Accept no more requests, and wake threads in `wait`. error: the cause that `check_open` reports, if any."""
        with self._lock:
            self._is_open = False
            self._error = self._error or error
            self._changed.notify_all()

    def wake(self) -> None:
        """Make a waiting thread check its condition again."""
        with self._lock:
            self._changed.notify_all()

    def wait(self, over: Callable[[], bool] = lambda: False) -> None:
        """Block until a request waits, the queue is closed, or `over()` is true; `wake` makes it call `over` again."""
        with self._lock:
            self._changed.wait_for(lambda: self._count > 0 or not self._is_open or over())

    def _all(self) -> Iterator[Arrival]:
        return (each for requests in self._waiting.values() for texts in requests.values() for each in texts)


_NOBODY = object()


def _going_on(arrivals: Iterator[Arrival]) -> int:
    """The number of requests that are not cancelled. A cancelled request no longer takes up room in the queue."""
    return sum(not each.completion.is_cancelled for each in arrivals)
