"""A text as server-sent events, as OpenAI's clients read them."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from heavypath.speculative.http.answers import AnyAnswer, ChatAnswer, Piece
from heavypath.speculative.http.errors import Refusal
from heavypath.speculative.http.exchange import Exchange, until_gone


class EventStream(Response):
    """One event for each piece of text, then [DONE]. What fails on the way is an event {"error": ...}, and the last."""

    def __init__(self, exchange: Exchange, answer: AnyAnswer, *, has_numbers: bool):
        """has_numbers: whether the last event before [DONE] has the numbers of tokens."""
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._exchange, self._answer, self._has_numbers = exchange, answer, has_numbers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, each when it is there."""
        async with until_gone(receive, self._exchange), aclosing(self._events()) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in events:
                await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncGenerator[str]:
        exchange, answer = self._exchange, self._answer
        if isinstance(answer, ChatAnswer):
            for index in range(len(exchange)):
                yield _line(answer.begin(index, exchange.counted))
        try:
            async with aclosing(exchange.pieces()) as pieces:
                async for piece in pieces:
                    if piece.text or piece.calls or piece.scored:
                        yield _line(answer.event(piece._replace(reason=None), exchange.counted))
                    if piece.reason is not None:
                        yield _line(answer.event(Piece(piece.place, "", piece.reason), exchange.counted))
        except Refusal as refusal:
            yield _line(refusal.content())
            return
        if self._has_numbers:
            yield _line(answer.last(exchange.counted, exchange.acceptance))
        yield "[DONE]"


def _line(event: dict[str, Any]) -> str:
    """JSON has no line breaks, and in ASCII no other character that a reader may take for one."""
    return json.dumps(event, separators=(",", ":"), allow_nan=False)
