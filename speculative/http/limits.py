"""Limits of what a request may ask for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The limits of a request. More than this is refused before anything is decoded.

    max_tokens:      of prompt and new tokens together: the room of a slot
    choices:         texts of one request: prompts times n
    body_bytes:      of a request's body
    body_seconds:    until a body has arrived
    stop_strings:    of one request
    stop_characters: of one stop string
    seconds:         from a request's arrival to its last token; None for no end
    """

    max_tokens: int
    choices: int = 16
    body_bytes: int = 1 << 20
    body_seconds: float = 30.0
    stop_strings: int = 4
    stop_characters: int = 256
    seconds: float | None = 600.0
