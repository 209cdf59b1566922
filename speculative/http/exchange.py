"""`Exchange`: the choices of one HTTP request: submit them together, read them as they arrive, cancel them."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from starlette.types import Receive

from heavypath.speculative.decoding.sequences import MAX_SEQUENCES
from heavypath.speculative.http.answer_forms import AnswerForm, AnswerReader
from heavypath.speculative.http.answer_texts import AnswerParts
from heavypath.speculative.http.answers import Counted, Piece, Reason
from heavypath.speculative.http.errors import Refusal, failed
from heavypath.speculative.http.metrics import Watch
from heavypath.speculative.http.prompts import Prompt
from heavypath.speculative.http.requests import ChatRequest, CompletionRequest, Sampling
from heavypath.speculative.http.served import Limits, Served
from heavypath.speculative.http.text import StoppedText
from heavypath.speculative.processors.grammar import Grammar
from heavypath.speculative.processors.penalties import TextPenalties, TokenBias
from heavypath.speculative.serving import Closed, Completion, ModelChanged, QueueFull
from heavypath.speculative.serving.acceptance import Acceptance

APART = 48_271_337  # distance between the seeds of a request's choices; odd, so that no two are the same
Body = TypeVar("Body", CompletionRequest, ChatRequest)


class Asked(NamedTuple, Generic[Body]):
    """An HTTP request that was read and checked.

    body:    its fields
    prompts: its prompts as tokens
    grammar: a grammar for all its choices; None if they are free
    form:    how answers are split into parts; None if texts are returned as they are
    ends:    value of time.monotonic() by which it has to be complete; None for no limit
    """

    body: Body
    prompts: list[Prompt]
    grammar: Grammar | None = None
    form: AnswerForm | None = None
    ends: float | None = None


@dataclass
class _ChoiceText:
    index: int
    prompt: Prompt
    prompt_tokens: int
    completion: Completion
    stopped: StoppedText
    reader: AnswerReader | None
    watch: Watch
    told: int = 0  # tokens whose log-probabilities have been sent
    has_called: bool = False

    @property
    def thinking_tokens(self) -> int:
        """How many of the tokens so far come before the content: thinking and its markers."""
        if self.reader is None:
            return 0
        return self.stopped.tokens if self.reader.begin is None else self.stopped.before(self.reader.begin)

    def piece(self, parts: AnswerParts, reason: Reason | None = None) -> Piece:
        """Make a piece of these parts, with the log-probabilities of the tokens that came since the last piece.

        Before there is content, tokens without text so far wait for the next piece: they may be thinking or content.
        """
        begin = self.told
        is_open = reason is None and self.reader is not None and self.reader.begin is None
        self.told = self.stopped.before() if is_open else self.stopped.tokens
        scored = self.completion.logprobs[begin : self.told]
        thinking = max(0, self.thinking_tokens - begin)
        self.has_called |= bool(parts.calls)
        return Piece(
            self.index,
            parts.said,
            reason,
            scored=scored[thinking:],
            calls=parts.calls,
            thought=parts.thought,
            scored_thought=scored[:thinking],
        )


def sequence_id(seed: int | None, index: int) -> int | None:
    """The seed that choice `index` of a request has in the service; None, for a random one, if the request has none.

    The first choice has the seed of the request, modulo 2**27, the number of seeds that a service has.
    """
    return None if seed is None else (seed + index * APART) % MAX_SEQUENCES


class Exchange:
    """The choices of one HTTP request while they are decoded: n for each prompt, in the order of the prompts.

    Making an Exchange submits all choices to the service; `pieces` has their texts. Its length is their number.

    asked:  the request
    client: who sent the request; the queue is shared fairly among clients

    request: the fields of the request

    Raises Refusal if the request needs something that is not allowed, the queue is full, or the service is closed. All
    choices are cancelled then.
    """

    def __init__(self, served: Served, asked: Asked[Any], client: str | None = None):
        request: Sampling = asked.body
        self._served = served
        self._gone = False
        self.request = request
        self._form = asked.form
        _check_stops(request, served.limits, served.service.vocab_size)
        self._reads_only = request.new_tokens == 0  # the service decodes at least one token, which is then dropped
        options = _options(served, asked) | {"client": client, "group": object()}
        self._silent = frozenset(options["eos_token_id"] or ())
        lengths = [_new_tokens(served.limits, prompt, request.new_tokens) for prompt in asked.prompts]
        self._texts: list[_ChoiceText] = []
        try:
            for prompt, length in zip(asked.prompts, lengths, strict=True):
                _check_tokens(prompt, options.get("min_new_tokens", 0), length, served.service.vocab_size)
                found = _processors(request, asked.grammar, len(prompt.tokens), served.service.vocab_size)
                processors = {"logits_processor": found} if found else {}
                for index in range(request.texts):
                    seed = sequence_id(request.seed, index)
                    counted = 0 if index else len(prompt.tokens)  # count each prompt once
                    self._submit(prompt, counted, options | processors | {"max_new_tokens": length, "seed": seed})
        except BaseException:
            for text in self._texts:
                text.completion.cancel()
                text.watch.finish("refused", 0)
            raise

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def counted(self) -> Counted:
        """The token counts of the request so far, over all its choices."""
        return Counted(
            sum(text.prompt_tokens for text in self._texts),
            sum(text.stopped.tokens for text in self._texts),
            sum(text.completion.reused_tokens for text in self._texts if text.prompt_tokens),
            sum(text.thinking_tokens for text in self._texts) if self.has_reasoning else None,
        )

    @property
    def has_reasoning(self) -> bool:
        """Whether thinking is separated from the content."""
        return self._form is not None and self._form.has_reasoning

    @property
    def acceptance(self) -> Acceptance | None:
        """Counts of accepted draft tokens; None for several choices."""
        return self._texts[0].completion.acceptance if len(self._texts) == 1 else None

    def mean_logprob(self, index: int) -> float:
        """The mean log-probability of the tokens of choice `index`, whose log-probabilities were requested."""
        text = self._texts[index]
        found = [each.logprob or 0.0 for each in text.completion.logprobs[: text.stopped.tokens]]
        return sum(found) / max(1, len(found))

    def leave(self) -> None:
        """Cancel all choices, because the client has disconnected."""
        self._gone = True
        for text in self._texts:
            text.completion.cancel()

    async def pieces(self) -> AsyncGenerator[Piece]:
        """The pieces of all choices, in the order in which they arrive; may be iterated once.

        At most one piece waits here. What a slow reader has not read yet stays as tokens in the completions, whose size
        is limited; decoding does not wait for it. Raises Refusal if a choice fails.
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
        """Cancel all choices that have not ended, and record them in the metrics. Called when nothing reads them."""
        for text in self._texts:
            text.completion.cancel()
            text.watch.finish("disconnected" if self._gone else "failed", text.stopped.tokens)

    def _submit(self, prompt: Prompt, counted: int, options: dict[str, Any]) -> None:
        service = self._served.service
        try:
            completion = service.submit(prompt.tokens, **options)
        except QueueFull as error:
            stats = service.stats()
            until_one_ends = stats.seconds_busy / max(1, stats.completed)  # an estimate
            headers = {"Retry-After": str(max(1, min(60, math.ceil(until_one_ends))))}
            message = f"the server takes no more texts now: {error}"
            raise Refusal(429, message, code="queue_full", headers=headers) from error
        except Closed as error:
            raise _closed() from error
        except (ValueError, TypeError) as error:
            raise Refusal(400, " ".join(str(error).split())) from error
        tokenizer = self._served.tokenizer
        form = self._form
        request = self.request
        silent = self._silent
        special = not request.skip_special_tokens
        if not special and form is not None and form.silent is not None:
            silent = silent | form.silent
            special = True
        self._texts.append(
            _ChoiceText(
                len(self._texts),
                prompt,
                counted,
                completion,
                StoppedText(tokenizer, prompt.tokens, request.stops, silent, special=special),
                None if form is None else form.reader(prompt.conversation),
                self._served.metrics.watch(counted),
            )
        )

    async def _read(self, text: _ChoiceText, put: Callable[[Piece | Refusal], Awaitable[None]]) -> None:
        piece = partial(Piece, text.index)
        scores = self.request.likeliest is not None
        try:
            if text.prompt.echo and not scores:
                await put(piece(text.prompt.echo))
            async for tokens in text.completion:
                if text.prompt.echo and scores and not text.watch.has_begun:
                    await put(piece(text.prompt.echo, scored=text.completion.prompt_logprobs))
                text.watch.tokens(len(tokens))
                if self._reads_only:
                    continue
                more = text.stopped.add(tokens)
                parts = AnswerParts(said=more) if text.reader is None else text.reader.add(more)
                if any(parts):
                    await put(text.piece(parts))
                if text.stopped.ended:
                    break
            await put(self._finish(text))
        except Refusal as refusal:
            await put(refusal)
        except ModelChanged as error:
            text.watch.finish("failed", text.stopped.tokens)
            await put(Refusal(503, str(error), code="model_changed"))
        except Exception as error:
            text.watch.finish("failed", text.stopped.tokens)
            await put(failed(error))

    def _finish(self, text: _ChoiceText) -> Piece:
        """The last piece of a choice whose tokens have all arrived, with the reason of its end.

        Raises Refusal if the deadline, a disconnected client, or the end of the service cut it off.
        """
        steps = 0
        rest = text.stopped.end()
        if text.stopped.ended:
            reason = "stop"
            text.completion.cancel()
        else:
            completed = text.completion.result(timeout=1)
            reason = completed.reason
            steps = completed.steps
        if reason == "cancelled":
            reason = "disconnected" if self._gone else "closed"  # the only reasons for cancelling a choice that is read
        text.watch.finish(reason, text.stopped.tokens, steps, text.completion.acceptance)
        if reason == "deadline":
            raise overdue(self._served.limits)
        if reason == "disconnected":
            raise Refusal(499, "the client is gone")  # nobody reads it, but /metrics counts it
        if reason == "closed":
            raise _closed()
        if self._reads_only:
            return Piece(text.index, "", "length")
        if text.reader is None:
            return text.piece(AnswerParts(said=rest), reason)
        first = text.reader.add(rest)
        last = text.reader.end(stopped=reason == "stop")
        parts = AnswerParts(
            thought=first.thought + last.thought,
            said=first.said + last.said,
            calls=first.calls + last.calls,
        )
        return text.piece(parts, "tool_calls" if text.has_called or parts.calls else reason)


async def gone(receive: Receive) -> None:
    """Wait until the client disconnects. receive: the ASGI function of the request, whose body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def until_gone(receive: Receive, exchange: Exchange) -> AsyncGenerator[None]:
    """A context that closes the exchange when it ends, and cancels the choices as soon as the client disconnects."""

    async def wait() -> None:
        await gone(receive)
        exchange.leave()

    waiting = asyncio.create_task(wait())
    try:
        yield
    finally:
        waiting.cancel()
        exchange.close()


def overdue(limits: Limits) -> Refusal:
    """The refusal (status 504) of a request that takes more than `limits.seconds`."""
    return Refusal(504, f"the text was not complete within the server's {limits.seconds:g} seconds", code="deadline")


def _check_stops(request: Sampling, limits: Limits, vocab_size: int) -> None:
    stops = request.stops
    if len(stops) > limits.stop_strings:
        message = f"stop: expected at most {limits.stop_strings} stop strings, got {len(stops)}"
        raise Refusal(400, message, param="stop")
    for stop in stops:
        if not 0 < len(stop) <= limits.stop_characters:
            message = f"stop: expected strings of 1 to {limits.stop_characters} characters, got one of {len(stop)}"
            raise Refusal(400, message, param="stop")
    if (largest := max(request.stop_token_ids or [0])) >= vocab_size:
        message = f"stop_token_ids: expected tokens below {vocab_size}, got {largest}"
        raise Refusal(400, message, param="stop_token_ids")


def _options(served: Served, asked: Asked[Any]) -> dict[str, Any]:
    """The options of `submit` that all choices of a request share."""
    request: Sampling = asked.body
    scores = request.likeliest
    ends = asked.ends
    ranked = request.texts > request.n  # ranked by log-probability
    echo = isinstance(request, CompletionRequest) and request.echo
    eos = [] if request.ignore_eos else [*served.eos_token_ids]
    asked_for = request.shared() | {
        "temperature": served.temperature if request.temperature is None else request.temperature,
        "deadline": None if ends is None else max(1e-3, ends - time.monotonic()),
        "logprobs": 0 if scores is None and ranked else scores,
        "prompt_logprobs": scores if echo else None,
    }
    given = {name: value for name, value in asked_for.items() if value is not None}
    if asked.grammar is not None:
        given["min_new_tokens"] = 0  # such a text ends when it is complete, whatever least length the model has
    return given | {"eos_token_id": [*eos, *(request.stop_token_ids or ())] or None}


def _processors(request: Sampling, grammar: Grammar | None, prompt_length: int, vocab_size: int) -> list[Any]:
    """The logits processors of a choice: biases, then penalties, then the grammar, as far as requested.

    Raises Refusal for a bias of a token outside the vocabulary.
    """
    found: list[Any] = []
    bias = {int(token): value for token, value in (request.logit_bias or {}).items() if value}
    if bias:
        if (largest := max(bias)) >= vocab_size:
            message = f"logit_bias: expected tokens below {vocab_size}, got {largest}"
            raise Refusal(400, message, param="logit_bias")
        found.append(TokenBias(bias))
    if request.frequency_penalty or request.presence_penalty:
        frequency = request.frequency_penalty or 0.0
        presence = request.presence_penalty or 0.0
        found.append(TextPenalties(frequency, presence, prompt_length))
    return found if grammar is None else [*found, grammar]


def _new_tokens(limits: Limits, prompt: Prompt, asked: int | None) -> int:
    """The largest number of new tokens of a choice, at least 1. Raises Refusal if a slot has no room for them.

    asked: the requested number; None for the largest possible
    """
    room = limits.max_tokens - len(prompt.tokens)
    if room < 1 or (asked or 1) > room:
        have = f"the prompt has {len(prompt.tokens)} tokens" + (f" and {asked} more are requested" if asked else "")
        message = f"there is room for {limits.max_tokens} tokens of prompt and answer, and {have}"
        raise Refusal(400, message, param="max_tokens" if asked else None, code="context_length_exceeded")
    return room if asked is None else max(1, asked)


def _check_tokens(prompt: Prompt, least: int, most: int, vocab_size: int) -> None:
    """Raise Refusal for a token outside the vocabulary, and for min_tokens `least` above max_tokens `most`.

    The service would refuse both, too, but its message would not use the names of the API.
    """
    if (largest := max(prompt.tokens)) >= vocab_size:
        raise Refusal(400, f"prompt: expected tokens of at most {vocab_size - 1}, got {largest}", param="prompt")
    if least > most:
        message = f"min_tokens: expected at most as many as max_tokens, which is {most}, got {least}"
        raise Refusal(400, message, param="min_tokens")


def _closed() -> Refusal:
    return Refusal(503, "the server takes no requests any more", code="closed")
