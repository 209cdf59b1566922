"""Times in which a GPU copied weights, and waited for them: by CUDA events, which the host reads when they have passed.

Events that a CUDA graph records tell no times, so for copies by graphs only the bytes are known.
"""

from collections import deque
from typing import Any

from heavypath.speculative.models.layer_weights import StreamCounts

Span = tuple[Any, Any]  # what lies between two events on one CUDA stream
MOST = 512  # spans that are kept before those that have passed are added up


class _Spans:
    """Spans of time, and the seconds of those that have been added up."""

    def __init__(self) -> None:
        self._open = deque[Span]()
        self._seconds = 0.0

    def note(self, span: Span) -> None:
        self._open.append(span)
        if len(self._open) >= MOST:
            self._add_up()

    def seconds(self) -> float:
        """Of all spans; it waits for the last one."""
        if self._open:
            self._open[-1][1].synchronize()
        self._add_up()
        return self._seconds

    def _add_up(self) -> None:
        while self._open and self._open[0][1].query():
            begin, end = self._open.popleft()
            self._seconds += begin.elapsed_time(end) / 1e3


class DeviceTally:
    """The copies so far."""

    def __init__(self) -> None:
        self._bytes = self._untimed = 0
        self._copying, self._waiting = _Spans(), _Spans()

    def copied(self, nbytes: int, span: Span) -> None:
        """Note a copy."""
        self._bytes += nbytes
        self._copying.note(span)

    def waited(self, span: Span) -> None:
        """Note what may have been a wait for a copy."""
        self._waiting.note(span)

    def launched(self, nbytes: int) -> None:
        """Note a graph that copies so many bytes."""
        self._bytes += nbytes
        self._untimed += nbytes

    def counts(self) -> StreamCounts:
        """All of it; this waits for the GPU."""
        return StreamCounts(self._bytes, self._copying.seconds(), self._waiting.seconds(), self._untimed)
