"""A `Service` that is played: what its requests bring, and when, is up to the test, for faults on demand."""

import threading
import time
from collections import deque
from contextlib import contextmanager

import http_server

from heavypath.speculative import serving
from heavypath.speculative.serving import Closed, Completed, QueueFull, ServiceStatistics


class Interrupted(Exception):  # noqa: N818
    """Why a request is to end."""


class Completion(serving.Completion):
    """A request: `emit` is the played service's, the rest its owner's."""

    def __init__(self, prompt, options):
        super().__init__()
        self.prompt, self.options, self.steps, self._begin = prompt, options, 0, time.monotonic()

    @property
    def tokens(self):
        return self.since(0)[0]

    def emit(self, tokens, scored=()):
        """Pass tokens on, and their log-probabilities; raises Interrupted where the owner wants no more."""
        if self.is_cancelled:
            raise Interrupted("cancelled")
        if time.monotonic() > self._begin + self.options.get("deadline", 1e9):
            raise Interrupted("deadline")
        self.steps += 1
        super().emit(tokens, 0, scored)

    def end(self, outcome):
        if isinstance(outcome, str):
            seconds = time.monotonic() - self._begin
            outcome = Completed(self.tokens, outcome, len(self.prompt), self.steps, 0.0, 0.0, seconds)
        super().end(outcome)


class Service:
    """play(completion): emits a request's tokens and returns why it ended, or raises."""

    vocab_size = 1024

    def __init__(self, play, slots=1, queue=8):
        self.play, self.slots, self.queue, self.is_open = play, slots, queue, True
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

    def close(self):
        with self._changed:
            self.is_open = False
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

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


@contextmanager
def served(play, tokenizer, *, slots=1, queue=8, kind=Service, **settings):
    """A played service and the base address of a server before it, whose settings `http_server.running` has."""
    service = kind(play, slots, queue)
    try:
        with http_server.running(service, tokenizer, **settings) as base:
            yield service, base
    finally:
        for completion in service.completions:
            completion.cancel()
        service.close()


def at_once(completion):
    """A play: all its tokens in one step."""
    completion.emit([5] * completion.options["max_new_tokens"])
    return "length"


def endless(completion):
    """A play: one token after the other until it is cancelled."""
    while True:
        completion.emit([5])
        time.sleep(0.002)


class Held:
    """A play: one token, and the end when the test says so."""

    def __init__(self):
        self.go_on = threading.Event()

    def __call__(self, completion):
        completion.emit([5])
        self.go_on.wait(http_server.PATIENCE)
        completion.emit([6])
        return "length"
