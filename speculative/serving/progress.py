"""The state of a request, which the decoding thread writes and any number of other threads read.

The tokens are kept as long as the completion is referenced. So a slow reader delays no other request, and takes only
the memory of the request's tokens.
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
    """The result of a request.

    tokens:           its new tokens, including the end-of-sequence token or the stop string that ended it
    reason:           "stop": an end-of-sequence token, a stop string or a criterion; "length": max_new_tokens reached;
                      "cancelled"; or "deadline"
    prompt_tokens:    tokens of its prompt; reused_tokens: how many of them reused rows of another sequence
    steps:            forward passes of the target over a tree of this request
    seconds_waiting:  from submission until its prompt's turn came
    seconds_to_first: from submission to its first tokens; None if it has none
    seconds:          from submission to its end
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

    In a process forked from the one that decodes it can be read if it had ended before; otherwise RuntimeError is
    raised.

    logprobs:        if requested, for all tokens emitted so far
    prompt_logprobs: if requested, for the prompt's tokens; complete before the first new token
    acceptance:      counts of its steps so far
    reused:          prompt tokens that were not computed
    """

    def __init__(self) -> None:
        self._process = Process()
        self._lock = threading.RLock()  # used directly: Ctrl-C within Condition.__enter__ would leave it locked
        self._changed = threading.Condition(self._lock)
        self._tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.acceptance = Acceptance()
        self.reused = 0
        self._outcome: Completed | Exception | None = None
        self._listeners: list[Callable[[], object]] = []
        self.is_cancelled = False  # requested; the decoding thread checks it before each step

    def emit(self, tokens: list[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Add new tokens."""
        with self._lock:
            self.logprobs += logprobs
            self._tokens += tokens
            self._tell()

    def end(self, outcome: Completed | Exception) -> None:
        """Record the end. If it is called again, the first end counts."""
        with self._lock:
            self._outcome = self._outcome or outcome
            self._tell()

    def since(self, place: int) -> tuple[list[int], Completed | Exception | None]:
        """The tokens from an index on; and the end, or None if there is none yet."""
        with self._reading():
            return self._tokens[place:], self._outcome

    def wait(self, place: int, timeout: float | None = None) -> bool:
        """Wait until there are tokens from index `place` on, or the end; False after `timeout` seconds."""
        with self._reading():
            if self._has_ended:
                return True
            return self._changed.wait_for(lambda: len(self._tokens) > place or self._has_ended, timeout)

    def wait_for_end(self, timeout: float | None = None) -> bool:
        """Wait for the end; False after `timeout` seconds."""
        with self._reading():
            return self._has_ended or self._changed.wait_for(lambda: self._has_ended, timeout)

    def cancel(self) -> bool:
        """Request its end; False if it has ended already."""
        if self._has_ended:
            return False
        self._process.check()
        self.is_cancelled = True
        return True

    @contextmanager
    def listening(self, listener: Callable[[], object]) -> Iterator[None]:
        """A context during which `listener` is called after each change, by the decoding thread.

        It must return at once.
        """
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
        """The lock. A forked process gets none: its copy may be locked forever, and nobody writes there."""
        if self._process.is_this_one:
            return self._lock
        if not self._has_ended:
            self._process.check()
        return nullcontext()

    def _tell(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener()
