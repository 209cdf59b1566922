"""Calls of tools as models write them: the formats, the grammar of an answer that must be a call, and how it is read.

hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>      Hermes, Qwen; one after the other
llama3   {"name": ..., "parameters": {...}}                            Llama 3.1 and later; or after <|python_tag|>
mistral  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]          or [TOOL_CALLS]name{...}, its later models
"""

import json
import re
import uuid
from collections.abc import Collection, Sequence
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

NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # have schemas by their names
VALUES = ("const", "enum", "default", "examples")  # are values, in which nothing is a reference


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
    calls, schemas = [], dict[str, Any]()
    for number, tool in enumerate(tools):
        arguments = {"type": "object"} if tool.function.parameters is None else tool.function.parameters
        if "properties" in arguments:
            arguments = {"additionalProperties": False, **arguments}  # of which no tool would know what to do
        # References are paths from the root of a schema, which is not a tool's own any more.
        moved = _moved(arguments, f"#/$defs/{number}")
        if moved != arguments:
            schemas[str(number)], arguments = moved, {"$ref": f"#/$defs/{number}"}
        properties = {"name": {"const": tool.function.name}, form.arguments: arguments}
        call = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        calls.append(call)
    schema = {"anyOf": calls} | ({"$defs": schemas} if schemas else {})
    if form.bare:
        return schema_source(schema, whitespace=False)

    def literal(text: str) -> str:
        special = text in tokenizer.all_special_tokens  # which no text spells
        return f"<[{tokenizer.convert_tokens_to_ids(text)}]>" if special else json.dumps(text)

    if form.end:
        return json_between(f'{literal(form.marker)} "\\n"', schema, f'"\\n" {literal(form.end)}')
    return json_between(f'{literal(form.marker)} "["', schema, '"]"')


def _moved(schema: Any, root: str, *, named: bool = False) -> Any:
    """A schema whose references are paths from another schema's root, in which it is at `root`.

    named: if it is no schema, but has one under each of its keys
    """
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if not named and key in VALUES:
            moved[key] = value
        elif not named and key == "$ref" and isinstance(value, str) and re.match(r"#(/|$)", value):
            moved[key] = root + value[1:]
        else:
            moved[key] = _moved(value, root, named=not named and key in NAMED)
    return moved


def calls_in(text: str, form: ToolFormat, offered: Collection[str] | None = None) -> tuple[str, list[Call]]:
    """The text that is said, and the calls, from a text's first marker on. All is said where a marked call is none.

    offered: names of the tools; a bare object is a call only if it calls one of them. None for any name
    """
    found, said, rest = list[Call](), list[str](), text.strip()
    while True:
        after = rest = rest.removeprefix(form.end).lstrip()
        for sign in (";", ","):
            rest = rest.removeprefix(sign).lstrip()
        marked = rest.startswith(form.marker)
        rest = rest.removeprefix(form.marker).lstrip()
        if not rest:
            break
        try:
            calls, place = _first_calls(rest, form, offered, named=marked or not found)
        except (ValueError, TypeError, KeyError, RecursionError):
            if marked or form.bare or not found:
                return text, []
            place = after.find(form.marker)
            place = len(after) if place < 0 else place
            said.append(after[:place])
            rest = after[place:]
        else:
            found += calls
            rest = rest[place:].lstrip()
    return ("".join(said), found) if found else (text, [])


def _first_calls(
    text: str, form: ToolFormat, offered: Collection[str] | None, *, named: bool
) -> tuple[list[Call], int]:
    """The calls that a text begins with, a list or one, and where they end; named: if a name may come first.

    Raises what `_call` raises.
    """
    # The spaces have one way to be matched, so that many of them take no longer than they must.
    name = re.match(r"([a-zA-Z0-9_.-]+)\s*(?:\[ARGS\]\s*)?(?={)", text) if named else None  # Mistral's later models
    value, place = json.JSONDecoder().raw_decode(text, name.end() if name else 0)
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError("no call in an empty list")
    return [_call({"name": name[1], form.arguments: each} if name else each, form, offered) for each in values], place


def _call(value: Any, form: ToolFormat, offered: Collection[str] | None) -> Call:
    """Raises TypeError, KeyError or ValueError for what is none."""
    name = value["name"]
    is_offered = offered is None or name in offered
    if form.bare and not (is_offered and value.keys() & {form.arguments, "arguments"}):
        raise ValueError(f"an answer in JSON, no call: {value!r:.80}")
    arguments = value[form.arguments] if form.arguments in value else value.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError(f"no call: {value!r:.80}")
    return Call(name, json.dumps(arguments, allow_nan=False))  # NaN and 1e999 are read, and have no JSON


class Calls(NamedTuple):
    """The calls that a request's answers may have.

    forced:   tools of which one must be called
    offered:  the names of all tools
    parallel: whether an answer may have several calls; only its first one is told otherwise
    """

    form: ToolFormat
    tokenizer: PreTrainedTokenizerBase
    forced: Sequence[Tool]
    offered: frozenset[str]
    parallel: bool = True

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
        return CallReader(self.form, special if self.whole else (), self.offered, parallel=self.parallel)


class CallReader:
    """Takes a text as it comes, and tells what is said in it from calls at its end.

    dropped: pieces that are left out, such as special tokens
    offered: see `calls_in`
    parallel: see `Calls`
    """

    def __init__(
        self,
        form: ToolFormat,
        dropped: Sequence[str] = (),
        offered: Collection[str] | None = None,
        *,
        parallel: bool = True,
    ):
        self._form, self._dropped, self._offered, self._parallel = form, dropped, offered, parallel
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
        """The rest of what is said, also after calls, and the calls. What begins as a call and is none is said."""
        said, calls = calls_in(self._held, self._form, self._offered) if self._calls else (self._held, [])
        return said, calls if self._parallel else calls[:1]
