"""Reading of requests: the body, its prompts in tokens and its grammar, in threads beside the event loop."""

import asyncio
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.types import Receive

from heavypath.speculative.http.errors import Refusal, of_fields
from heavypath.speculative.http.exchange import Served, overdue
from heavypath.speculative.http.grammar import Grammars, source_of
from heavypath.speculative.http.prompts import Prompt, PromptTokens
from heavypath.speculative.http.requests import ChatRequest, CompletionRequest
from heavypath.speculative.processors.grammar import Grammar

Body = TypeVar("Body", CompletionRequest, ChatRequest)
Result = TypeVar("Result")


class Asked(NamedTuple, Generic[Body]):
    """A request as it was read. ends: the time.monotonic() at which its texts have to be complete; None for no end."""

    body: Body
    prompts: list[Prompt]
    grammar: Grammar | None
    ends: float | None


class Reading:
    """Reads the requests to a server, whose time begins here."""

    def __init__(self, served: Served):
        self._served = served
        self._prompts = PromptTokens(served.tokenizer, served.limits)
        self._grammars = Grammars(served.tokenizer, served.eos_token_ids)
        self._thread = ThreadPoolExecutor(1, "reading")  # a long prompt holds up no stream

    async def read(self, request: Request, kind: type[Body]) -> Asked[Body]:
        """A request of a kind. Raises Refusal for what it must not say, and where its client or its time is gone."""
        seconds = self._served.limits.seconds
        ends = None if seconds is None else time.monotonic() + seconds
        _check_type(request.headers.get("content-type", ""))
        content = await request.body()
        try:
            async with asyncio.timeout(seconds):
                body, prompts, grammar = await _unless_gone(request.receive, self._parts(content, kind))
        except TimeoutError:
            raise overdue(self._served.limits) from None
        return Asked(body, prompts, grammar, ends)

    async def _parts(self, content: bytes, kind: type[Body]) -> tuple[Body, list[Prompt], Grammar | None]:
        def blocking() -> tuple[Body, list[Prompt], str | None]:
            try:
                body = kind.model_validate_json(content)
            except ValidationError as error:
                raise of_fields(error) from None
            check_model(self._served, body.model)
            return body, self._prompts.of(body), source_of(body)

        body, prompts, source = await asyncio.get_running_loop().run_in_executor(self._thread, blocking)
        return body, prompts, None if source is None else await self._grammars.of(source)


def check_model(served: Served, name: str) -> None:
    """Nothing is ever loaded by a name of a request: there is one model."""
    if name != served.name:
        message = f"there is no model {name!r:.100} here; this server has {served.name!r}"
        raise Refusal(404, message, param="model", code="model_not_found")


def _check_type(given: str) -> None:
    """A page of another site can make a browser send any type but this one."""
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise Refusal(
            400, f"the body is not what is expected: JSON, with Content-Type: application/json, got {given!r}"
        )


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of work. If the client goes away before, work is cancelled, and takes no thread if it waits."""

    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(wait())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Refusal(499, "the client is gone")  # which nobody reads; /metrics counts it
        return working.result()
    finally:
        working.cancel()
        waiting.cancel()
