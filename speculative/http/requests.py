"""Bodies of requests that clients may send to /v1/completions and /v1/chat/completions.

A field that the server does not know is refused, and so is one that it knows and does not have, unless it asks for
nothing. A text that ignores a wish is worse than an error. Fields of OpenAI's API that change no text are taken and not
looked at.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

# Fields that are refused, and the values with which they ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None,),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "top_logprobs": (None,),
    "web_search_options": (None,),
}
# Of a message that was an answer before.
NEUTRAL_OF_MESSAGES: dict[str, tuple[Any, ...]] = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "name": (None,),
    "refusal": (None,),
    "tool_calls": (None, []),
}


def _asks_for_nothing(value: Any, field: str | None, neutral: dict[str, tuple[Any, ...]]) -> Any:
    allowed = neutral[str(field)]
    if not any(type(value) is type(each) and value == each for each in allowed) and not (
        isinstance(value, float) and value in allowed
    ):
        raise ValueError(f"this server does not have it; leave it out (got {value!r:.80})")
    return value


Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Each = TypeVar("Each")
# What is wrong with the first element is said, and not of each: a body of 1 MiB has room for many.
Several = Annotated[list[Each], Field(max_length=4096, fail_fast=True)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]  # as many as a body has room for


class Body(BaseModel):
    """Nothing but the fields below, of their own types: "5" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    """include_usage: a last event with the numbers of tokens. include_obfuscation: False, or left out."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Body):
    """A schema by its name, as OpenAI's clients send it; it is always followed strictly."""

    name: str
    definition: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """The form that an answer must have: any text, an object of JSON, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> "ResponseFormat":
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("expected json_schema where the type is 'json_schema', and only there")
        return self


class Sampling(Body):
    """The common fields of both ways to ask.

    top_k, min_p, repetition_penalty, min_tokens and ignore_eos (the text goes on to its full length) are beyond
    OpenAI's API. A setting of the sampling that is left out is as in the target's generation_config; a temperature that
    is not there, either, is 1.
    """

    model: str
    n: int = Field(1, ge=1)
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=1e-30, le=1)  # which is 0 in float32 somewhere below
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool = False
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | Several[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    frequency_penalty: Any = None
    logit_bias: Any = None
    logprobs: Any = None
    presence_penalty: Any = None

    # These change no text.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    @field_validator(*NEUTRAL, check_fields=False)
    @classmethod
    def _refuse(cls, value: Any, info: ValidationInfo) -> Any:
        return _asks_for_nothing(value, info.field_name, NEUTRAL)

    @field_validator("stream_options")
    @classmethod
    def _only_of_streams(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("only where stream is true")
        return value

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def includes_usage(self) -> bool:
        """True if a stream's last event has the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Sampling):
    """Texts, or their tokens, that are continued. max_tokens is 16 unless given, as in OpenAI's API."""

    prompt: str | Several[str] | Tokens | Several[Tokens]
    echo: bool | None = None

    best_of: Any = None
    suffix: Any = None


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _reads_text(cls, part: Any) -> Any:
        if isinstance(part, dict) and part.get("type") != "text":
            raise ValueError(f"this server reads text alone, got a part of type {part.get('type')!r:.80}")
        return part


class Message(Body):
    """Of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Several[TextPart]

    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    name: Any = None
    refusal: Any = None
    tool_calls: Any = None

    @field_validator(*NEUTRAL_OF_MESSAGES)
    @classmethod
    def _refuse(cls, value: Any, info: ValidationInfo) -> Any:
        return _asks_for_nothing(value, info.field_name, NEUTRAL_OF_MESSAGES)

    def for_template(self) -> dict[str, str]:
        """As chat templates take it."""
        parts = self.content
        return {"role": self.role, "content": parts if isinstance(parts, str) else "".join(each.text for each in parts)}


class ChatRequest(Sampling):
    """A conversation that is answered, by default until its slot has no more room."""

    messages: Several[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    parallel_tool_calls: bool | None = None  # of tools, which there are none of
    prediction: Any = None
    reasoning_effort: Any = None
    store: Any = None
    tool_choice: Any = None
    tools: Any = None
    top_logprobs: Any = None
    web_search_options: Any = None

    # These change no text.
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_length(cls, value: int | None, info: ValidationInfo) -> int | None:
        other = info.data.get("max_tokens")
        if value is not None and other is not None and other != value:
            raise ValueError(
                f"max_tokens is another name of it, and has another value ({other}); leave one of them out"
            )
        return value
