"""Read HTTP requests: validate the body, tokenize its prompts, compile its grammar; all in threads of their own."""

import asyncio
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.types import Receive

from heavypath.speculative.http.answer_forms import answer_form
from heavypath.speculative.http.errors import Refusal, of_fields
from heavypath.speculative.http.exchange import Asked, Body, gone, overdue
from heavypath.speculative.http.grammar import Grammars, GrammarSource, source_of
from heavypath.speculative.http.prompts import PromptTokens
from heavypath.speculative.http.requests import ChatRequest
from heavypath.speculative.http.served import AUTO, Served
from heavypath.speculative.http.template_answers import check_response_template
from heavypath.speculative.http.tool_calls import Calls, format_of

Result = TypeVar("Result")


class Reading:
    """Reads the requests to a server: validates their bodies, tokenizes prompts, and compiles grammars.

    Raises ValueError for a response template of the tokenizer that transformers cannot read.
    """

    def __init__(self, served: Served):
        self._served = served
        self._template = None
        if served.reasoning == AUTO and served.tool_format is None:
            self._template = getattr(served.tokenizer, "response_template", None)
        if self._template is not None:
            check_response_template(self._template)
        self._prompts = PromptTokens(served.tokenizer, served.limits)
        self._grammars = Grammars(served.tokenizer, served.eos_token_ids)
        self._thread = ThreadPoolExecutor(1, "reading")  # so that a long prompt does not delay streams
        self._thread.submit(int)  # start the thread now, while there is memory for it

    async def read(self, request: Request, kind: type[Body]) -> Asked[Body]:
        """Read a request, whose time limit starts now. kind: the class of its body.

        Raises Refusal if it is not valid, its client disconnects, or its time is over.
        """
        seconds = self._served.limits.seconds
        ends = None if seconds is None else time.monotonic() + seconds
        _check_type(request.headers.get("content-type", ""))
        content = await request.body()
        try:
            async with asyncio.timeout(seconds):
                asked = await _unless_gone(request.receive, self._parts(content, kind))
        except TimeoutError:
            raise overdue(self._served.limits) from None
        return asked._replace(ends=ends)

    async def _parts(self, content: bytes, kind: type[Body]) -> Asked[Body]:
        def blocking() -> tuple[Asked[Body], GrammarSource | None]:
            try:
                body = kind.model_validate_json(content)
            except ValidationError as error:
                raise of_fields(error) from None
            check_model(self._served, body.model)
            prompts = self._prompts.of(body)
            if not isinstance(body, ChatRequest):
                return Asked(body, prompts), source_of(body, None)
            calls = self._calls(body)
            source = source_of(body, calls)  # before `answer_form`, which expects at most one form of the text
            served = self._served
            form = answer_form(body, served.tokenizer, served.reasoning, calls, self._template)
            return Asked(body, prompts, form=form), source

        asked, source = await asyncio.get_running_loop().run_in_executor(self._thread, blocking)
        return asked if source is None else asked._replace(grammar=await self._grammars.of(source))

    def _calls(self, request: ChatRequest) -> Calls | None:
        """How tool calls in the answers are read; None without tools. Raises Refusal if the model supports no tools."""
        if not request.offered:
            return None
        form = self._served.tool_format
        tokenizer = self._served.tokenizer
        if form is None:
            form = format_of(str(tokenizer.get_chat_template(tools=[{}])))
        if form is None and self._template is None:
            message = "tools: this model's chat template has none, or has them called in a way that is not known here"
            raise Refusal(400, message, param="tools", code="no_tools")
        parallel = request.parallel_tool_calls is not False
        return Calls(form, tokenizer, request.must_call, request.offered, parallel)


def check_model(served: Served, name: str | None) -> None:
    """Raise Refusal (status 404) if a request names another model than the served one. name: None if it names none."""
    if name not in (None, served.name):
        message = f"there is no model {name!r:.100} here; this server has {served.name!r}"
        raise Refusal(404, message, param="model", code="model_not_found")


def _check_type(given: str) -> None:
    """Raise Refusal for a body that is not declared as JSON; web pages of other sites can send other types."""
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise Refusal(
            400, f"the body is not what is expected: JSON, with Content-Type: application/json, got {given!r}"
        )


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`. If the client disconnects first, `work` is cancelled, and Refusal is raised."""
    working = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Refusal(499, "the client is gone")  # nobody reads it, but /metrics counts it
        return working.result()
    finally:
        working.cancel()
        waiting.cancel()
