"""Texts as they are asked for, and the bounded queue in which they wait for a slot, where clients take turns."""

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
from heavypath.speculative.serving.logprobs import logprobs_of
from heavypath.speculative.serving.prefixes import Tokens, tokens_of
from heavypath.speculative.serving.progress import Completed, Progress, Reason

# Greedy text is drafted at this temperature: so low that noise does not change which tokens come first, and not so low
# that the probabilities of the others vanish.
GREEDY_DRAFT = Filters(temperature=2.0**-7)


class QueueFull(RuntimeError):  # noqa: N818 - as the standard library calls its own
    """As many requests wait as may, of all or of one client; try again later."""


class Closed(RuntimeError):  # noqa: N818
    """The service takes no requests any more."""


class ModelChanged(RuntimeError):  # noqa: N818
    """A model was changed while a request was decoded, or cannot be decoded as it is now."""


@dataclass(eq=False)
class Arrival:
    """A request that was checked, of one sequence.

    draft_filters: how its draft is sampled
    clock:         returns seconds
    deadline:      by that clock; None for none
    logprobs, prompt_logprobs: for how many of the likeliest tokens in each place they are wanted; None for none at all
    client, group: whose it is, and which of this client's requests it belongs to; see `Arrivals`
    submitted, began, first: when it came, when its prompt's turn came, and when it had its first tokens
    tokens, steps: new tokens and steps so far
    prompt:        its tokens
    stops:         tokens that end its text
    processors:    of the logits after it
    """

    request: Request
    draft_filters: Filters
    clock: Callable[[], float]
    deadline: float | None
    client: Hashable = None
    group: Hashable = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    progress: Progress = field(default_factory=Progress)
    submitted: float = field(init=False)
    began: float | None = None
    first: float | None = None
    tokens: list[int] = field(default_factory=list)
    steps: int = 0
    has_ended: bool = False

    def __post_init__(self) -> None:
        self.submitted = self.clock()
        self.prompt = tokens_of(self.request.prompt[0].tolist())
        self.stops = frozenset(self.request.stops.tolist())
        self.processors = self.request.processors[0] if self.request.processors else []

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return self.request.prompt.shape[1]

    @property
    def text(self) -> Tokens:
        """The prompt and its new tokens so far."""
        return np.concatenate([self.prompt, tokens_of(self.tokens)])

    @property
    def left(self) -> int:
        """New tokens that may still come."""
        return self.request.max_new_tokens - len(self.tokens)

    def settings(self) -> Tensor:
        """The sampling of target and draft, fp64 [2, 4], as `kernels.sequence_scores` has it."""
        draft = self.draft_filters if self.draft_filters.temperature > 0 else GREEDY_DRAFT
        rows = [settings_of(self.request.filters), settings_of(draft)]
        return torch.tensor(rows, dtype=torch.float64, device=self.request.prompt.device)

    def interrupted(self) -> Reason | None:
        """The reason why it is to end at once; None if there is none."""
        if self.progress.is_cancelled:
            return "cancelled"
        if self.deadline is not None and self.clock() >= self.deadline:
            return "deadline"
        return None

    def take(self, new: list[int], nodes: int, logits: Callable[[int], Tensor] | None) -> Reason | None:
        """Take the tokens that a step brought, and pass them on; why the text ends with them, None if it goes on.

        nodes: of the step's tree; logits: called with a number of tokens, gives the logits that these were chosen by
        """
        before = len(self.tokens)
        end = next((place for place, token in enumerate(new, 1) if token in self.stops), None)
        kept = new[:end]
        if self.request.stopping is not None:
            text = torch.tensor(self.tokens + kept, device=self.request.prompt.device)
            stopped = self.request.stopping.kept(0, text, before)
            if stopped is not None:
                kept, end = kept[: stopped - before], stopped - before
        if kept and self.first is None:
            self.first = self.clock()
        self.tokens += kept
        self.progress.acceptance.add(len(kept), nodes)
        if logits is None or self.logprobs is None or not kept:
            self.progress.emit(kept)
        else:
            self.progress.emit(kept, logprobs_of(logits(len(kept)), kept, self.logprobs))
        return "stop" if end is not None else "length" if self.left == 0 else None

    def end(self, outcome: Reason | Exception) -> None:
        """End it."""
        self.has_ended, now = True, self.clock()
        if isinstance(outcome, Exception):
            self.progress.end(outcome)
            return
        self.progress.end(
            Completed(
                tokens=list(self.tokens),
                reason=outcome,
                prompt_tokens=self.prompt_length,
                reused_tokens=self.progress.reused,
                steps=self.steps,
                seconds_waiting=(now if self.began is None else self.began) - self.submitted,
                seconds_to_first=None if self.first is None else self.first - self.submitted,
                seconds=now - self.submitted,
            )
        )


class Arrivals:
    """The texts that wait for a slot. Clients take turns, and so do a client's requests; a request's texts keep order.

    A client may fill half of the queue, so that there is room for others; what is nobody's, client None, may fill all
    of it. Where all is of one client and one request, it is first come, first served.

    most: how many may wait
    """

    def __init__(self, most: int):
        self.most = most
        self._waiting: dict[Hashable, dict[Hashable, deque[Arrival]]] = {}  # whose turn is next comes first
        self._count = 0
        self._lock = threading.RLock()  # entered by itself: Ctrl-C within Condition.__enter__ would leave it locked
        self._changed = threading.Condition(self._lock)
        self._is_open = True
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return self._count

    @property
    def is_open(self) -> bool:
        """True if requests may still come."""
        return self._is_open

    def check_open(self) -> None:
        """Raise Closed, from the error that was its end if there was one."""
        if not self._is_open:
            ended = "" if self._error is None else f"; it has ended by an error: {self._error}"
            raise Closed(f"the service is closed and takes no more requests{ended}") from self._error

    def put(self, arrival: Arrival) -> None:
        """Let a request wait. Raises QueueFull or Closed."""
        with self._lock:
            self.check_open()
            if self._count >= self.most and _going_on(self._all()) >= self.most:
                raise QueueFull(f"{self.most} requests are waiting, as many as may; try again later, or with queue=")
            client, share = arrival.client, max(1, self.most // 2)
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
        """The one whose turn it is, which waits no more; None where nobody waits whose client may, or it does not fit.

        may: called with a client and all who wait; fits: with the one whose turn it is
        """
        with self._lock:
            client = next((each for each in self._waiting if may(each, self._waiting)), _NOBODY)
            if client is _NOBODY:
                return None
            group, texts = next(iter(self._waiting[client].items()))
            if not fits(texts[0]):
                return None
            requests = self._waiting.pop(client)  # to be put back after the others
            del requests[group]
            arrival = texts.popleft()
            if texts:
                requests[group] = texts
            if requests:
                self._waiting[client] = requests
            self._count -= 1
            return arrival

    def interrupted(self) -> list[tuple[Arrival, Reason]]:
        """The requests that are to end while they wait, which wait no more."""
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
        """Take no more; error: why, if that was one."""
        with self._lock:
            self._is_open, self._error = False, self._error or error
            self._changed.notify_all()

    def wake(self) -> None:
        """Have whoever waits look again."""
        with self._lock:
            self._changed.notify_all()

    def wait(self, over: Callable[[], bool] = lambda: False) -> None:
        """Wait for a request, for the end, or until something is over, which `wake` has it look at."""
        with self._lock:
            self._changed.wait_for(lambda: self._count > 0 or not self._is_open or over())

    def _all(self) -> Iterator[Arrival]:
        return (each for requests in self._waiting.values() for texts in requests.values() for each in texts)


_NOBODY = object()


def _going_on(arrivals: Iterator[Arrival]) -> int:
    """The number not cancelled: the others' places are free, also before the thread that decodes has seen them."""
    return sum(not each.progress.is_cancelled for each in arrivals)
