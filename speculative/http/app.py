"""The routes."""

import time
from collections.abc import Collection, Mapping
from contextlib import aclosing

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from heavypath.speculative.http.answers import AnyAnswer, ChatAnswer, CompletionAnswer, Finished, Reason
from heavypath.speculative.http.errors import Answer, answer_errors
from heavypath.speculative.http.exchange import Exchange, Served, until_gone
from heavypath.speculative.http.guard import Guard, client_of
from heavypath.speculative.http.reading import Reading, check_model
from heavypath.speculative.http.requests import ChatRequest, CompletionRequest, Sampling
from heavypath.speculative.http.streaming import EventStream

DEFAULT_NEW_TOKENS = 16  # of /v1/completions, as in OpenAI's API


def create_app(
    served: Served, fingerprint: str, api_key: str | None = None, hosts: Collection[str] | None = None
) -> FastAPI:
    """The application, for any server of ASGI.

    fingerprint: names what texts depend on beside the request, OpenAI's system_fingerprint
    api_key: what clients have to send; None for none
    hosts: names that requests may ask for; None for any
    """
    app = FastAPI(title="Heavypath", docs_url=None, redoc_url=None)  # pages that load scripts from elsewhere
    app.add_middleware(Guard, limits=served.limits, metrics=served.metrics, api_key=api_key, hosts=hosts)
    answer_errors(app)
    started = int(time.time())
    reading = Reading(served)

    @app.get("/health")
    async def health() -> Answer:
        return Answer({"status": "ready"}) if served.service.is_open else Answer({"status": "closed"}, 503)

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
        body, prompts, grammar, ends = await reading.read(request, CompletionRequest)
        answer = CompletionAnswer(served.name, fingerprint, includes_usage=body.includes_usage)
        new_tokens = DEFAULT_NEW_TOKENS if body.max_tokens is None else body.max_tokens
        exchange = Exchange(served, body, prompts, grammar, new_tokens, ends, client_of(request.scope))
        return await _answered(exchange, body, request, answer)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body, prompts, grammar, ends = await reading.read(request, ChatRequest)
        answer = ChatAnswer(served.name, fingerprint, includes_usage=body.includes_usage)
        new_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        exchange = Exchange(served, body, prompts, grammar, new_tokens, ends, client_of(request.scope))
        return await _answered(exchange, body, request, answer)

    _describe(app, {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest})
    return app


async def _answered(exchange: Exchange, body: Sampling, request: Request, answer: AnyAnswer) -> Response:
    """The texts as a stream or whole."""
    if body.stream:
        return EventStream(exchange, answer, includes_usage=body.includes_usage)
    texts: list[list[str]] = [[] for _ in range(len(exchange))]
    reasons: list[Reason] = ["stop"] * len(exchange)
    async with until_gone(request.receive, exchange), aclosing(exchange.pieces()) as pieces:
        async for piece in pieces:
            texts[piece.place].append(piece.text)
            reasons[piece.place] = piece.reason or reasons[piece.place]
    finished = [Finished("".join(text), reason) for text, reason in zip(texts, reasons, strict=True)]
    return Answer(answer.whole(finished, exchange.counted))


def _describe(app: FastAPI, bodies: Mapping[str, type[Sampling]]) -> None:
    """Tell /openapi.json of the bodies, which FastAPI does not read."""
    described = app.openapi()
    for path, kind in bodies.items():
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        described.setdefault("components", {}).setdefault("schemas", {}).update(schema.pop("$defs"))
        content = {"application/json": {"schema": schema}}
        described["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
