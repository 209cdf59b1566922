"""Answers to clients: the objects of OpenAI's API, as a whole or as the events of a stream."""

import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from heavypath.speculative.http.logprobs import Spelling
from heavypath.speculative.http.requests import Sampling
from heavypath.speculative.http.served import Served
from heavypath.speculative.http.tool_calls import Call
from heavypath.speculative.serving.acceptance import Acceptance
from heavypath.speculative.serving.logprobs import TokenLogprob

Reason = Literal["stop", "length", "tool_calls"]


class Counted(NamedTuple):
    """Token counts of a request.

    prompt:    tokens of all its prompts
    new:       new tokens of all its choices
    cached:    prompt tokens that were not computed, because cached rows were reused
    reasoning: new tokens that are thinking; None where thinking is not separated
    """

    prompt: int
    new: int
    cached: int = 0
    reasoning: int | None = None

    def usage(self) -> dict[str, Any]:
        """The `usage` object of OpenAI's API, with these counts."""
        counts = {"prompt_tokens": self.prompt, "completion_tokens": self.new, "total_tokens": self.prompt + self.new}
        details: dict[str, Any] = {"prompt_tokens_details": {"cached_tokens": self.cached}}
        if self.reasoning is not None:
            details["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return counts | details


class Piece(NamedTuple):
    """The next piece of one choice of an answer.

    place:   the index of the choice
    text:    text of the content
    reason:  why the choice ended; None for all pieces but the last
    scored:  log-probabilities of the tokens of the content, if they were requested
    calls:   tool calls that are complete
    thought: thinking, which comes before the text
    scored_thought: log-probabilities of the tokens of the thinking and its markers, if they were requested
    """

    place: int
    text: str
    reason: Reason | None = None
    scored: Sequence[TokenLogprob] = ()
    calls: Sequence[Call] = ()
    thought: str = ""
    scored_thought: Sequence[TokenLogprob] = ()

    def __bool__(self) -> bool:
        """Whether the piece has any content."""
        return bool(self.text or self.thought or self.calls or self.scored or self.scored_thought)


def joined(pieces: Sequence[Piece]) -> Piece:
    """The pieces of one choice, from first to last, as one piece with the reason of the last."""
    return pieces[-1]._replace(
        text="".join(each.text for each in pieces),
        scored=[one for each in pieces for one in each.scored],
        calls=[one for each in pieces for one in each.calls],
        thought="".join(each.thought for each in pieces),
        scored_thought=[one for each in pieces for one in each.scored_thought],
    )


def measures(acceptance: Acceptance | None) -> dict[str, Any]:
    """The acceptance of draft tokens as the `metrics` object of vLLM's answers.

    Its value is null for None, which stands for several choices, whose counts are not reported together.
    """
    if acceptance is None:
        return {"speculative_decoding": None}
    steps = acceptance.num_spec_steps
    accepted = acceptance.num_accepted_draft_tokens
    return {
        "speculative_decoding": {
            "mean_acceptance_length": acceptance.mean_acceptance_length,
            "draft_acceptance_rate": accepted / max(1, acceptance.num_draft_tokens),
            "per_position_acceptance_rate": [count / max(1, steps) for count in acceptance.per_position],
            "acceptance_histogram": {str(length): count for length, count in sorted(acceptance.histogram.items())},
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": acceptance.num_draft_tokens,
        }
    }


class _Answer:
    """Makes the JSON objects of an answer; the common part of completions and chats.

    body:        the request
    spelling:    gives the texts of single tokens, for log-probabilities
    fingerprint: the `system_fingerprint` of OpenAI's API
    reasoning:   whether thinking is separated from the answer
    """

    prefix = ""
    whole_kind = ""
    event_kind = ""

    def __init__(
        self, served: Served, body: Sampling, spelling: Spelling, fingerprint: str, *, reasoning: bool = False
    ):
        self.streamed = body.streamed
        self._scores = body.likeliest is not None
        self._spelling = spelling
        self._measured = served.measured
        self._reasoning = reasoning
        self._counts: dict[int, int] = {}  # by choice, how many characters or calls were sent before the next piece
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": served.name,
            "system_fingerprint": fingerprint,
        }

    def whole(self, texts: Sequence[Piece], counted: Counted, acceptance: Acceptance | None) -> dict[str, Any]:
        """The whole answer as one object. texts: one joined piece for each choice."""
        choices = []
        for index, text in enumerate(texts):
            choice = {"index": index, "logprobs": self._logprobs(text), "finish_reason": text.reason}
            choices.append(choice | self._whole(text))
        return self._head | {"object": self.whole_kind, "choices": choices} | self._numbers(counted, acceptance)

    def last(self, counted: Counted, acceptance: Acceptance | None) -> dict[str, Any]:
        """The last event of a stream, without choices and with token counts."""
        return self._head | {"object": self.event_kind, "choices": []} | self._numbers(counted, acceptance)

    def event(self, piece: Piece, counted: Counted) -> dict[str, Any]:
        """The stream's event for a piece. counted: token counts so far, which each event has if requested."""
        choice = {"index": piece.place, "logprobs": self._logprobs(piece), "finish_reason": piece.reason}
        event = self._head | {"object": self.event_kind, "choices": [choice | self._part(piece)]}
        if not self.streamed.include_usage:
            return event
        return event | {"usage": counted.usage() if self.streamed.continuous_usage_stats else None}

    def _numbers(self, counted: Counted, acceptance: Acceptance | None) -> dict[str, Any]:
        numbers: dict[str, Any] = {"usage": counted.usage()}
        if self._measured:
            numbers["metrics"] = measures(acceptance)
        return numbers

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        raise NotImplementedError

    def _whole(self, text: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _part(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError


class CompletionAnswer(_Answer):
    """Makes the JSON objects of an answer of /v1/completions."""

    prefix = "cmpl"
    whole_kind = "text_completion"
    event_kind = "text_completion"

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self._scores or not (piece.scored or piece.text):
            return None
        offset = self._counts.get(piece.place, 0)
        found = self._spelling.completion(piece.scored, offset)
        self._counts[piece.place] = offset + sum(map(len, found["tokens"]))
        return found

    def _whole(self, text: Piece) -> dict[str, Any]:
        return {"text": text.text}

    def _part(self, piece: Piece) -> dict[str, Any]:
        return {"text": piece.text}


class ChatAnswer(_Answer):
    """Makes the JSON objects of an answer of /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_kind = "chat.completion"
    event_kind = "chat.completion.chunk"

    def begin(self, index: int, counted: Counted) -> dict[str, Any]:
        """The first event of choice `index`, which has the role and no text."""
        event = self.event(Piece(index, ""), counted)
        event["choices"][0]["delta"] = {"role": "assistant", "content": ""}
        return event

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self._scores or not (piece.scored or piece.scored_thought):
            return None
        found = self._spelling.chat(piece.scored)
        thought = {"reasoning_content": self._spelling.chat(piece.scored_thought)["content"]}
        return found | thought if self._reasoning else found

    def _whole(self, text: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text.text, "refusal": None}
        if text.calls:
            message["content"] = text.text.strip() or None
            message["tool_calls"] = [call.content() for call in text.calls]
        elif text.thought:
            message["content"] = text.text or None
        if self._reasoning:
            message["reasoning_content"] = text.thought or None
        return {"message": message}

    def _part(self, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {"reasoning_content": piece.thought} if piece.thought else {}
        if piece.text:
            delta["content"] = piece.text
        if piece.calls:
            first = self._counts.get(piece.place, 0)
            self._counts[piece.place] = first + len(piece.calls)
            delta["tool_calls"] = []
            for place, call in enumerate(piece.calls, first):
                delta["tool_calls"].append({"index": place} | call.content())
        return {"delta": delta}


AnyAnswer = CompletionAnswer | ChatAnswer
