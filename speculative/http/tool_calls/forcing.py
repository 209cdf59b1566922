"""Make a grammar that forces an answer to be a call of one of some tools, in the model's format."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from heavypath.speculative.http.bodies.messages import Tool
from heavypath.speculative.http.tool_calls.alternatives import JOINED, Alternative, alternatives_of
from heavypath.speculative.http.tool_calls.arguments import STRING, listed, types_of, values_of
from heavypath.speculative.http.tool_calls.formats import Tags, ToolFormat
from heavypath.speculative.http.tool_calls.tagged_calls import MOST_KEY
from heavypath.speculative.processors.grammar import json_between, lark_source, schema_source
from heavypath.speculative.processors.grammar_limits import MOST_BYTES, check_schema

NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # dictionaries of schemas
VALUES = ("const", "enum", "default", "examples")  # plain values, without references


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
        arguments = {**(tool.function.parameters or {}), "type": "object"}  # other values are no arguments of a call
        if "properties" in arguments and not arguments.keys() & JOINED:
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
        self._characters = 0  # of all rules
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
        found = [self._arguments(each, schema) for each in alternatives_of(schema, schema)]
        if not found:
            raise ValueError(f"no arguments of tool {tool.function.name!r} follow its schema")
        name = " ".join([*self._between(self._tags.name, tool.function.name), '"\\n"'])
        end = self._literal(self._tags.end) if self._tags.end else ""
        return self._rule(f"{name} ({' | '.join(found)}) {end}")

    def _arguments(self, schemas: Alternative, root: Mapping[str, Any]) -> str:
        """The rule for the arguments of a call that follow all these schemas, in the order of their properties."""
        given = dict[str, Any]()
        required = list[str]()
        for schema in schemas:
            properties = schema.get("properties")
            for key, each in properties.items() if isinstance(properties, Mapping) else ():
                given[key] = {"allOf": [given[key], each]} if key in given else each
            required += [each for each in listed(schema.get("required")) if isinstance(each, str)]
        given |= {each: {} for each in required if each not in given}
        parts = list[str]()
        for key, each in given.items():
            self._check_key(key)
            value = self._value(each, root)
            if not value:
                raise ValueError(f"no value of argument {key!r:.80} follows its schema; leave it out")
            begin = " ".join(self._between(self._tags.key, key))
            between = '"\\n" ' if self._tags.value[0] else ""
            open_ = self._literal(self._tags.value[0]) if self._tags.value[0] else ""
            argument = self._rule(f'{begin} {between}{open_} {self._line}({value}) "\\n"')
            parts.append(argument if key in required else f"{argument}?")
        return self._rule(" ".join(parts) or '""')

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

    def _value(self, schema: Any, root: Mapping[str, Any]) -> str:
        """The rule for a value and the tag after it: plain text for a string, JSON for other types.

        Empty if no value follows the schema.
        """
        types = types_of(schema, root)
        if types and STRING not in types:
            return self._json(schema, root)
        written = []
        for schemas in alternatives_of(schema, root):
            types = _common_types(schemas, root)
            if types is None or STRING in types:
                written.append(self._text(schemas))
            elif types:
                written.append(self._json({"allOf": schemas}, root))
        return " | ".join(written)

    def _json(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        """The rule for a value as JSON, followed by the closing tag."""
        moved = _moved(schema, "#/$defs/tool")
        if moved != schema:
            moved |= {"$defs": {"tool": _moved(root, "#/$defs/tool")}}
        check_schema(moved)
        content = json.dumps({**moved, "x-guidance": {"whitespace_flexible": False}})
        return f"{self._rule(f'%json {content}')} {self._close}"

    def _text(self, schemas: Alternative) -> str:
        """The rule for text that follows all these schemas and does not contain the closing tag, and for that tag."""
        tag = re.escape(self._tags.value[1]).replace("/", r"\/")
        allowed = ["/(?s:.*)/", f"~/(?s:.*){tag}(?s:.*)/"]
        for schema in schemas:
            least = schema.get("minLength", 0)
            most = schema.get("maxLength", "")
            allowed.append(rf"/(?s:.{{{least},{most}}})/")
            if isinstance(pattern := schema.get("pattern"), str):
                allowed.append(f"/{_whole_texts(pattern)}/")
            if values := values_of(schema):
                texts = [each if isinstance(each, str) else json.dumps(each) for each in values]
                allowed.append(f"({' | '.join(map(json.dumps, texts))})")
        name = f"TEXT{len(self._rules)}"
        self._add(f"{name}: {' & '.join(allowed)}")
        if "<[" in self._close:
            return f"{name} {self._close}"
        self._add(f"WITH_{name}: {name} {self._close}")  # one terminal: text alone may be empty
        return f"WITH_{name}"

    def _rule(self, content: str) -> str:
        name = f"rule{len(self._rules)}"
        self._add(f"{name}: {content}")
        return name

    def _add(self, rule: str) -> None:
        self._rules.append(rule)
        self._characters += len(rule)
        if self._characters > MOST_BYTES:  # before it takes long, and memory
            raise ValueError(f"a call of these tools cannot be forced: its grammar has more than {MOST_BYTES} bytes")


def _common_types(schemas: Alternative, root: Mapping[str, Any]) -> set[str] | None:
    """The types of values that follow all these schemas; None if none of them has types."""
    found: set[str] | None = None
    for schema in schemas:
        types = types_of(schema, root)
        if "number" in types:
            types.add("integer")
        if types:
            found = types if found is None else found & types
    return found


def _whole_texts(pattern: str) -> str:
    """A Lark regular expression of all texts in which a JSON schema's pattern is found: ^ and $ are at their ends."""
    choices = []
    for choice in _choices(pattern):
        begin = "" if choice.startswith("^") else "(?s:.*)"
        ends = re.search(r"(?<!\\)(\\\\)*\$$", choice) is not None
        end = "" if ends else "(?s:.*)"
        inner = choice.removeprefix("^")
        choices.append(f"{begin}(?:{inner[:-1] if ends else inner}){end}")
    return re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], "|".join(choices), flags=re.DOTALL)


def _choices(pattern: str) -> list[str]:
    """The parts of a regular expression between the | that stand in no group."""
    found = [""]
    deep = 0
    for part in re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", pattern, flags=re.DOTALL):
        deep += (part == "(") - (part == ")")
        if part == "|" and deep == 0:
            found.append("")
        else:
            found[-1] += part
    return found


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
