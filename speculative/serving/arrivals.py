"""Requests as they come in, and the bounded queue in which they wait for a slot."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.kernels.sequence_scores import settings_of
from heavypath.speculative.decoding.request import Request
from heavypath.speculative.serving.progress import Completed, Progress, Reason

# Greedy text is drafted at this temperature: so low that noise does not change which tokens come first, and not so low
# that the probabilities of the others vanish.
GREEDY_DRAFT = Filters(temperature=2.0**-7)


class QueueFull(RuntimeError):  # noqa: N818 - as the standard library calls its own
    """As many requests wait as may; try again later."""


class Closed(RuntimeError):  # noqa: N818
    """The service takes no requests any more."""


@dataclass(eq=False)
class Arrival:
    """A request that was checked, of one sequence.

    draft_filters: how its draft is sampled
    clock:         returns seconds
    deadline:      by that clock; None for none
    submitted, began, first: when it came, when its prompt's turn came, and when it had its first tokens
    tokens, steps: new tokens and steps so far
    stops:         tokens that end its text
    processors:    of the logits after it
    """

    request: Request
    draft_filters: Filters
    clock: Callable[[], float]
    deadline: float | None
    progress: Progress = field(default_factory=Progress)
    submitted: float = field(init=False)
    began: float | None = None
    first: float | None = None
    tokens: list[int] = field(default_factory=list)
    steps: int = 0
    has_ended: bool = False

    def __post_init__(self) -> None:
        self.submitted = self.clock()
        self.stops = frozenset(self.request.stops.tolist())
        self.processors = self.request.processors[0] if self.request.processors else []

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return self.request.prompt.shape[1]

    @property
    def left(self) -> int:
        """New tokens that may still come."""
        return self.request.max_new_tokens - len(self.tokens)

    def settings(self) -> Tensor:
        """How target and draft are sampled, fp64 [2, 4], as `kernels.sequence_scores` has it."""
        draft = self.draft_filters if self.draft_filters.temperature > 0 else GREEDY_DRAFT
        rows = [settings_of(self.request.filters), settings_of(draft)]
        return torch.tensor(rows, dtype=torch.float64, device=self.request.prompt.device)

    def interrupted(self) -> Reason | None:
        """Why it is to end at once; None if it is not."""
        if self.progress.is_cancelled:
            return "cancelled"
        if self.deadline is not None and self.clock() >= self.deadline:
            return "deadline"
        return None

    def take(self, new: list[int]) -> Reason | None:
        """Take the tokens that a step brought, and pass them on; why the text ends with them, None if it goes on."""
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
        self.progress.emit(kept)
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
                steps=self.steps,
                seconds_waiting=(now if self.began is None else self.began) - self.submitted,
                seconds_to_first=None if self.first is None else self.first - self.submitted,
                seconds=now - self.submitted,
            )
        )


class Arrivals:
    """The requests that wait for a slot, first come, first served.

    most: how many may wait
    """

    def __init__(self, most: int):
        self.most = most
        self._waiting: deque[Arrival] = deque()
        self._changed = threading.Condition()
        self._is_open = True

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_open(self) -> bool:
        """Whether requests may still come."""
        return self._is_open

    def put(self, arrival: Arrival) -> None:
        """Let a request wait. Raises QueueFull or Closed."""
        with self._changed:
            if not self._is_open:
                raise Closed("the service is closed and takes no more requests")
            if len(self._waiting) >= self.most:
                raise QueueFull(f"{self.most} requests are waiting, as many as may; try again later, or with queue=")
            self._waiting.append(arrival)
            self._changed.notify_all()

    def pop(self) -> Arrival | None:
        """The one that has waited longest, which waits no more; None where nobody waits."""
        with self._changed:
            return self._waiting.popleft() if self._waiting else None

    def interrupted(self) -> list[tuple[Arrival, Reason]]:
        """Those that are to end while they wait, which wait no more."""
        with self._changed:
            found: list[tuple[Arrival, Reason]] = []
            for each in self._waiting:
                if (reason := each.interrupted()) is not None:
                    found.append((each, reason))
            for each, _ in found:
                self._waiting.remove(each)
            return found

    def close(self) -> None:
        """Take no more."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def wake(self) -> None:
        """Have whoever waits look again."""
        with self._changed:
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait for a request, or for the end."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or not self._is_open)
