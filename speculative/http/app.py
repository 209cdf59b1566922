"""The routes of the HTTP API."""

import importlib.metadata
import time
from collections.abc import Collection, Mapping
from contextlib import aclosing
from functools import partial

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from heavypath.speculative.http.answers import AnyAnswer, ChatAnswer, CompletionAnswer, Piece, joined
from heavypath.speculative.http.errors import Answer, answer_errors
from heavypath.speculative.http.exchange import Exchange, until_gone
from heavypath.speculative.http.guard import Guard, client_of
from heavypath.speculative.http.logprobs import Spelling
from heavypath.speculative.http.reading import Reading, check_model
from heavypath.speculative.http.requests import ChatRequest, CompletionRequest, Sampling
from heavypath.speculative.http.served import Served
from heavypath.speculative.http.writing import EventStream, Writing


def fingerprint_of(method: str, seed: int) -> str:
    """The `system_fingerprint` of a server's answers: version, method and seed, on which all answers depend."""
    return f"heavypath-{importlib.metadata.version('heavypath')}-{method}-{seed}"


def create_app(
    served: Served,
    fingerprint: str,
    api_key: str | None = None,
    hosts: Collection[str] | None = None,
    origins: Collection[str] = (),
) -> FastAPI:
    """Make the ASGI application of a server, with the routes of OpenAI's API, /health and /metrics.

    served: the service, its model's name, and the settings of the server
    fingerprint: OpenAI's system_fingerprint, which identifies what answers depend on besides the request
    api_key: the key that clients must send; None if they need no key
    hosts: host names that requests may use; None for any
    origins: origins of web pages that may read answers (CORS), "*" for all
    """
    app = FastAPI(title="Heavypath", docs_url=None, redoc_url=None)  # these pages load scripts from other servers
    app.add_middleware(Guard, limits=served.limits, metrics=served.metrics, api_key=api_key, hosts=hosts)
    if origins:  # outside of the guard, because a browser's preflight request has no key
        app.add_middleware(CORSMiddleware, allow_origins=[*origins], allow_methods=["GET", "POST"], allow_headers=["*"])
    answer_errors(app)
    started = int(time.time())
    reading = Reading(served)
    writing = Writing()
    spelling = Spelling(served.tokenizer)

    @app.get("/health")
    async def health() -> Answer:
        if served.service.is_open:
            return Answer({"status": "ready"})
        return Answer({"status": "closed"}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(served.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    model = {"id": served.name, "object": "model", "created": started, "owned_by": "heavypath"}

    @app.get("/v1/models")
    async def models() -> Answer:
        return Answer({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Answer:
        check_model(served, name)
        return Answer(model)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked = await reading.read(request, CompletionRequest)
        exchange = Exchange(served, asked, client_of(request.scope))
        answer = CompletionAnswer(served, asked.body, spelling, fingerprint)
        return await _answered(exchange, request, answer, writing)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        asked = await reading.read(request, ChatRequest)
        exchange = Exchange(served, asked, client_of(request.scope))
        answer = ChatAnswer(served, asked.body, spelling, fingerprint, reasoning=exchange.has_reasoning)
        return await _answered(exchange, request, answer, writing)

    _describe(app, {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest})
    return app


async def _answered(exchange: Exchange, request: Request, answer: AnyAnswer, writing: Writing) -> Response:
    """The response to a request: an event stream if the body wants one, otherwise one object.

    If more texts were decoded than requested (best_of), it has those of the highest mean log-probability.
    """
    body = exchange.request
    if body.stream:
        return EventStream(exchange, answer, writing)
    texts: list[list[Piece]] = [[] for _ in range(len(exchange))]
    async with until_gone(request.receive, exchange), aclosing(exchange.pieces()) as pieces:
        async for piece in pieces:
            texts[piece.place].append(piece)
    found = [joined(text) for text in texts]
    if body.texts > body.n:
        best = []
        for first in range(0, len(found), body.texts):
            of_prompt = found[first : first + body.texts]
            of_prompt.sort(key=lambda text: -exchange.mean_logprob(text.place))
            best += of_prompt[: body.n]
        found = best
    whole = partial(answer.whole, found, exchange.counted, exchange.acceptance)
    places = sum(len(each.scored) + len(each.scored_thought) for each in found)
    content = await writing.written(whole, places)
    return Response(content, media_type=Answer.media_type)


def _describe(app: FastAPI, bodies: Mapping[str, type[Sampling]]) -> None:
    """Add the schemas of request bodies to /openapi.json: FastAPI does not know them. bodies: by path of the route."""
    described = app.openapi()
    for path, kind in bodies.items():
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        described.setdefault("components", {}).setdefault("schemas", {}).update(schema.pop("$defs"))
        content = {"application/json": {"schema": schema}}
        described["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
