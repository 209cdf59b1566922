"""Answer lines in order, several at a time, by calling the server's application within the process."""

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from starlette.types import ASGIApp, Message

from heavypath.speculative.http.batches.lines import Line
from heavypath.speculative.http.batches.output import LineAnswer, Output

MOST_CHANGES = 10  # how many changes of the models are tolerated while a line is answered
PAUSE = 0.05  # seconds before a line is sent again, if the queue was full


async def answer_all(
    lines: Iterable[Line],
    output: Output,
    answer: Callable[[Line], Awaitable[LineAnswer]],
    at_once: int,
    written: Callable[[], object],
) -> None:
    """Answer the lines of a batch file, several at a time, and write the answers in the order of the lines.

    answer:  returns the answer to a line that is a valid request
    at_once: how many lines are in progress at a time
    written: called without arguments after each answer is written
    """
    under_way: deque[tuple[Line, asyncio.Task[LineAnswer]]] = deque()

    async def write_first() -> None:
        line, task = under_way[0]
        output.write(line, await task)
        under_way.popleft()
        written()

    try:
        for line in lines:
            under_way.append((line, asyncio.create_task(_answered(line, answer))))
            while len(under_way) >= at_once or (under_way and under_way[0][1].done()):
                await write_first()
        while under_way:
            await write_first()
    finally:
        for _, task in under_way:
            task.cancel()


async def _answered(line: Line, answer: Callable[[Line], Awaitable[LineAnswer]]) -> LineAnswer:
    return LineAnswer(400, None) if line.error else await answer(line)


async def answer_by(app: ASGIApp, line: Line) -> LineAnswer:
    """The answer of an application to a line. Sends it again while the queue is full, and if the models changed.

    Raises ConnectionError if the service has ended, or the models changed ten times.
    """
    changes = 0
    while changes < MOST_CHANGES:
        status, body = await _ask(app, line)
        if status == 429:
            await asyncio.sleep(PAUSE)
        elif status != 503:
            return LineAnswer(status, json.loads(body))
        elif json.loads(body)["error"]["code"] == "model_changed":
            changes += 1
        else:
            raise ConnectionError(f"the service has ended: {body.decode()}")
    raise ConnectionError(f"the models changed while a line was answered, {MOST_CHANGES} times")


async def _ask(app: ASGIApp, line: Line) -> tuple[int, bytes]:
    """Send a line as a request to an application in this process. Returns the status and the body of its response."""
    messages: list[Message] = [{"type": "http.request", "body": line.body, "more_body": False}]
    status = 500
    parts = list[bytes]()

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.Future()  # this client never disconnects

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": line.url,
        "raw_path": line.url.encode(),
        "query_string": b"",
        "root_path": "",
        "client": None,
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "server": ("localhost", 80),
    }
    try:
        await app(scope, receive, send)
    except Exception:
        if not parts:
            raise
        # The error was answered with a response, and logged.
    return status, b"".join(parts)
