"""A tool call; and two exceptions, for no call and for one that may not be complete."""

import json
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

FUNCTION_NAME = r"[a-zA-Z0-9_.-]+"


class Call(NamedTuple):
    """A tool call that a model wrote: the function's name, and its arguments, a JSON object as text."""

    name: str
    arguments: str

    def content(self) -> dict[str, Any]:
        """The call as an object of OpenAI's API, with a new id of nine characters, as Mistral's templates require."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}


class Found(NamedTuple):
    """The calls that were found at a position of a text. end: the position after them."""

    calls: Sequence[Call]
    end: int


class NoCall(Exception):  # noqa: N818 - an answer, too
    """Raised if there is no call at a position of a text.

    end: the position from which to continue searching; None for directly after the marker
    """

    def __init__(self, end: int | None = None):
        super().__init__("no call")
        self.end = end


class NotYet(Exception):  # noqa: N818 - an answer, too
    """Raised if more text is needed to decide whether there is a call at a position."""


def call_of(name: Any, arguments: Any) -> Call:
    """Make a call from a function's name and its arguments, a dictionary or JSON text of one.

    Raises TypeError or ValueError if they are not valid.
    """
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError(f"no call: {name!r:.80}")
    return Call(name, json.dumps(arguments, allow_nan=False))  # Python reads NaN and 1e999, JSON has neither
