"""`Completion`: what `Service.submit` returns, to read the tokens of a request or to cancel it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import suppress
from typing import Any

from heavypath.speculative.serving.acceptance import Acceptance
from heavypath.speculative.serving.logprobs import TokenLogprob
from heavypath.speculative.serving.progress import Completed, Progress


class Completion:
    """A request that was submitted to a `Service`. It may be used from any thread.

        for tokens in completion: ...            # new tokens as steps produce them, in lists of one or more
        async for tokens in completion: ...      # the same in asyncio, without blocking the loop
        completion.result()                      # waits for the end; in asyncio: `await completion`

    Several readers may read it, each from the beginning. A request continues whether anybody reads it or not; `cancel`
    ends it. If an error ended it, every reader raises that error.

    seed: the seed of the request, given or chosen: submitted with this seed and otherwise equal arguments, a request
          gets the same tokens

    In a process forked from the service's, a request that has not ended raises RuntimeError instead of waiting.
    """

    def __init__(self, progress: Progress, wake: Callable[[], object], seed: int = 0):
        self._progress = progress
        self._wake = wake
        self.seed = seed

    def cancel(self) -> None:
        """End the request before the next step; its tokens so far are kept. No effect if it has ended."""
        if self._progress.cancel():
            self._wake()

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of the new tokens so far, in order; empty if `submit` did not request them.

        A token that a reader has got has its entry.
        """
        return self._progress.logprobs

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of the prompt's tokens, in order; empty if `submit` did not request them.

        The list grows while the prompt is read, and is complete when the first new token arrives.
        """
        return self._progress.prompt_logprobs

    @property
    def reused_tokens(self) -> int:
        """How many prompt tokens had cache rows copied from another sequence. Final with the first new token."""
        return self._progress.reused

    @property
    def acceptance(self) -> Acceptance:
        """A copy of the counts of accepted draft tokens so far."""
        return self._progress.acceptance.copy()

    def done(self) -> bool:
        """Whether the request has ended."""
        return self._progress.since(0)[1] is not None

    def result(self, timeout: float | None = None) -> Completed:
        """Wait for the end of the request and return its result.

        timeout: seconds to wait; None for no limit

        Raises TimeoutError if it has not ended by then, or the error that ended it.
        """
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
        place = 0
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

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
