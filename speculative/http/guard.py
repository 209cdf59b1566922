"""Middleware before all routes: checks host and key, reads the body within its limits, and counts answers."""

import asyncio
import hmac
import ipaddress
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from heavypath.speculative.http.errors import Refusal
from heavypath.speculative.http.metrics import Metrics
from heavypath.speculative.http.served import Limits

OPEN = "/health"  # needs no key, because monitoring has none
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", OPEN, "/metrics")  # others are counted together
LOCAL = ("localhost", "127.0.0.1", "::1")  # loopback names
DROPPED = 16  # a body is read up to 16 times its limit, since some clients read no answer before they have sent it all


class Guard:
    """ASGI middleware that refuses requests with a wrong host, a wrong key, or too large or slow a body.

    The inner application gets each body as a whole.

    limits:  size and time of a body
    metrics: counts all answers, by path and status
    api_key: what clients must send as `Authorization: Bearer KEY`; None if they need no key
    hosts: host names that a request may use, in lower case; None for any. Without this check a web page whose domain
        name resolves to the visitor's loopback address could use a server that is only reachable locally (DNS
        rebinding)
    """

    def __init__(
        self, app: ASGIApp, limits: Limits, metrics: Metrics, api_key: str | None, hosts: Collection[str] | None
    ):
        self._hosts = hosts
        self._app = app
        self._limits = limits
        self._metrics = metrics
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in PATHS else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        try:
            self._check_host(scope)
            self._check_key(scope)
            body = await self._body(scope, receive)
        except Refusal as refusal:
            await refusal.response()(scope, receive, counted)
            return
        if body is not None:  # None: the client has disconnected
            await self._app(scope, _again(body, receive), counted)

    def _check_host(self, scope: Scope) -> None:
        if self._hosts is None:
            return
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(given) != 1 or host_of(given[0]) not in self._hosts:
            message = (
                f"Host: this server is not {' or '.join(given)!r:.200}; start it with --allowed-host to have it so"
            )
            raise Refusal(421, message, code="host_not_allowed")

    def _check_key(self, scope: Scope) -> None:
        if self._expected is None or scope["path"] == OPEN:
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1 or not hmac.compare_digest(given[0], self._expected):
            message = "expected the server's key, as `Authorization: Bearer KEY`, got " + (
                "another one" if given else "none"
            )
            headers = {"WWW-Authenticate": "Bearer"}
            raise Refusal(401, message, code="invalid_api_key", headers=headers)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None if the client disconnected before it was complete.

        Raises Refusal if it is too large, or does not arrive in time.
        """
        most = self._limits.body_bytes
        seconds = self._limits.body_seconds
        body = bytearray()
        size = 0
        more = True
        try:
            async with asyncio.timeout(seconds):
                while more and size <= DROPPED * most:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    size += len(part)
                    more = message.get("more_body", False)
                    if size <= most:
                        body += part
                    else:
                        body.clear()
        except TimeoutError:
            raise Refusal(408, f"the request's body did not arrive within {seconds:g} seconds") from None
        if size > most:
            raise Refusal(413, f"the request's body must have at most {most} bytes, and it has more", code="too_large")
        return bytes(body)


def host_of(address: str) -> str:
    """The host name in the value of a Host header, in lower case, without port and without IPv6 brackets."""
    name = address[1:].partition("]")[0] if address.startswith("[") else address.partition(":")[0]
    return name.lower()


def client_of(scope: Scope) -> str | None:
    """Who sent a request, for fair sharing among clients: an IPv4 address, or the /64 network of an IPv6 address.

    scope: the request's ASGI scope. A client in it that is no address is returned as it is; None if it has no client
    """
    if not scope.get("client"):
        return None
    given = scope["client"][0].partition("%")[0]
    try:
        address = ipaddress.ip_address(given)
    except ValueError:
        return given
    if isinstance(address, ipaddress.IPv6Address):
        return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))
    return str(address)


def _again(body: bytes, receive: Receive) -> Receive:
    """An ASGI receive function that first returns the whole body, then what `receive` returns."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again
