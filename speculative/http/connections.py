"""Limits of connections: time until a request's header is complete, number of connections, and their log messages."""

import asyncio
import logging
import resource
import time
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)
BACKLOG = 64  # how many connections are accepted at a time, before any of them is processed
MOST_PIECES = 4096  # chunks of a body, unless a chunk has LEAST_BYTES on average
LEAST_BYTES = 64


def raise_limit_of_files() -> None:
    """Raise this process's limit of open files to its hard limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # the system may have a lower limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def most_connections(asked: int) -> int:
    """The number of connections to allow: `asked`, but at most half of the files that this process may open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return asked if files == resource.RLIM_INFINITY else max(1, min(asked, files // 2))


class Pieces(h11.Connection):
    """The HTTP parser of a connection, which refuses a body in very many very small chunks.

    Each chunk takes some 20 microseconds of the event loop, however small it is. A megabyte in chunks of one byte would
    take 20 seconds.
    """

    _count = _size = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next event of the connection. Raises RemoteProtocolError, as status 400, for a body of tiny chunks."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._count = self._size = 0
        elif isinstance(event, h11.Data):
            self._count, self._size = self._count + 1, self._size + len(event.data)
            if self._count > MOST_PIECES and self._size < LEAST_BYTES * self._count:
                raise h11.RemoteProtocolError("the body comes in too many small pieces", error_status_hint=400)
        return event


class Connection(H11Protocol):
    """A connection that is closed if it has no running request and the header of the next one does not arrive in time.

    If there are too many connections, a new one replaces the one that has been silent longest, or whose client does not
    read its answer. Only if all of them are busy, the new one itself is closed.

    head_seconds: seconds for a header to arrive, from the opening of the connection, or later from the first byte on
    most:         largest number of connections
    """

    head_seconds = 10.0
    most = 1000

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept this connection. If there are too many now, close another one, or this one if all others are busy."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self.conn = Pieces(h11.SERVER)
        self._since = 0.0
        self._late = None
        self._watch()
        if len(self.connections) > self.most:
            there = [each for each in self.connections if isinstance(each, Connection)]
            there = [each for each in there if not each.transport.is_closing()]
            if len(there) > self.most:
                others = [each for each in there if each is not self and each.can_go]
                min(others, key=lambda each: (each.is_busy, each._since), default=self).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Process received data, and start or stop the timeout of the header."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeout."""
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    @property
    def is_busy(self) -> bool:
        """Whether a request is running: from the end of its header to the end of its answer."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def can_go(self) -> bool:
        """Whether the connection may be closed: it is silent, or its client does not read."""
        return not self.is_busy or self.flow.write_paused

    def _watch(self) -> None:
        """Start or stop the timeout of a header. (Between requests uvicorn's own timeout applies.)"""
        if self.is_busy:
            if self._late is not None:
                self._late.cancel()
                self._late = None
        elif self._late is None and not self.transport.is_closing():
            self._since = self.loop.time()
            self._late = self.loop.call_later(self.head_seconds, self.transport.abort)


class AcceptErrors:
    """An event loop's exception handler that logs errors of `accept` at most once a minute.

    When a process has no files left, asyncio reports an error with a traceback for each waiting connection.
    """

    def __init__(self, seconds: float = 60.0):
        self._seconds = seconds
        self._last = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error of `accept`, unless one was logged within `seconds`; other errors are logged as usual."""
        if not str(context.get("message")).startswith("socket.accept()"):
            loop.default_exception_handler(context)
        elif time.monotonic() >= self._last + self._seconds:
            self._last = time.monotonic()
            logger.error("connections cannot be accepted: %s", context.get("exception"))
