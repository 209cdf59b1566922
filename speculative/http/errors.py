"""Errors as answers in OpenAI's format.

{"error": {"message": ..., "type": ..., "param": the field or null, "code": a code for programs, or null}}
"""

import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

logger = logging.getLogger(__name__)
MOST_CHARACTERS = 250  # length of a message, which may quote what a client sent
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}  # others: by class, 4xx or 5xx


def compact(content: Any) -> str:
    """JSON in ASCII only, which can also express lone surrogates that a client sent; a `map` becomes a list."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False, default=list)


class Answer(JSONResponse):
    """A JSON response, written by `compact`."""

    def render(self, content: Any) -> bytes:
        """The body as bytes."""
        return compact(content).encode("ascii")


class Refusal(Exception):  # noqa: N818 - an answer, too
    """Raised to answer a request with an error, before it gets any text or in the middle of a stream.

    status:  HTTP status
    message: for people; cut to 250 characters
    param:   the field of the request that is wrong, if one is
    code:    the kind of error for programs, such as "queue_full"
    headers: additional headers of the response
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        if len(message) > MOST_CHARACTERS:
            message = f"{message[: MOST_CHARACTERS - 4]} ..."
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    def content(self) -> dict[str, Any]:
        """The JSON object of the error, in OpenAI's format."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Answer:
        """The HTTP response of the error."""
        return Answer(self.content(), self.status, self.headers)


def failed(error: Exception) -> Refusal:
    """Log an internal error, and return the refusal (status 500) that its client gets, without details."""
    logger.error("a request failed", exc_info=error)
    return Refusal(500, "the server failed; its log says why", code="internal_error")


def answer_errors(app: FastAPI) -> None:
    """Add handlers to the app that answer all errors in OpenAI's format, also errors of FastAPI and Starlette."""

    async def refuse(request: Request, error: Exception) -> Answer:
        assert isinstance(error, Refusal)
        return error.response()

    async def refuse_path(request: Request, error: Exception) -> Answer:
        assert isinstance(error, HTTPException)
        return Refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}").response()

    async def admit_failure(request: Request, error: Exception) -> Answer:
        return failed(error).response()

    app.add_exception_handler(Exception, admit_failure)
    app.add_exception_handler(Refusal, refuse)
    app.add_exception_handler(HTTPException, refuse_path)


def of_fields(error: ValidationError) -> Refusal:
    """The refusal (status 400) for a body that failed validation. It reports the first wrong field and the reason."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    first = found[0]
    if first["type"] == "missing" and len(first["loc"]) == 1:  # the field may be misspelt: then report that one
        first = next((each for each in found if each["type"] == "extra_forbidden"), first)
    said = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        said = "this server does not know this field"
    place = [step for step in first["loc"] if not str(step).startswith("|")]  # |... are tags, see `bodies.fields`
    if not place:
        return Refusal(400, f"the body is not what is expected: {said}")
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step:.200}" for step in place)
    return Refusal(400, f"{path.removeprefix('.')}: {said}", param=str(place[0])[:200])
