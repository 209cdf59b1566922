"""Limits on what an HTTP request may ask for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The limits of a request. A request beyond them is refused before anything is decoded.

    max_tokens:      prompt and new tokens together, the size of a slot
    choices:         choices of one request: prompts times n
    body_bytes:      size of a request's body
    body_seconds:    time for a body to arrive
    stop_strings:    number of stop strings
    stop_characters: length of a stop string
    seconds:         from a request's arrival to its last token; None for no limit
    """

    max_tokens: int
    choices: int = 16
    body_bytes: int = 1 << 20
    body_seconds: float = 30.0
    stop_strings: int = 4
    stop_characters: int = 256
    seconds: float | None = 600.0
