"""Pauses of a service: contexts in other threads during which the decoding thread stands still."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Pauses:
    """Lets other threads stop the decoding thread for a while. Pauses of several threads run one after the other.

    wake:         makes the decoding thread check whether a pause is requested
    is_impatient: whether the pausing thread wants running requests to be cancelled instead of finished
    """

    def __init__(self, wake: Callable[[], object]):
        self._wake = wake
        self._turn = threading.RLock()  # held by the thread that pauses
        self._lock = threading.RLock()  # used directly: Ctrl-C within Condition.__enter__ would leave it locked
        self._changed = threading.Condition(self._lock)
        self._owner: int | None = None
        self._stands = self._is_over = False
        self.is_impatient = False  # whether running requests are to be cancelled

    @property
    def is_asked(self) -> bool:
        """Whether a pause is requested, so that the decoding thread should call `stand` when no request is running."""
        return self._owner is not None

    @property
    def is_of_this_thread(self) -> bool:
        """Whether the calling thread is inside a pause of its own."""
        return self._owner == threading.get_ident()

    @contextmanager
    def pause(self, graceful: bool, timeout: float | None) -> Iterator[None]:
        """A context during which the decoding thread stands still, or has ended. A nested pause has no effect.

        graceful: running requests are finished first; otherwise they are cancelled
        timeout:  seconds to wait for them before they are cancelled; None for no limit
        """
        if self.is_of_this_thread:  # nested in another pause
            yield
            return
        with self._turn:
            try:
                with self._lock:
                    self._owner = threading.get_ident()
                    self.is_impatient = not graceful
                self._wake()
                if not self._wait_until_it_stands(timeout):
                    self.is_impatient = True
                    self._wait_until_it_stands(None)
                yield
            finally:
                with self._lock:
                    self._owner = None
                    self.is_impatient = False
                    self._changed.notify_all()

    def stand(self) -> None:
        """Block until no pause is requested. Called by the decoding thread, between steps."""
        with self._lock:
            self._stands = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.is_asked)
            self._stands = False

    def end(self) -> None:
        """Record that the decoding thread has ended, so that no pause waits for it any more."""
        with self._lock:
            self._is_over = True
            self._changed.notify_all()

    def _wait_until_it_stands(self, timeout: float | None) -> bool:
        with self._lock:
            return self._changed.wait_for(lambda: self._stands or self._is_over, timeout)
