"""Write answers as JSON: as a whole, or as the server-sent events of a stream.

An answer may have log-probabilities of hundreds of thousands of tokens. While the standard library's JSON encoder or
the garbage collector works on it, no other thread runs. So a long answer is written in a thread, piece by piece, and
the event loop continues. A list over tokens may be a `map`: each of its objects is made, written and freed before the
next one.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from heavypath.speculative.http.answers import AnyAnswer, ChatAnswer, Piece
from heavypath.speculative.http.errors import Refusal, compact
from heavypath.speculative.http.exchange import Exchange, until_gone

FEW = 16  # answers with log-probabilities of up to this many tokens are written at once
LEVELS = 5  # depth of the objects and lists above those of one token


class Writing:
    """Writes the answers of a server as JSON, long ones in a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "writing")
        self._thread.submit(int)  # start the thread now, while there is memory for it

    async def written(self, make: Callable[[], Any], places: int) -> str:
        """The JSON text of an object.

        make:   makes the object; called in the thread if it is long
        places: how many tokens have log-probabilities in it, which decides whether it is long
        """
        if places <= FEW:
            return compact(make())
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: "".join(in_pieces(make())))


def in_pieces(content: Any, levels: int = LEVELS) -> Iterator[str]:
    """Yield the JSON of `content`, as `compact` makes it, in pieces.

    levels: how many levels of dicts, lists and maps are split; each value below them is one piece
    """
    if levels and isinstance(content, dict):
        before = "{"
        for name, value in content.items():
            yield f"{before}{compact(name)}:"
            yield from in_pieces(value, levels - 1)
            before = ","
        yield "{}" if before == "{" else "}"
    elif levels and isinstance(content, list | map):
        before = "["
        for value in content:
            yield before
            yield from in_pieces(value, levels - 1)
            before = ","
        yield "[]" if before == "[" else "]"
    else:
        yield compact(content)


class EventStream(Response):
    """The response of a stream: one server-sent event for each piece of text, then [DONE].

    If an error occurs, the last event is {"error": ...}.

    JSON contains no line breaks, and in ASCII no other character that a client could take for one.
    """

    def __init__(self, exchange: Exchange, answer: AnyAnswer, writing: Writing):
        """Make the response of an exchange. answer: makes the objects of the events; writing: writes them."""
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._exchange = exchange
        self._answer = answer
        self._writing = writing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send each event as soon as it is made, and cancel the choices if the client disconnects."""
        async with until_gone(receive, self._exchange), aclosing(self._events()) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in events:
                await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncGenerator[str]:
        exchange = self._exchange
        answer = self._answer
        if isinstance(answer, ChatAnswer):
            for index in range(len(exchange)):
                yield compact(answer.begin(index, exchange.counted))
        try:
            async with aclosing(exchange.pieces()) as pieces:
                async for piece in pieces:
                    if piece:
                        event = partial(answer.event, piece._replace(reason=None), exchange.counted)
                        yield await self._writing.written(event, len(piece.scored) + len(piece.scored_thought))
                    if piece.reason is not None:
                        yield compact(answer.event(Piece(piece.place, "", piece.reason), exchange.counted))
        except Refusal as refusal:
            yield compact(refusal.content())
            return
        if answer.streamed.include_usage:
            yield compact(answer.last(exchange.counted, exchange.acceptance))
        yield "[DONE]"
