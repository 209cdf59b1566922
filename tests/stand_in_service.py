"""A `Service` that is played: what its requests bring, and when, is up to the test.

It keeps to the interface of `heavypath.speculative.serving`, and answers faults on demand: a queue that is full, a text
that fails, one that waits. `decoding(decoder)` is what a request brings by the decoder's own `generate`.
"""

import asyncio
import sys
import threading
import time
import types
from collections import deque
from typing import NamedTuple

import torch


class QueueFull(RuntimeError):
    pass


class Closed(RuntimeError):
    pass


class Cancelled(Exception):
    pass


class Completed(NamedTuple):
    tokens: list
    reason: str
    prompt_tokens: int
    steps: int
    seconds_waiting: float
    seconds_to_first: float | None
    seconds: float


class Statistics(NamedTuple):
    slots: int
    cache_bytes: int
    running: int
    waiting: int
    submitted: int
    completed: int
    cancelled: int
    expired: int
    failed: int
    refused: int
    prompt_tokens: int
    new_tokens: int
    steps: int
    seconds_busy: float
    tokens_per_step: float


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
        """Pass tokens on; raises Cancelled where the owner wants no more."""
        if self.cancelled.is_set():
            raise Cancelled("cancelled")
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise Cancelled("deadline")
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
            tell()


class Service:
    """play(completion): emits a request's tokens and returns why it ended, or raises."""

    def __init__(self, play, slots=1, queue=8, vocab_size=1024):
        self.play, self.slots, self.queue, self.vocab_size = play, slots, queue, vocab_size
        self.closed = False
        self.completions, self.outcomes, self.running, self.refused = [], [], 0, 0
        self._waiting, self._changed = deque(), threading.Condition()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(slots)]
        for thread in self._threads:
            thread.start()

    def submit(self, input_ids, **options):
        if max(input_ids) >= self.vocab_size:
            raise ValueError(f"input_ids must be in 0 .. {self.vocab_size - 1}, got {max(input_ids)}")
        with self._changed:
            if self.closed:
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
        tokens, steps = (sum(each) for each in zip(*((len(c.tokens), c.steps) for c in self.completions), (0, 0)))
        counts = [self.outcomes.count(name) for name in ("cancelled", "deadline", "failed")]
        return Statistics(
            self.slots, 1000, self.running, len(self._waiting), len(self.completions),
            len(self.outcomes) - sum(counts), *counts, self.refused,
            sum(len(c.prompt) for c in self.completions), tokens, steps, 1.0, tokens / max(1, steps),
        )  # fmt: skip

    def close(self, graceful=True, timeout=None):
        with self._changed:
            self.closed = True
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
                self._changed.wait_for(lambda: self._waiting or self.closed)
                if not self._waiting:
                    return
                completion = self._waiting.popleft()
                self.running += 1
            try:
                outcome = self.play(completion)
            except Cancelled as error:
                outcome = str(error)
            except Exception as error:
                outcome = error
            self.running -= 1
            self.outcomes.append(outcome if isinstance(outcome, str) else "failed")
            completion.end(outcome)


def decoding(decoder, seed=0):
    """What requests bring by `generate`."""

    class Emitting:
        def __init__(self, completion):
            self.completion, self.begun = completion, False

        def put(self, value):
            if self.begun and value.numel():
                self.completion.emit(value.flatten().tolist())
            self.begun = True

        def end(self):
            pass

    def play(completion):
        options = {name: value for name, value in completion.options.items() if name not in ("deadline", "seed")}
        name = completion.options.get("seed") or 0
        decoder.generate(
            torch.tensor([completion.prompt]),
            seed=seed,
            sequence_ids=torch.tensor([name]),
            streamer=Emitting(completion),
            **options,
        )
        return "length" if len(completion.tokens) == options["max_new_tokens"] else "stop"

    return play


def install():
    """Put this in the place of `heavypath.speculative.serving`, where that is not there yet."""
    try:
        import heavypath.speculative.serving  # noqa: F401
    except ModuleNotFoundError:
        from heavypath.speculative import SpeculativeDecoder

        module = types.ModuleType("heavypath.speculative.serving")
        vars(module).update(QueueFull=QueueFull, Closed=Closed, Completion=Completion, Service=Service)
        sys.modules[module.__name__] = module

        def serve(self, slots=8, *, max_tokens=2048, queue=64, seed=0):
            return Service(decoding(self, seed), 1, queue)

        SpeculativeDecoder.serve = serve
