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
    """The state of one request that threads share: its tokens so far, then its end, a `Completed` or an error.

    In a process forked from the one that decodes, it can be read if the request had ended before the fork; otherwise
    methods raise RuntimeError.

    logprobs:        if requested, of all tokens emitted so far
    prompt_logprobs: if requested, of the prompt's tokens; complete before the first new token
    acceptance:      counts of accepted draft tokens so far
    reused:          number of prompt tokens whose rows were copied instead of computed
    is_cancelled:    whether `cancel` was called; the decoding thread checks it before each step
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
        """Add new tokens, with their log-probabilities if requested, and wake all readers."""
        with self._lock:
            self.logprobs += logprobs
            self._tokens += tokens
            self._tell()

    def end(self, outcome: Completed | Exception) -> None:
        """Record the result, or the error that ended the request, and wake all readers. Only the first call counts."""
        with self._lock:
            self._outcome = self._outcome or outcome
            self._tell()

    def since(self, place: int) -> tuple[list[int], Completed | Exception | None]:
        """The new tokens from index `place` on, and the result or error; None in place of it before the end."""
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
        """Request that the decoding thread ends the request; False if it has ended already."""
        if self._has_ended:
            return False
        self._process.check()
        self.is_cancelled = True
        return True

    @contextmanager
    def listening(self, listener: Callable[[], object]) -> Iterator[None]:
        """A context during which the decoding thread calls `listener` after new tokens and at the end.

        `listener` must return at once, since decoding waits for it.
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
        """The lock. A forked process gets no lock, since its copy may be locked forever, and no thread writes there."""
        if self._process.is_this_one:
            return self._lock
        if not self._has_ended:
            self._process.check()
        return nullcontext()

    def _tell(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener()
