"""`Completion`: what the owner of a request has in hand."""

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import suppress
from typing import Any

from heavypath.speculative.serving.acceptance import Acceptance
from heavypath.speculative.serving.logprobs import TokenLogprob
from heavypath.speculative.serving.progress import Completed, Progress


class Completion:
    """A request that was submitted to a `Service`, from any thread.

        for tokens in completion: ...            # new tokens, as steps bring them: lists of one or more
        async for tokens in completion: ...      # the same in asyncio, whose loop goes on meanwhile
        completion.result()                      # waits for the end; `await completion` in asyncio

    It may be read by several, each from the beginning. A request goes on whether anybody reads it or not; `cancel` ends
    it. What ended it, if that was an error, is raised to all who read it.

    seed: the name of its random numbers: another request with this seed and all else alike gets the same text

    In a process that was forked from the service's, one that has not ended raises RuntimeError where it would wait.
    """

    def __init__(self, progress: Progress, wake: Callable[[], object], seed: int = 0):
        self._progress, self._wake, self.seed = progress, wake, seed

    def cancel(self) -> None:
        """End it before the next step; the tokens that it has stay. Without effect on one that has ended."""
        if self._progress.cancel():
            self._wake()

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Of its tokens so far, if `submit` was asked for them: of no fewer than have been read."""
        return self._progress.logprobs

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        """Of its prompt's tokens, once there is a new one, if `submit` was asked for them."""
        return self._progress.prompt_logprobs

    @property
    def reused_tokens(self) -> int:
        """Tokens of its prompt whose rows another text had computed, once there is a new token."""
        return self._progress.reused

    @property
    def acceptance(self) -> Acceptance:
        """Counts of what its steps have accepted so far."""
        return self._progress.acceptance.copy()

    def done(self) -> bool:
        """True if it has ended."""
        return self._progress.since(0)[1] is not None

    def result(self, timeout: float | None = None) -> Completed:
        """Wait for the end, at most `timeout` seconds. Raises TimeoutError then, or the error that ended it."""
        if not self._progress.wait_for_end(timeout):
            raise TimeoutError(f"the request has not ended within {timeout} seconds")
        return _of(self._progress.since(0)[1])

    def __iter__(self) -> Iterator[list[int]]:
        place = 0
        while True:
            self._progress.wait(place)
            tokens, outcome = self._progress.since(place)
            if tokens:
                place += len(tokens)
                yield tokens
            elif outcome is not None:
                _of(outcome)
                return

    async def __aiter__(self) -> AsyncIterator[list[int]]:
        place, loop, changed = 0, asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with suppress(RuntimeError):  # the loop has been closed, so nobody waits
                loop.call_soon_threadsafe(changed.set)

        with self._progress.listening(tell):
            while True:
                changed.clear()
                tokens, outcome = self._progress.since(place)
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


def _of(outcome: Completed | Exception | None) -> Completed:
    if isinstance(outcome, Completed):
        return outcome
    assert outcome is not None
    raise outcome
