"""The formats of tool calls, and how to choose one by the chat template.

hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>      Hermes, Qwen2.5, Qwen3; one after the other
mistral      [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]          or [TOOL_CALLS]name{...}, its later models
llama3       {"name": ..., "parameters": {...}}                            Llama 3.1 and later; or after <|python_tag|>
qwen3_coder  <tool_call><function=name><parameter=key>                     Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5
             value</parameter></function></tool_call>
seed_oss     the same between <seed:tool_call> and </seed:tool_call>       Seed-OSS
glm4         <tool_call>name<arg_key>key</arg_key>                         GLM-4.5 and later
             <arg_value>value</arg_value></tool_call>
"""

import re
from typing import NamedTuple


class Tags(NamedTuple):
    """The tags of a call whose arguments are not written as one JSON object.

    name:  tags before and after the function's name; empty for no tag
    key:   tags before and after the name of an argument
    value: tags before and after the value of an argument
    end:   tag after the last argument
    lines: whether tags are on separate lines, so that a value has a line break before and after it
    json:  whether a value without a schema is read as JSON, if it is JSON
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str
    lines: bool
    json: bool


class ToolFormat(NamedTuple):
    """How a model writes tool calls.

    marker, end: texts before and after a call; end is empty if nothing marks it
    sign:        a regular expression that matches somewhere in the chat templates of this format
    arguments:   the key of the arguments in a JSON call
    bare:        whether a JSON object without a marker is a call, too
    tags:        the tags of a call whose arguments are between tags; None for JSON calls
    """

    marker: str
    end: str
    sign: str
    arguments: str = "arguments"
    bare: bool = False
    tags: Tags | None = None

    @property
    def openings(self) -> tuple[str, ...]:
        """The texts that a call may begin with."""
        if self.tags is not None and self.tags.name[0]:
            return self.marker, self.tags.name[0]  # Qwen3-Coder often leaves out the marker
        return (self.marker, "{") if self.bare else (self.marker,)

    @property
    def words(self) -> tuple[str, ...]:
        """All fixed texts of a call, such as its markers; some may be special tokens of the tokenizer."""
        tags = () if self.tags is None else (*self.tags.name, *self.tags.key, *self.tags.value, self.tags.end)
        inner = ("[ARGS]", "[CALL_ID]") if self.marker == "[TOOL_CALLS]" else ()
        return tuple(each for each in (self.marker, self.end, *tags, *inner) if each)


_FUNCTION = Tags(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>", lines=True, json=False)
_IN_LINE = _FUNCTION._replace(lines=False)
_ARGUMENT = Tags(("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), "", lines=False, json=True)

# The first format whose sign is found is used; <tool_call> occurs in the templates of three of them.
FORMATS = {
    "glm4": ToolFormat("<tool_call>", "</tool_call>", r"<arg_key>", tags=_ARGUMENT),
    "seed_oss": ToolFormat("<seed:tool_call>", "</seed:tool_call>", r"<seed:tool_call>", tags=_IN_LINE),
    "qwen3_coder": ToolFormat("<tool_call>", "</tool_call>", r"(?s)<function=.*<parameter=", tags=_FUNCTION),
    "hermes": ToolFormat("<tool_call>", "</tool_call>", r"<tool_call>"),
    "mistral": ToolFormat("[TOOL_CALLS]", "", r"\[TOOL_CALLS\]"),
    "llama3": ToolFormat("<|python_tag|>", "", r"<\|python_tag\|>|\"parameters\"", arguments="parameters", bare=True),
}


def format_of(template: str) -> ToolFormat | None:
    """The format of tool calls that a chat template uses; None if it has no tools or an unknown format."""
    if not re.search(r"\btools\b", template):
        return None
    return next((each for each in FORMATS.values() if re.search(each.sign, template)), None)
