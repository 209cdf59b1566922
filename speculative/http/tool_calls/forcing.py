"""Make a grammar that forces an answer to be a call of one of some tools, in the model's format."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from heavypath.speculative.http.bodies.messages import Tool
from heavypath.speculative.http.tool_calls.arguments import STRING, referred, types_of
from heavypath.speculative.http.tool_calls.formats import Tags, ToolFormat
from heavypath.speculative.http.tool_calls.tagged_calls import MOST_KEY
from heavypath.speculative.processors.grammar import json_between, lark_source, schema_source
from heavypath.speculative.processors.grammar_limits import check_schema

NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # dictionaries of schemas
VALUES = ("const", "enum", "default", "examples")  # plain values, without references
MOST_LINKS = 16  # depth up to which references and unions are followed; below that any text is allowed


def call_source(form: ToolFormat, tools: Sequence[Tool], tokenizer: PreTrainedTokenizerBase) -> str:
    """The source, for llguidance, of a grammar whose only texts are calls of one of the tools, in the model's format.

    Raises ValueError for schemas beyond the limits.
    """

    def literal(text: str) -> str:
        special = text in tokenizer.all_special_tokens  # special tokens cannot be written as text
        return f"<[{tokenizer.convert_tokens_to_ids(text)}]>" if special else json.dumps(text)

    if form.tags is not None:
        return _TaggedCalls(form, form.tags, literal).source(tools)
    schema = _schema_of_calls(form, tools)
    if form.bare:
        return schema_source(schema, whitespace=False)
    if form.end:
        return json_between(f'{literal(form.marker)} "\\n"', schema, f'"\\n" {literal(form.end)}')
    return json_between(f'{literal(form.marker)} "["', schema, '"]"')


def _schema_of_calls(form: ToolFormat, tools: Sequence[Tool]) -> dict[str, Any]:
    """The JSON schema of one call of any of the tools: an object with name and arguments."""
    calls = []
    schemas = dict[str, Any]()
    for number, tool in enumerate(tools):
        arguments = {"type": "object", **(tool.function.parameters or {})}  # a schema without a type allows any value
        if "properties" in arguments:
            arguments = {"additionalProperties": False, **arguments}  # a tool could not use further arguments
        # References are paths from the root of a schema, and the tool's schema is no longer the root.
        moved = _moved(arguments, f"#/$defs/{number}")
        if moved != arguments:
            schemas[str(number)], arguments = moved, {"$ref": f"#/$defs/{number}"}
        properties = {"name": {"const": tool.function.name}, form.arguments: arguments}
        call = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        calls.append(call)
    return {"anyOf": calls} | ({"$defs": schemas} if schemas else {})


class _TaggedCalls:
    """Makes Lark rules for calls whose arguments are between tags. Arguments come in the order of the tool's schema.

    literal: returns a text as a Lark literal, or a special token by its id
    """

    def __init__(self, form: ToolFormat, tags: Tags, literal: Callable[[str], str]):
        self._form = form
        self._tags = tags
        self._literal = literal
        self._rules: list[str] = []
        self._line = '"\\n" ' if tags.lines else ""
        self._close = f"{self._line}{literal(tags.value[1])}"

    def source(self, tools: Sequence[Tool]) -> str:
        """The source, for llguidance, of the grammar of a call of one of the tools."""
        calls = " | ".join(self._call(tool) for tool in tools)
        form = self._form
        start = f'start: {self._literal(form.marker)} {self._line}({calls}) "\\n" {self._literal(form.end)}'
        return lark_source("\n".join([start, *self._rules, ""]))

    def _call(self, tool: Tool) -> str:
        schema = tool.function.parameters or {}
        properties = schema.get("properties")
        given = dict(properties) if isinstance(properties, Mapping) else {}
        required = [each for each in schema.get("required") or () if isinstance(each, str)]
        given |= {each: {} for each in required if each not in given}
        parts = [*self._between(self._tags.name, tool.function.name), '"\\n"']
        for key, each in given.items():
            self._check_key(key)
            begin = " ".join(self._between(self._tags.key, key))
            between = '"\\n" ' if self._tags.value[0] else ""
            open_ = self._literal(self._tags.value[0]) if self._tags.value[0] else ""
            argument = self._rule(f'{begin} {between}{open_} {self._line}({self._value(each, schema)}) "\\n"')
            parts.append(argument if key in required else f"{argument}?")
        return self._rule(" ".join([*parts, *([self._literal(self._tags.end)] if self._tags.end else [])]))

    def _check_key(self, key: str) -> None:
        """Raise ValueError for an argument's name that `read_tags` would not read as it is written."""
        end = self._tags.key[1]
        if end in key or "\n" in key or key != key.strip() or len(key) > MOST_KEY:
            raise ValueError(
                f"this model writes the names of arguments in tags, and cannot write {key!r:.80}: expected one line of "
                f"at most {MOST_KEY} characters, without {end} and without spaces around it"
            )

    def _between(self, tags: tuple[str, str], text: str) -> list[str]:
        before, after = tags
        parts = [self._literal(before) if before else "", json.dumps(text), self._literal(after) if after else ""]
        return [each for each in parts if each]

    def _value(self, schema: Any, root: Mapping[str, Any], deep: int = 0) -> str:
        """The rule for a value and the tag after it: plain text for a string, JSON for other types."""
        while isinstance(schema, Mapping) and isinstance(name := schema.get("$ref"), str) and deep < MOST_LINKS:
            schema = referred(name, root)
            deep += 1
        if not isinstance(schema, Mapping):
            return self._text({})
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values:
            written = [json.dumps(each if isinstance(each, str) else json.dumps(each)) for each in values]
            return f"({' | '.join(written)}) {self._close}"
        for name in ("anyOf", "oneOf"):
            if (each := schema.get(name)) and deep < MOST_LINKS:
                return " | ".join(self._value(one, root, deep + 1) for one in each)
        types = types_of(schema, root)
        if STRING in types or not types:
            return self._text(schema)
        moved = _moved(schema, "#/$defs/tool")
        if moved != schema:
            moved |= {"$defs": {"tool": _moved(root, "#/$defs/tool")}}
        check_schema(moved)
        content = json.dumps({**moved, "x-guidance": {"whitespace_flexible": False}})
        return f"{self._rule(f'%json {content}')} {self._close}"

    def _text(self, schema: Mapping[str, Any]) -> str:
        """The rule for text that does not contain the closing tag, followed by that tag."""
        least = schema.get("minLength", 0)
        most = schema.get("maxLength", "")
        pattern = schema.get("pattern")
        allowed = [rf"/(?s:.{{{least},{most}}})/"]
        if isinstance(pattern, str):
            begin = "" if pattern.startswith("^") else "(?s:.*)"
            end = "" if pattern.endswith("$") else "(?s:.*)"
            inner = pattern.removeprefix("^").removesuffix("$").replace("/", r"\/")
            allowed.append(f"/{begin}(?:{inner}){end}/")
        tag = re.escape(self._tags.value[1]).replace("/", r"\/")
        allowed.append(f"~/(?s:.*){tag}(?s:.*)/")
        name = f"TEXT{len(self._rules)}"
        self._rules.append(f"{name}: {' & '.join(allowed)}")
        if "<[" in self._close:
            return f"{name} {self._close}"
        self._rules.append(f"WITH_{name}: {name} {self._close}")  # one terminal: text alone may be empty
        return f"WITH_{name}"

    def _rule(self, content: str) -> str:
        name = f"rule{len(self._rules)}"
        self._rules.append(f"{name}: {content}")
        return name


def _moved(schema: Any, root: str, *, named: bool = False) -> Any:
    """A schema with its references rewritten, after it was moved into another schema at the path `root`.

    named: whether this is not a schema itself, but a dictionary of schemas
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
