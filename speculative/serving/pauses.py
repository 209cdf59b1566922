"""Pauses of a service: blocks of other threads, during which the thread that decodes stands still."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Pauses:
    """The pauses that threads ask for, one after the other.

    wake: has the thread that decodes look whether it is asked to stand
    """

    def __init__(self, wake: Callable[[], object]):
        self._wake = wake
        self._turn = threading.RLock()  # of the thread that pauses
        self._lock = threading.RLock()  # entered by itself: Ctrl-C within Condition.__enter__ would leave it locked
        self._changed = threading.Condition(self._lock)
        self._owner: int | None = None
        self._stands = self._is_over = False
        self.is_impatient = False  # what is under way is to end at once

    @property
    def is_asked(self) -> bool:
        """True if the thread that decodes is to stand when nothing is under way."""
        return self._owner is not None

    @property
    def is_of_this_thread(self) -> bool:
        """True within a pause of the thread that asks."""
        return self._owner == threading.get_ident()

    @contextmanager
    def pause(self, graceful: bool, timeout: float | None) -> Iterator[None]:
        """A block during which the thread that decodes stands, or has ended; see `Service.paused`."""
        if self.is_of_this_thread:  # a block in a block
            yield
            return
        with self._turn:
            try:
                with self._lock:
                    self._owner, self.is_impatient = threading.get_ident(), not graceful
                self._wake()
                if not self._wait_until_it_stands(timeout):
                    self.is_impatient = True
                    self._wait_until_it_stands(None)
                yield
            finally:
                with self._lock:
                    self._owner, self.is_impatient = None, False
                    self._changed.notify_all()

    def stand(self) -> None:
        """Stand until no pause is asked for: called by the thread that decodes."""
        with self._lock:
            self._stands = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.is_asked)
            self._stands = False

    def end(self) -> None:
        """Let nobody wait any more: the thread that decodes has ended."""
        with self._lock:
            self._is_over = True
            self._changed.notify_all()

    def _wait_until_it_stands(self, timeout: float | None) -> bool:
        with self._lock:
            return self._changed.wait_for(lambda: self._stands or self._is_over, timeout)
