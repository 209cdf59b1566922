"""Progress of a request: the thread that decodes writes it, and any number of others read it.

The tokens are kept until nobody has the completion any more. So a slow reader holds up no one, and takes no more memory
than the tokens that the request may have.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, NamedTuple

from heavypath.speculative.serving.acceptance import Acceptance
from heavypath.speculative.serving.logprobs import TokenLogprob
from heavypath.speculative.serving.process import Process

Reason = Literal["stop", "length", "cancelled", "deadline"]


class Completed(NamedTuple):
    """The outcome of a request.

    tokens:           its new tokens, with the end-of-sequence token or the stop string that ended it
    reason:           "stop", by an end-of-sequence token, a stop string or a criterion; "length", with all the tokens
                      that it might have; "cancelled"; or "deadline"
    prompt_tokens:    of its prompt; reused_tokens: of these, whose rows another text had computed
    steps:            forward passes of the target over a tree of it
    seconds_waiting:  from its submission until its prompt's turn came
    seconds_to_first: from its submission to its first tokens; None where it has none
    seconds:          from its submission to its end
    """

    tokens: list[int]
    reason: Reason
    prompt_tokens: int
    steps: int
    seconds_waiting: float
    seconds_to_first: float | None
    seconds: float
    reused_tokens: int = 0


class Progress:
    """The tokens of one request, then its end: `Completed`, or the error that ended it.

    In a process forked from the one that decodes it can be read if it had ended before; else RuntimeError is raised.

    logprobs:        of its tokens, if they were asked for: of all that have been emitted
    prompt_logprobs: of its prompt's, complete before the first token
    acceptance:      of its steps so far
    reused:          tokens of its prompt that were not computed
    """

    def __init__(self) -> None:
        self._process = Process()
        self._lock = threading.RLock()  # entered by itself: Ctrl-C within Condition.__enter__ would leave it locked
        self._changed = threading.Condition(self._lock)
        self._tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.acceptance = Acceptance()
        self.reused = 0
        self._outcome: Completed | Exception | None = None
        self._listeners: list[Callable[[], object]] = []
        self.is_cancelled = False  # asked for; the thread that decodes looks at it before each step

    def emit(self, tokens: list[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Add new tokens."""
        with self._lock:
            self.logprobs += logprobs
            self._tokens += tokens
            self._tell()

    def end(self, outcome: Completed | Exception) -> None:
        """Say that no more will come; the first end counts."""
        with self._lock:
            self._outcome = self._outcome or outcome
            self._tell()

    def since(self, place: int) -> tuple[list[int], Completed | Exception | None]:
        """The tokens from a place on, and the end, if it has ended."""
        with self._reading():
            return self._tokens[place:], self._outcome

    def wait(self, place: int, timeout: float | None = None) -> bool:
        """Wait until there are tokens from a place on, or the end; False where the time, in seconds, was not enough."""
        with self._reading():
            if self._has_ended:
                return True
            return self._changed.wait_for(lambda: len(self._tokens) > place or self._has_ended, timeout)

    def wait_for_end(self, timeout: float | None = None) -> bool:
        """Wait for the end alone."""
        with self._reading():
            return self._has_ended or self._changed.wait_for(lambda: self._has_ended, timeout)

    def cancel(self) -> bool:
        """Ask for its end; False where that is over."""
        if self._has_ended:
            return False
        self._process.check()
        self.is_cancelled = True
        return True

    @contextmanager
    def listening(self, listener: Callable[[], object]) -> Iterator[None]:
        """Have a function called after each change, in the thread that decodes: it must return at once."""
        with self._reading():
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self._reading():
                self._listeners.remove(listener)

    @property
    def _has_ended(self) -> bool:
        return self._outcome is not None

    def _reading(self) -> AbstractContextManager[object]:
        """The lock. A process forked from this one may have it locked for ever, and needs none: nobody writes there."""
        if self._process.is_this_one:
            return self._lock
        if not self._has_ended:
            self._process.check()
        return nullcontext()

    def _tell(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener()
