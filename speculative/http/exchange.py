"""The texts of one request: submitted together, read as they come, and cancelled when nobody waits for them."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.types import Receive
from transformers import PreTrainedTokenizerBase

from heavypath.speculative.decoding.noise_rows import MAX_SEQUENCES
from heavypath.speculative.http.answers import Counted, Reason
from heavypath.speculative.http.errors import Refusal, failed
from heavypath.speculative.http.limits import Limits
from heavypath.speculative.http.metrics import Metrics, Watch
from heavypath.speculative.http.prompts import Prompt
from heavypath.speculative.http.requests import Sampling
from heavypath.speculative.http.text import StoppedText
from heavypath.speculative.processors.grammar import Grammar
from heavypath.speculative.serving import Closed, Completion, QueueFull, Service

APART = 48_271_337  # between the noise of the texts of one request; odd, so that no two of them meet


@dataclass(frozen=True)
class Served:
    """The model that a server serves.

    name:        of the model, as requests have it
    temperature: where a request has none
    eos_token_ids: that end a text
    """

    service: Service
    tokenizer: PreTrainedTokenizerBase
    name: str
    temperature: float
    eos_token_ids: Sequence[int]
    limits: Limits
    metrics: Metrics


class Piece(NamedTuple):
    """More of the text at a place of a request; with its last piece comes why it ended."""

    place: int
    text: str
    reason: Reason | None = None


@dataclass
class _ChoiceText:
    index: int
    echo: str
    prompt_tokens: int
    completion: Completion
    stopped: StoppedText
    watch: Watch


def sequence_id(seed: int | None, index: int) -> int | None:
    """The noise of text `index` of a request: for the first one that of sequence `seed` of `generate`.

    Seeds are counted modulo 2**27, as many as there are sequences.
    """
    return None if seed is None else (seed + index * APART) % MAX_SEQUENCES


class Exchange:
    """The texts of one request: `n` for each prompt, in the order of the prompts.

    grammar: that all of them are held to; None for none
    new_tokens: of each, at most; None for as many as there is room for
    ends: the time.monotonic() at which they have to be complete; None for no end
    client: whose it is, by which the queue is shared

    Raises Refusal for what a request must not ask for, if the queue is full, and if the service is closed; no text of
    the request is decoded then.
    """

    def __init__(
        self,
        served: Served,
        request: Sampling,
        prompts: Sequence[Prompt],
        grammar: Grammar | None,
        new_tokens: int | None,
        ends: float | None,
        client: str | None = None,
    ):
        self._served, self._gone = served, False
        _check_stops(request, served.limits)
        options = _options(served, request, grammar, ends) | {"client": client, "group": object()}
        lengths = [_new_tokens(served.limits, prompt, new_tokens) for prompt in prompts]
        self._texts: list[_ChoiceText] = []
        try:
            for prompt, length in zip(prompts, lengths, strict=True):
                for index in range(request.n):
                    seed = sequence_id(request.seed, index)
                    counted = 0 if index else len(prompt.tokens)  # a prompt counts once
                    self._submit(request.stops, prompt, counted, options | {"max_new_tokens": length, "seed": seed})
        except BaseException:
            for text in self._texts:
                text.completion.cancel()
                text.watch.finish("refused", 0)
            raise

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def counted(self) -> Counted:
        """Tokens so far."""
        return Counted(
            sum(text.prompt_tokens for text in self._texts), sum(text.stopped.tokens for text in self._texts)
        )

    def leave(self) -> None:
        """The client is gone: decode no more of its texts."""
        self._gone = True
        for text in self._texts:
            text.completion.cancel()

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Each text's pieces as they come, to be read once.

        No more than one piece waits here. Text that a slow reader has not read yet waits as tokens in the
        completions, whose number is limited. No step waits for it. Raises Refusal if a text fails.
        """
        arrived: asyncio.Queue[Piece | Refusal] = asyncio.Queue(maxsize=1)
        readers = [asyncio.create_task(self._read(text, arrived.put)) for text in self._texts]
        try:
            going = len(readers)
            while going:
                piece = await arrived.get()
                if isinstance(piece, Refusal):
                    raise piece
                going -= piece.reason is not None
                yield piece
        finally:
            for reader in readers:
                reader.cancel()

    def close(self) -> None:
        """Nobody reads it any more: decode no more of it. Without effect on texts that have ended."""
        for text in self._texts:
            text.completion.cancel()
            text.watch.finish("disconnected" if self._gone else "failed", text.stopped.tokens)

    def _submit(self, stops: Sequence[str], prompt: Prompt, counted: int, options: dict[str, Any]) -> None:
        service = self._served.service
        try:
            completion = service.submit(prompt.tokens, **options)
        except QueueFull as error:
            raise Refusal(
                429,
                f"the server takes no more texts now: {error}",
                code="queue_full",
                headers={"Retry-After": str(_seconds_for_one(service))},
            ) from error
        except Closed as error:
            raise _closed() from error
        except (ValueError, TypeError) as error:
            raise Refusal(400, " ".join(str(error).split())) from error
        self._texts.append(
            _ChoiceText(
                len(self._texts),
                prompt.echo,
                counted,
                completion,
                StoppedText(self._served.tokenizer, prompt.tokens, stops),
                self._served.metrics.watch(counted),
            )
        )

    async def _read(self, text: _ChoiceText, put: Callable[[Piece | Refusal], Awaitable[None]]) -> None:
        try:
            if text.echo:
                await put(Piece(text.index, text.echo))
            async for tokens in text.completion:
                text.watch.tokens(len(tokens))
                if more := text.stopped.add(tokens):
                    await put(Piece(text.index, more))
                if text.stopped.ended:
                    break
            await put(self._finish(text))
        except Refusal as refusal:
            await put(refusal)
        except Exception as error:
            text.watch.finish("failed", text.stopped.tokens)
            await put(failed(error))

    def _finish(self, text: _ChoiceText) -> Piece:
        """The last piece of a text whose tokens have come. Raises Refusal where it was not to be the last."""
        steps, rest = 0, text.stopped.end()
        if text.stopped.ended:
            reason = "stop"
            text.completion.cancel()
        else:
            completed = text.completion.result(timeout=1)
            reason, steps = completed.reason, completed.steps
        if reason == "cancelled":
            reason = "disconnected" if self._gone else "closed"  # nobody else cancels a text that is read
        text.watch.finish(reason, text.stopped.tokens, steps)
        if reason == "deadline":
            raise overdue(self._served.limits)
        if reason == "disconnected":
            raise Refusal(499, "the client is gone")  # which nobody reads; /metrics counts it
        if reason == "closed":
            raise _closed()
        return Piece(text.index, rest, reason)


@asynccontextmanager
async def until_gone(receive: Receive, exchange: Exchange) -> AsyncGenerator[None]:
    """Let an exchange end when the block does, however that ends, or before if its client goes away.

    receive: of the request, whose body has been read
    """

    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        exchange.leave()

    waiting = asyncio.create_task(wait())
    try:
        yield
    finally:
        waiting.cancel()
        exchange.close()


def overdue(limits: Limits) -> Refusal:
    """The reason why a request that takes too long gets no text."""
    return Refusal(504, f"the text was not complete within the server's {limits.seconds:g} seconds", code="deadline")


def _check_stops(request: Sampling, limits: Limits) -> None:
    stops = request.stops
    if len(stops) > limits.stop_strings:
        message = f"stop: expected at most {limits.stop_strings} stop strings, got {len(stops)}"
        raise Refusal(400, message, param="stop")
    for stop in stops:
        if not 0 < len(stop) <= limits.stop_characters:
            message = f"stop: expected strings of 1 to {limits.stop_characters} characters, got one of {len(stop)}"
            raise Refusal(400, message, param="stop")


def _options(served: Served, request: Sampling, grammar: Grammar | None, ends: float | None) -> dict[str, Any]:
    """The options with which all texts of a request are submitted."""
    asked = {
        "temperature": served.temperature if request.temperature is None else request.temperature,
        "top_k": request.top_k,
        "top_p": request.top_p,
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "min_new_tokens": request.min_tokens,
        "logits_processor": None if grammar is None else [grammar],
        "deadline": None if ends is None else max(1e-3, ends - time.monotonic()),
    }
    eos = None if request.ignore_eos else [*served.eos_token_ids]
    return {name: value for name, value in asked.items() if value is not None} | {"eos_token_id": eos}


def _new_tokens(limits: Limits, prompt: Prompt, asked: int | None) -> int:
    """The number of tokens that a text may have; None asks for as many as there is room for."""
    room = limits.max_tokens - len(prompt.tokens)
    if room < 1 or (asked or 1) > room:
        have = f"the prompt has {len(prompt.tokens)} tokens" + (f" and {asked} more are asked for" if asked else "")
        message = f"there is room for {limits.max_tokens} tokens of prompt and answer, and {have}"
        raise Refusal(400, message, param="max_tokens" if asked else None, code="context_length_exceeded")
    return room if asked is None else asked


def _seconds_for_one(service: Service) -> int:
    """About how long it takes until another request has ended."""
    stats = service.stats()
    return max(1, min(60, math.ceil(stats.seconds_busy / max(1, stats.completed))))


def _closed() -> Refusal:
    return Refusal(503, "the server takes no requests any more", code="closed")
