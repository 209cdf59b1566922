"""Measure by CUDA events how long a GPU copied weights, and how long it waited for them.

Events recorded in a CUDA graph have no times, so only the bytes of copies by graphs are known.
"""

from collections import deque
from typing import Any

from heavypath.speculative.models.layer_weights import StreamCounts

Span = tuple[Any, Any]  # two events on one CUDA stream, before and after something
MOST = 512  # how many spans are kept before those that have passed are added up


class _Spans:
    """Sums the seconds between pairs of CUDA events. Pairs that have passed are added up and dropped."""

    def __init__(self) -> None:
        self._open = deque[Span]()
        self._seconds = 0.0

    def note(self, span: Span) -> None:
        self._open.append(span)
        if len(self._open) >= MOST:
            self._add_up()

    def seconds(self) -> float:
        """The seconds of all spans. This waits for the last one."""
        if self._open:
            self._open[-1][1].synchronize()
        self._add_up()
        return self._seconds

    def _add_up(self) -> None:
        while self._open and self._open[0][1].query():
            begin, end = self._open.popleft()
            self._seconds += begin.elapsed_time(end) / 1e3


class DeviceTally:
    """Counts the bytes copied to a GPU, and measures how long copies took and how long the GPU waited for them."""

    def __init__(self) -> None:
        self._bytes = self._untimed = 0
        self._copying = _Spans()
        self._waiting = _Spans()

    def copied(self, nbytes: int, span: Span) -> None:
        """Add a copy of `nbytes` bytes. span: the events before and after it."""
        self._bytes += nbytes
        self._copying.note(span)

    def waited(self, span: Span) -> None:
        """Add a wait for a copy, which may have been short. span: the events before and after it."""
        self._waiting.note(span)

    def launched(self, nbytes: int) -> None:
        """Add the launch of a CUDA graph that copies `nbytes` bytes, whose time is not known."""
        self._bytes += nbytes
        self._untimed += nbytes

    def counts(self) -> StreamCounts:
        """The counts and times so far. This waits for the GPU."""
        return StreamCounts(self._bytes, self._copying.seconds(), self._waiting.seconds(), self._untimed)
