"""`Completion`: the state of a request, which the decoding thread writes and any number of other threads read.

The tokens are kept as long as the completion is referenced. So a slow reader delays no other request, and takes only
the memory of the request's tokens.
"""

import asyncio
import math
import os
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Literal, NamedTuple

from heavypath.speculative.serving.acceptance import Acceptance
from heavypath.speculative.serving.logprobs import TokenLogprob

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


class Process:
    """Remembers the process that created this object, to detect that it is used in one forked from it.

    A process forked from a service's has its objects, but not the thread that decodes.
    """

    def __init__(self) -> None:
        self._number = os.getpid()

    @property
    def is_this_one(self) -> bool:
        """Whether the current process created this object."""
        return os.getpid() == self._number

    def check(self) -> None:
        """Raise RuntimeError in a forked process, where waiting would never end because nothing decodes."""
        if not self.is_this_one:
            raise RuntimeError(
                f"the service decodes in process {self._number}; this is process {os.getpid()}, forked from it, in "
                "which nothing decodes: submit, wait and close there, or make a service here by decoder.serve()"
            )


class Completion:
    """A request that was submitted to a `Service`. It may be used from any thread.

        for tokens in completion: ...            # new tokens as steps produce them, in lists of one or more
        async for tokens in completion: ...      # the same in asyncio, without blocking the loop
        completion.result()                      # waits for the end; in asyncio: `await completion`

    Several readers may read it, each from the beginning. A request continues whether anybody reads it or not; `cancel`
    ends it. If an error ended it, every reader raises that error.

    seed: the seed of the request, given or chosen: submitted with this seed and otherwise equal arguments, a request
          gets the same tokens
    logprobs: log-probabilities of the new tokens so far, in order; empty if `submit` did not request them. A token that
          a reader has got has its entry
    prompt_logprobs: the same of the prompt's tokens. The list grows while the prompt is read, and is complete when the
          first new token arrives
    reused_tokens: how many prompt tokens had cache rows copied from another sequence. Final with the first new token
    is_cancelled: whether `cancel` was called; the decoding thread checks it before each step

    In a process forked from the service's, a request that has not ended raises RuntimeError instead of waiting.
    """

    def __init__(self, wake: Callable[[], object] = lambda: None, seed: int = 0):
        self.seed = seed
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.reused_tokens = 0
        self.is_cancelled = False
        self._wake = wake
        self._process = Process()
        self._lock = threading.RLock()  # used directly: Ctrl-C within Condition.__enter__ would leave it locked
        self._changed = threading.Condition(self._lock)
        self._tokens: list[int] = []
        self._acceptance = Acceptance()
        self._outcome: Completed | Exception | None = None
        self._listeners: list[Callable[[], object]] = []

    def cancel(self) -> None:
        """End the request before the next step; its tokens so far are kept. No effect if it has ended."""
        if self._outcome is None:
            self._process.check()
            self.is_cancelled = True
            self._wake()

    @property
    def acceptance(self) -> Acceptance:
        """A copy of the counts of accepted draft tokens so far."""
        return self._acceptance.copy()

    def done(self) -> bool:
        """Whether the request has ended."""
        return self.since(0)[1] is not None

    def result(self, timeout: float | None = None) -> Completed:
        """Wait for the end of the request and return its result.

        timeout: seconds to wait; None for no limit

        Raises TimeoutError if it has not ended by then, or the error that ended it.
        """
        if not self._wait(math.inf, timeout):
            raise TimeoutError(f"the request has not ended within {timeout} seconds")
        return _of(self._outcome)

    def since(self, place: int) -> tuple[list[int], Completed | Exception | None]:
        """The new tokens from index `place` on, and the result or error; None in place of it before the end."""
        with self._reading():
            return self._tokens[place:], self._outcome

    def __iter__(self) -> Iterator[list[int]]:
        place = 0
        while True:
            self._wait(place, None)
            tokens, outcome = self.since(place)
            if tokens:
                place += len(tokens)
                yield tokens
            elif outcome is not None:
                _of(outcome)
                return

    async def __aiter__(self) -> AsyncIterator[list[int]]:
        place = 0
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def tell() -> None:
            with suppress(RuntimeError):  # the loop has been closed, so nobody waits
                loop.call_soon_threadsafe(changed.set)

        with self._listening(tell):
            while True:
                changed.clear()
                tokens, outcome = self.since(place)
                if tokens:
                    place += len(tokens)
                    yield tokens
                elif outcome is not None:
                    _of(outcome)
                    return
                else:
                    await changed.wait()

    def __await__(self) -> Generator[Any, None, Completed]:
        return self._at_the_end().__await__()

    async def _at_the_end(self) -> Completed:
        async for _ in self:
            pass
        return self.result()

    def emit(self, tokens: list[int], nodes: int = 1, logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Add the new tokens of a step, and wake all readers. Called by the decoding thread.

        nodes: the number of nodes of the step's tree; logprobs: of the tokens, if requested
        """
        with self._lock:
            self._acceptance.add(len(tokens), nodes)
            self.logprobs += logprobs
            self._tokens += tokens
            self._tell()

    def end(self, outcome: Completed | Exception) -> None:
        """Record the result, or the error that ended the request, and wake all readers. Only the first call counts."""
        with self._lock:
            self._outcome = self._outcome or outcome
            self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener()

    def _wait(self, place: float, timeout: float | None) -> bool:
        """Wait until there are tokens from index `place` on, or the end; False after `timeout` seconds."""
        with self._reading():
            if self._outcome is not None:  # so that it is not waited for in a forked process
                return True

            def has_more() -> bool:
                return len(self._tokens) > place or self._outcome is not None

            return self._changed.wait_for(has_more, timeout)

    @contextmanager
    def _listening(self, listener: Callable[[], object]) -> Iterator[None]:
        """A context in which the decoding thread calls `listener`, which must return at once, after each change."""
        with self._reading():
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self._reading():
                self._listeners.remove(listener)

    def _reading(self) -> AbstractContextManager[object]:
        """The lock. A forked process gets no lock, since its copy may be locked forever, and no thread writes there."""
        if self._process.is_this_one:
            return self._lock
        if self._outcome is None:
            self._process.check()
        return nullcontext()


def _of(outcome: Completed | Exception | None) -> Completed:
    if isinstance(outcome, Completed):
        return outcome
    assert outcome is not None
    raise outcome
