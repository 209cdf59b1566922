"""A `Service` that is played: what its requests bring, and when, is up to the test.

It has the interface of `heavypath.speculative.serving.Service`, for faults on demand: a queue that is full, a text that
fails, one that waits.
"""

import asyncio
import threading
import time
from collections import deque
from contextlib import suppress

from heavypath.speculative.serving import Closed, Completed, QueueFull, ServiceStatistics


class Interrupted(Exception):  # noqa: N818
    """Why a request is to end."""


class Completion:
    """A request: `emit` and `end` are the service's, the rest its owner's."""

    def __init__(self, prompt, options):
        self.prompt, self.options = prompt, options
        self.cancelled = threading.Event()
        deadline = options.get("deadline")
        self.deadline = None if deadline is None else time.monotonic() + deadline
        self.tokens, self.steps, self.outcome = [], 0, None
        self._changed, self._tell = threading.Condition(), []
        self._begin = time.monotonic()

    def emit(self, tokens):
        """Pass tokens on; raises Interrupted where the owner wants no more."""
        if self.cancelled.is_set():
            raise Interrupted("cancelled")
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise Interrupted("deadline")
        with self._changed:
            self.steps += 1
            self.tokens += tokens
            self._notify()

    def end(self, outcome):
        with self._changed:
            if isinstance(outcome, str):
                seconds = time.monotonic() - self._begin
                outcome = Completed(self.tokens, outcome, len(self.prompt), self.steps, 0.0, 0.0, seconds)
            self.outcome = outcome
            self._notify()

    def cancel(self):
        self.cancelled.set()

    def done(self):
        return self.outcome is not None

    def result(self, timeout=None):
        with self._changed:
            if not self._changed.wait_for(self.done, timeout):
                raise TimeoutError("not yet")
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def __iter__(self):
        place = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self.tokens) > place or self.done())  # noqa: B023
                new = self.tokens[place:]
            if not new:
                self.result()
                return
            place += len(new)
            yield new

    async def __aiter__(self):
        place, loop, changed = 0, asyncio.get_running_loop(), asyncio.Event()
        with self._changed:
            self._tell.append(lambda: loop.call_soon_threadsafe(changed.set))
        while True:
            changed.clear()
            done, new = self.done(), self.tokens[place:]
            if new:
                place += len(new)
                yield new
            elif done:
                self.result()
                return
            else:
                await changed.wait()

    def _notify(self):
        self._changed.notify_all()
        for tell in self._tell:
            with suppress(RuntimeError):  # the loop has been closed, so nobody waits
                tell()


class Service:
    """play(completion): emits a request's tokens and returns why it ended, or raises."""

    def __init__(self, play, slots=1, queue=8, vocab_size=1024):
        self.play, self.slots, self.queue, self.vocab_size = play, slots, queue, vocab_size
        self.is_open = True
        self.completions, self.outcomes, self.running, self.refused = [], [], 0, 0
        self._waiting, self._changed = deque(), threading.Condition()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(slots)]
        for thread in self._threads:
            thread.start()

    def submit(self, input_ids, **options):
        if max(input_ids) >= self.vocab_size:
            raise ValueError(f"input_ids must be in 0 .. {self.vocab_size - 1}, got {max(input_ids)}")
        with self._changed:
            if not self.is_open:
                raise Closed("the service is closed")
            if len(self._waiting) >= self.queue:
                self.refused += 1
                raise QueueFull(f"{self.queue} requests are waiting")
            completion = Completion(input_ids, options)
            self.completions.append(completion)
            self._waiting.append(completion)
            self._changed.notify_all()
        return completion

    def stats(self):
        done, running, waiting = len(self.outcomes), self.running, len(self._waiting)
        return ServiceStatistics(self.slots, 1000, running, waiting, len(self.completions), done, refused=self.refused)

    def close(self, graceful=True, timeout=None):
        with self._changed:
            self.is_open = False
            if not graceful:
                for completion in self.completions:
                    completion.cancel()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.close(graceful=kind is None)

    def _run(self):
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or not self.is_open)
                if not self._waiting:
                    return
                completion = self._waiting.popleft()
                self.running += 1
            try:
                outcome = self.play(completion)
            except Interrupted as error:
                outcome = str(error)
            except Exception as error:
                outcome = error
            self.running -= 1
            self.outcomes.append(outcome if isinstance(outcome, str) else "failed")
            completion.end(outcome)
