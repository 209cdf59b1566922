"""The HTTP server: where it listens, and how it stops."""

import asyncio
import ipaddress
import signal
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from heavypath.speculative.http.connections import BACKLOG, AcceptErrors, Connection, most_connections


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not listening yet; port 0 is any free port.

    Raises OSError if it cannot be bound.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise OSError(f"cannot listen on {host}, port {port}: {error.strerror}") from error
    return bound


class Server(uvicorn.Server):
    """Serves an app until SIGTERM or SIGINT. Then it takes no more requests, and finishes those that run.

    grace: seconds in which running requests may then finish, before they are cancelled
    ready: called without arguments once the server listens
    head_seconds: seconds in which a request's header must arrive
    connections: largest number of connections, but at most half of the files that this process may open
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        grace: int,
        ready: Callable[[], object],
        head_seconds: float = Connection.head_seconds,
        connections: int = Connection.most,
    ):
        bounds = {"head_seconds": head_seconds, "most": most_connections(connections)}
        config = uvicorn.Config(
            app,
            http=type("BoundConnection", (Connection,), bounds),
            backlog=BACKLOG,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=grace,
        )
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, then call `ready`."""
        asyncio.get_running_loop().set_exception_handler(AcceptErrors())
        await super().startup(sockets)
        if self.started:
            self._ready()

    def serve_until_stopped(self, bound: socket.socket) -> None:
        """Serve at a socket until stopped. Handles the signals itself, so that they do not end the process."""
        before = {number: signal.signal(number, _obeyed) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.run(sockets=[bound])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _obeyed(number: int, frame: object) -> None:
    """A signal handler that does nothing: uvicorn raises the signals again after it has handled them."""
