"""Calls of tools as models write them: the formats, the grammar of an answer that must be a call, and how it is read.

hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>      Hermes, Qwen; one after the other
llama3   {"name": ..., "parameters": {...}}                            Llama 3.1 and later; or after <|python_tag|>
mistral  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]          or [TOOL_CALLS]name{...}, its later models
"""

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from heavypath.speculative.http.bodies.messages import Tool
from heavypath.speculative.processors.grammar import json_between, schema_source


class ToolFormat(NamedTuple):
    """The way in which a model writes its calls.

    marker, end: before and after a call
    arguments:   the key of its arguments
    sign:        what a chat template has that tells the model so, a regular expression
    bare:        whether a text that begins as a JSON object is a call
    """

    marker: str
    end: str
    arguments: str
    sign: str
    bare: bool = False


FORMATS = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>", "arguments", "<tool_call>"),
    "mistral": ToolFormat("[TOOL_CALLS]", "", "arguments", r"\[TOOL_CALLS\]"),
    "llama3": ToolFormat("<|python_tag|>", "", "parameters", r"<\|python_tag\|>|\"parameters\"", bare=True),
}


class Call(NamedTuple):
    """A call; arguments: a JSON object, as text."""

    name: str
    arguments: str

    def content(self) -> dict[str, Any]:
        """OpenAI's object, with an id of nine letters and digits, which Mistral's templates insist on."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template asks for; None where it has no tools, or says nothing of calls."""
    if not re.search(r"\btools\b", template):
        return None
    return next((each for each in FORMATS.values() if re.search(each.sign, template)), None)


def call_source(form: ToolFormat, tools: Sequence[Tool], tokenizer: PreTrainedTokenizerBase) -> str:
    """The llguidance source of one call of any of the tools. Raises ValueError for schemas beyond the limits."""
    calls = []
    for tool in tools:
        arguments = {"type": "object"} if tool.function.parameters is None else tool.function.parameters
        if "properties" in arguments:
            arguments = {"additionalProperties": False, **arguments}  # of which no tool would know what to do
        properties = {"name": {"const": tool.function.name}, form.arguments: arguments}
        call = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        calls.append(call)
    schema = {"anyOf": calls}
    if form.bare:
        return schema_source(schema, whitespace=False)

    def literal(text: str) -> str:
        special = text in tokenizer.all_special_tokens  # which no text spells
        return f"<[{tokenizer.convert_tokens_to_ids(text)}]>" if special else json.dumps(text)

    if form.end:
        return json_between(f'{literal(form.marker)} "\\n"', schema, f'"\\n" {literal(form.end)}')
    return json_between(f'{literal(form.marker)} "["', schema, '"]"')


def calls_in(text: str, form: ToolFormat) -> list[Call] | None:
    """The calls that a text from its first marker on consists of; None where it is anything else."""
    decoder, found, rest = json.JSONDecoder(), list[Call](), text.strip()
    try:
        while rest:
            for sign in (form.end, ";", ",", form.marker):
                rest = rest.removeprefix(sign).lstrip() if sign else rest
            if not rest:
                break
            name = re.match(r"([a-zA-Z0-9_.-]+)\s*(?:\[ARGS\])?\s*(?={)", rest)  # of Mistral's later models
            value, place = decoder.raw_decode(rest, name.end() if name else 0)
            rest = rest[place:].lstrip()
            for each in value if isinstance(value, list) else [value]:
                found.append(_call({"name": name[1], form.arguments: each} if name else each, form))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return found or None


def _call(value: Any, form: ToolFormat) -> Call:
    """Raises TypeError, KeyError or ValueError for what is none."""
    name = value["name"]
    arguments = value[form.arguments] if form.arguments in value else value.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError(f"no call: {value!r:.80}")
    return Call(name, json.dumps(arguments))


class Calls(NamedTuple):
    """The calls that a request's answers may have. forced: tools of which one must be called"""

    form: ToolFormat
    tokenizer: PreTrainedTokenizerBase
    forced: Sequence[Tool]

    @property
    def whole(self) -> bool:
        """True if the format's marker is a special token, so that texts are read with their special tokens."""
        return self.form.marker in self.tokenizer.all_special_tokens

    def source(self) -> str:
        """The grammar of a call, where one is forced."""
        return call_source(self.form, self.forced, self.tokenizer)

    def reader(self) -> "CallReader":
        """For one text."""
        special = [each for each in self.tokenizer.all_special_tokens if each not in (self.form.marker, self.form.end)]
        return CallReader(self.form, special if self.whole else ())


class CallReader:
    """Takes a text as it comes, and tells what is said in it from calls at its end.

    dropped: pieces that are left out, such as special tokens
    """

    def __init__(self, form: ToolFormat, dropped: Sequence[str] = ()):
        self._form, self._dropped = form, dropped
        self._held, self._has_begun, self._calls = "", False, False

    def add(self, text: str) -> str:
        """The part of the text so far that is certainly said, and was not before."""
        for each in self._dropped:
            text = text.replace(each, "")
        self._held += text
        if self._calls:
            return ""
        if self._form.bare and not self._has_begun:
            if not (begin := self._held.lstrip()):
                return ""
            self._has_begun, self._calls = True, begin.startswith("{")
            if self._calls:
                return ""
        marker, place = self._form.marker, self._held.find(self._form.marker)
        self._calls = place >= 0
        if not self._calls:
            most = min(len(marker) - 1, len(self._held))
            keep = next((size for size in range(most, 0, -1) if marker.startswith(self._held[-size:])), 0)
            place = len(self._held) - keep
        said, self._held = self._held[:place], self._held[place:]
        return said

    def end(self) -> tuple[str, list[Call]]:
        """The rest of what is said, and the calls. What begins as a call and is none has been said."""
        calls = calls_in(self._held, self._form) if self._calls else None
        return ("", calls) if calls else (self._held, [])
