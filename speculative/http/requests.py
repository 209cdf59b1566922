"""Bodies of requests to /v1/completions and /v1/chat/completions.

Unknown fields are refused. So are known fields that are not supported, unless their value asks for nothing. An error is
better than an answer that ignores part of the request. Fields of OpenAI's API that do not change the text are accepted
and ignored.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator

from heavypath.speculative.http.bodies.fields import Body, OneOrSeveral, Refused, Several, Tokens, refused
from heavypath.speculative.http.bodies.formats import Formatted
from heavypath.speculative.http.bodies.messages import ChosenTool, Message, Tool, ToolChoice
from heavypath.speculative.http.bodies.sampling import SamplingFields

MOST_LOGPROBS = 20  # how many of the likeliest tokens may be requested at each position


class StreamOptions(Body):
    """What the events of a stream have besides the text.

    include_usage: send a last event with token counts
    continuous_usage_stats: send the token counts so far in each event, too
    include_obfuscation: only false is supported
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] | None = None


class Sampling(SamplingFields, Formatted):
    """The fields that requests for completions and for chats have in common.

    Sampling settings that are left out have the values of the target's generation_config; a temperature that is missing
    there, too, is 1. skip_special_tokens=False keeps special tokens in the text, except the one that ends it.
    """

    model: str | None = None
    n: int = Field(1, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: OneOrSeveral[str] | None = None
    skip_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # These change no text.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    @field_validator("n", mode="before")
    @classmethod
    def _one_by_default(cls, value: Any) -> Any:
        return 1 if value is None else value

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
    def streamed(self) -> StreamOptions:
        """The stream options, or their defaults."""
        return self.stream_options or StreamOptions()

    @property
    def texts(self) -> int:
        """How many texts are decoded for each prompt."""
        return self.n

    @property
    def new_tokens(self) -> int | None:
        """The largest number of new tokens of each text; None for as many as a slot has room for."""
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens to report at each position; None for no log-probabilities."""
        raise NotImplementedError


def _kind(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return "|text" if isinstance(value, str) else "|tokens"
    return "|texts" if isinstance(value[0], str) else "|several" if isinstance(value[0], list) else "|tokens"


class CompletionRequest(Sampling):
    """The body of a request to /v1/completions: texts, or their tokens, to continue.

    max_tokens: largest number of new tokens, 16 by default, as in OpenAI's API. With 0 prompts are only read
    echo:     put the prompt before the new text
    logprobs: report this many of the likeliest tokens at each position, and the chosen token; with echo for the prompt,
              too
    best_of:  decode this many texts, and return the n with the highest mean log-probability of their tokens
    """

    prompt: Annotated[
        Annotated[str, Tag("|text")]
        | Annotated[Several[str], Tag("|texts")]
        | Annotated[Tokens, Tag("|tokens")]
        | Annotated[Several[Tokens], Tag("|several")],
        Discriminator(_kind),
    ]
    max_tokens: int | None = Field(16, ge=0)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    best_of: int | None = Field(None, ge=1)

    suffix: Annotated[Any, refused("")] = None

    @field_validator("best_of")
    @classmethod
    def _fits(cls, value: int | None, info: ValidationInfo) -> int | None:
        n = info.data.get("n", 1)
        if value is not None and value < n:
            raise ValueError(f"expected at least n, which is {n}")
        if value is not None and value > n and info.data.get("stream"):
            raise ValueError("which texts are the best is known at their ends: without stream alone")
        return value

    @field_validator("logprobs", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return None if value is False else value

    @property
    def texts(self) -> int:
        """How many texts are decoded for each prompt."""
        return self.best_of or self.n

    @property
    def new_tokens(self) -> int | None:
        """The largest number of new tokens of each text, 16 by default; 0 to read the prompts only."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens to report at each position; None for no log-probabilities."""
        return self.logprobs


class ChatRequest(Sampling):
    """The body of a request to /v1/chat/completions: a conversation to answer.

    max_completion_tokens: largest number of new tokens, also called max_tokens; by default as many as there is room for
    chat_template_kwargs: variables for the chat template, such as enable_thinking
    tool_choice: "none" hides the tools from the template. "auto", the default, lets the model decide. "required", or
        one of the tools, forces a call, which needs the extra `grammar`
    parallel_tool_calls: false keeps only the first call of an answer
    """

    messages: Several[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: Several[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=64)

    audio: Refused = None
    function_call: Annotated[Any, refused("none")] = None
    functions: Annotated[Any, refused([])] = None
    modalities: Annotated[Any, refused(["text"])] = None
    prediction: Refused = None
    reasoning_effort: Refused = None
    store: Annotated[Any, refused(False)] = None
    web_search_options: Refused = None

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

    @field_validator("top_logprobs")
    @classmethod
    def _only_of_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("only where logprobs is true")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _is_there(cls, value: Any, info: ValidationInfo) -> Any:
        names = [tool.function.name for tool in info.data.get("tools") or []]
        if value == "required" and not names:
            raise ValueError("it asks for a call, and there are no tools")
        if isinstance(value, ChosenTool) and value.function.name not in names:
            raise ValueError(f"there is no tool {value.function.name!r:.80}")
        return value

    @property
    def offered(self) -> list[Tool]:
        """The tools that the chat template shows to the model; empty without tools, or if tool_choice is "none"."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def must_call(self) -> list[Tool]:
        """The tools of which one must be called; empty if the model may decide."""
        if isinstance(self.tool_choice, ChosenTool):
            return [tool for tool in self.offered if tool.function.name == self.tool_choice.function.name]
        return self.offered if self.tool_choice == "required" else []

    @property
    def new_tokens(self) -> int | None:
        """The largest number of new tokens of the answer; None for as many as a slot has room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens to report at each position; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None
