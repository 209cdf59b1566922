"""The messages of a conversation, and the tools that answers may call."""

import json
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from heavypath.speculative.http.bodies.fields import Body, OneOrSeveral, Refused, Several, refused


class TextPart(Body):
    """A text part of a message."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _reads_text(cls, part: Any) -> Any:
        if isinstance(part, dict) and part.get("type") != "text":
            raise ValueError(f"this server reads text alone, got a part of type {part.get('type')!r:.80}")
        return part


class CalledFunction(Body):
    """The function and the arguments of a tool call; arguments: a JSON object, as text."""

    name: str
    arguments: str

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates expect it, with the arguments as a dictionary."""
        return {"name": self.name, "arguments": json.loads(self.arguments or "{}")}

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, value: str) -> str:
        try:
            found = json.loads(value or "{}")
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ValueError("expected a JSON object, as text")
        return value


class ToolCall(Body):
    """A tool call in a message of the assistant."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class Message(Body):
    """A message of a conversation: a text, tool calls of the assistant, or the result of a tool.

    reasoning_content: an assistant's earlier thinking, which templates may include; reasoning: vLLM's name for it
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: OneOrSeveral[TextPart] | None = None
    name: str | None = None
    tool_calls: Several[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    # Fields that clients copy from an answer.
    annotations: Annotated[Any, refused([])] = None
    audio: Refused = None
    function_call: Refused = None
    refusal: Refused = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> "Message":
        if self.content is None and not self.tool_calls and not self.thought:
            raise ValueError("expected content, or tool_calls of an assistant; got neither")
        if self.thought and self.role != "assistant":
            raise ValueError(f"reasoning_content is of an assistant's messages, got it of role {self.role!r}")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls are of an assistant's messages, got them of role {self.role!r}")
        return self

    @property
    def thought(self) -> str | None:
        """The thinking, from reasoning_content or reasoning; None if the message has neither."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    @property
    def text(self) -> str:
        """The content as one text; empty without content."""
        parts = self.content or ""
        return parts if isinstance(parts, str) else "".join(each.text for each in parts)

    def for_template(self) -> dict[str, Any]:
        """The message as the dictionary that chat templates expect."""
        said: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.tool_calls:
            said["tool_calls"] = [
                {"id": each.id, "type": each.type, "function": each.function.for_template()} for each in self.tool_calls
            ]
        if self.thought is not None and self.role == "assistant":
            said["reasoning_content"] = self.thought
        return said | {name: value for name in ("name", "tool_call_id") if (value := getattr(self, name)) is not None}


class Function(Body):
    """The function of a tool.

    parameters: the JSON schema of its arguments
    strict:     ignored
    """

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as the dictionary that chat templates expect."""
        return {"type": "function", "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


class ChosenName(Body):
    """The function that must be called, by its name."""

    name: str


class ChosenTool(Body):
    """A value of tool_choice: the tool that must be called."""

    type: Literal["function"]
    function: ChosenName


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("|word")] | Annotated[ChosenTool, Tag("|tool")],
    Discriminator(lambda value: "|word" if isinstance(value, str) else "|tool"),
]
