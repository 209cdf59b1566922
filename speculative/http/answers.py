"""Answers to clients: the objects of OpenAI's API, whole or as the events of a stream."""

import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

Reason = Literal["stop", "length"]


class Counted(NamedTuple):
    """Tokens of a request: its prompts', and the new ones of all its texts."""

    prompt: int
    new: int

    def usage(self) -> dict[str, int]:
        """OpenAI's object."""
        return {"prompt_tokens": self.prompt, "completion_tokens": self.new, "total_tokens": self.prompt + self.new}


class Finished(NamedTuple):
    """One text of an answer, and why it ended."""

    text: str
    reason: Reason


class _Answer:
    """The common fields of both kinds of answers."""

    prefix, whole_kind, event_kind = "", "", ""

    def __init__(self, model: str, fingerprint: str, *, includes_usage: bool):
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._includes_usage = includes_usage

    def whole(self, texts: Sequence[Finished], counted: Counted) -> dict[str, Any]:
        """The answer as one object."""
        choices = [{"index": index, "logprobs": None} | self._whole(text) for index, text in enumerate(texts)]
        return self._head | {"object": self.whole_kind, "choices": choices, "usage": counted.usage()}

    def usage(self, counted: Counted) -> dict[str, Any]:
        """The last event of a stream, if it was asked for."""
        return self._head | {"object": self.event_kind, "choices": [], "usage": counted.usage()}

    def event(self, index: int, text: str, reason: Reason | None = None) -> dict[str, Any]:
        """More of text `index`, or its end."""
        choice = {"index": index, "logprobs": None, "finish_reason": reason} | self._part(text)
        event = self._head | {"object": self.event_kind, "choices": [choice]}
        return event | {"usage": None} if self._includes_usage else event

    def _whole(self, text: Finished) -> dict[str, Any]:
        raise NotImplementedError

    def _part(self, text: str) -> dict[str, Any]:
        raise NotImplementedError


class CompletionAnswer(_Answer):
    """Of /v1/completions."""

    prefix, whole_kind, event_kind = "cmpl", "text_completion", "text_completion"

    def _whole(self, text: Finished) -> dict[str, Any]:
        return {"text": text.text, "finish_reason": text.reason}

    def _part(self, text: str) -> dict[str, Any]:
        return {"text": text}


class ChatAnswer(_Answer):
    """Of /v1/chat/completions. The first event of each text names its role."""

    prefix, whole_kind, event_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def begin(self, index: int) -> dict[str, Any]:
        """The first event of text `index`."""
        event = self.event(index, "")
        event["choices"][0]["delta"] = {"role": "assistant", "content": ""}
        return event

    def _whole(self, text: Finished) -> dict[str, Any]:
        message = {"role": "assistant", "content": text.text, "refusal": None}
        return {"message": message, "finish_reason": text.reason}

    def _part(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}


AnyAnswer = CompletionAnswer | ChatAnswer
