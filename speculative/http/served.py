"""What a server serves, and its limits on what an HTTP request may ask for."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from heavypath.speculative.http.metrics import Metrics
from heavypath.speculative.http.tool_calls import ToolFormat
from heavypath.speculative.serving import Service

AUTO = "auto"  # the value of `--reasoning` by which the chat template decides


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


@dataclass(frozen=True)
class Served:
    """The model that a server serves, and the server's settings.

    service:     decodes the requests
    name:        the model's name in requests
    temperature: of requests that have none
    eos_token_ids: tokens that end a text
    limits:      limits of a request
    metrics:     counts requests and measures their times
    tool_format: how the model writes tool calls; None to derive it from the chat template
    reasoning:   how thinking is marked: "auto", "none" or the name of a format
    measured:    whether answers report the acceptance of draft tokens
    """

    service: Service
    tokenizer: PreTrainedTokenizerBase
    name: str
    temperature: float
    eos_token_ids: Sequence[int]
    limits: Limits
    metrics: Metrics
    tool_format: ToolFormat | None = None
    reasoning: str = AUTO
    measured: bool = False
