"""A text as server-sent events, as OpenAI's clients read them."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from heavypath.speculative.http.answers import AnyAnswer, ChatAnswer, Piece
from heavypath.speculative.http.errors import Refusal
from heavypath.speculative.http.exchange import Exchange, until_gone
from heavypath.speculative.http.writing import Writing, compact


class EventStream(Response):
    """One event for each piece of text, then [DONE]. What fails on the way is an event {"error": ...}, and the last.

    JSON has no line breaks, and in ASCII no other character that a reader may take for one.
    """

    def __init__(self, exchange: Exchange, answer: AnyAnswer, writing: Writing, *, has_numbers: bool):
        """has_numbers: whether the last event before [DONE] has the numbers of tokens."""
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._exchange, self._answer, self._writing, self._has_numbers = exchange, answer, writing, has_numbers

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
                yield compact(answer.begin(index, exchange.counted))
        try:
            async with aclosing(exchange.pieces()) as pieces:
                async for piece in pieces:
                    if piece.text or piece.calls or piece.scored:
                        event = partial(answer.event, piece._replace(reason=None), exchange.counted)
                        yield await self._writing.written(event, len(piece.scored))
                    if piece.reason is not None:
                        yield compact(answer.event(Piece(piece.place, "", piece.reason), exchange.counted))
        except Refusal as refusal:
            yield compact(refusal.content())
            return
        if self._has_numbers:
            yield compact(answer.last(exchange.counted, exchange.acceptance))
        yield "[DONE]"
