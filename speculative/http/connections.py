"""Limits of a connection: its time until a request is there, the number of connections, and their lines in the log."""

import asyncio
import logging
import resource
import time
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)
BACKLOG = 64  # connections that are accepted at a time, before any of them is looked at
MOST_PIECES, LEAST_BYTES = 4096, 64  # of a body: where there are more, they have so many bytes on average


def raise_limit_of_files() -> None:
    """Let this process open as many files as it may at all."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # where the system has a limit below that
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def most_connections(asked: int) -> int:
    """So many, or half as many as this process may have files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return asked if files == resource.RLIM_INFINITY else max(1, min(asked, files // 2))


class Pieces(h11.Connection):
    """The protocol of a connection, which refuses a body in very many very small pieces.

    Each takes some 20 microseconds of the event loop, however small it is: a megabyte by single bytes takes 20 seconds.
    """

    _count = _size = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next event."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._count = self._size = 0
        elif isinstance(event, h11.Data):
            self._count, self._size = self._count + 1, self._size + len(event.data)
            if self._count > MOST_PIECES and self._size < LEAST_BYTES * self._count:
                raise h11.RemoteProtocolError("the body comes in too many small pieces", error_status_hint=400)
        return event


class Connection(H11Protocol):
    """A connection that is closed when no request is under way on it and the next one's head takes too long.

    Where there are too many, a new one takes the place of the one that has been silent longest, or that does not read
    its answer. Only where all have work the new one itself is closed.

    head_seconds: from the first byte of a head, on a new connection from its beginning, to the last
    most:         connections at a time
    """

    head_seconds = 10.0
    most = 1000

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take it, if need be for another one."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self.conn = Pieces(h11.SERVER)
        self._since, self._late = 0.0, None
        self._watch()
        if len(self.connections) > self.most:
            there = [each for each in self.connections if isinstance(each, Connection)]
            there = [each for each in there if not each.transport.is_closing()]
            if len(there) > self.most:
                others = [each for each in there if each is not self and each.can_go]
                min(others, key=lambda each: (each.is_busy, each._since), default=self).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read on."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    @property
    def is_busy(self) -> bool:
        """True if a request is under way: from the end of its head to the end of its answer."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def can_go(self) -> bool:
        """True if nobody loses by its end: it is silent, or its client does not read."""
        return not self.is_busy or self.flow.write_paused

    def _watch(self) -> None:
        """Begin or end the time for a head. Where a connection waits for its next one, uvicorn's own time runs."""
        if self.is_busy:
            if self._late is not None:
                self._late.cancel()
                self._late = None
        elif self._late is None and not self.transport.is_closing():
            self._since = self.loop.time()
            self._late = self.loop.call_later(self.head_seconds, self.transport.abort)


class AcceptErrors:
    """An event loop's handler of errors that nobody caught: those of `accept` are one line a minute.

    Where a process has no files left, asyncio says it for each connection that waits, with a traceback.
    """

    def __init__(self, seconds: float = 60.0):
        self._seconds, self._last = seconds, float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error."""
        if not str(context.get("message")).startswith("socket.accept()"):
            loop.default_exception_handler(context)
        elif time.monotonic() >= self._last + self._seconds:
            self._last = time.monotonic()
            logger.error("connections cannot be accepted: %s", context.get("exception"))
