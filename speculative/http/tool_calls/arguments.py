"""Convert argument values that a model wrote as text to the types of the tool's JSON schema."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

STRING = "string"
_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}(\.0*)?")
_KINDS = {bool: "boolean", int: "integer", float: "number", str: STRING, list: "array", dict: "object"}


def schema_of(key: str, schema: Mapping[str, Any] | None) -> Any:
    """The schema of argument `key`, found in the schema of all arguments of a tool; None if it has no schema."""
    if schema is None:
        return None
    named = []
    others = []
    for each in _parts(schema, schema):
        properties = each.get("properties")
        more = each.get("additionalProperties")
        if isinstance(properties, Mapping) and key in properties:
            named.append(properties[key])
        elif isinstance(more, Mapping):
            others.append(more)
    found = named or others
    return found[0] if len(found) == 1 else {"anyOf": found} if found else None


def types_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """The names of the JSON types, such as "integer", that a schema allows for a value; empty if it restricts none.

    root: the schema of all arguments, to which references are relative
    """
    found = set[str]()
    for each in _parts(schema, root):
        if each.get("nullable") is True:
            found.add("null")
        declared = each.get("type")
        names = declared if isinstance(declared, list) else [declared]
        own = {name for name in names if isinstance(name, str)}
        if not own:
            own = {"null" if value is None else _KINDS.get(type(value), STRING) for value in values_of(each)}
        found |= own
    return found


def _parts(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A schema of a value, those that it refers to, and those of which the value must follow one or all."""
    waiting = [schema]
    seen = set[int]()
    while waiting:
        each = waiting.pop()
        if not isinstance(each, Mapping) or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        for name in ("anyOf", "oneOf", "allOf"):
            waiting += listed(each.get(name))
        if isinstance(reference := each.get("$ref"), str):
            waiting.append(referred(reference, root))


def values_of(schema: Mapping[str, Any]) -> list[Any]:
    """The values that a schema lists; empty if it lists none."""
    return [schema["const"]] if "const" in schema else listed(schema.get("enum"))


def listed(value: Any) -> list[Any]:
    """The value if it is a list, otherwise an empty list."""
    return value if isinstance(value, list) else []


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of schema `root` that a reference such as "#/$defs/name" points to; None if it points to nothing."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for part in filter(None, reference[1:].split("/")):
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found


def typed(value: str, key: str, schema: Mapping[str, Any] | None, *, json_unless_told: bool) -> Any:
    """Convert the value of argument `key` from text to the first type of its schema that fits; otherwise return it.

    A text that the schema lists stays text, whatever other types it allows. Types are tried in the order null, boolean,
    integer, number, object, array.

    schema: the schema of all arguments of the tool; None if it has none
    json_unless_told: whether to read a value without a schema as JSON
    """
    own = schema_of(key, schema)
    types = types_of(own, schema or {})
    if not types:
        return _json(value, value) if json_unless_told else value
    if any(value == each for part in _parts(own, schema or {}) for each in values_of(part)):
        return value
    word = value.strip()
    if "null" in types and word.lower() in ("null", "none"):
        return None
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower() == "true"
    if "integer" in types and _INTEGER.fullmatch(word):
        return int(word.partition(".")[0])
    if "number" in types and (number := _number(word)) is not None:
        return number
    if types & {"object", "array"}:
        found = _json(word, None)
        if "object" in types and isinstance(found, dict):
            return found
        if "array" in types and isinstance(found, list):
            return found
    return value


def _number(word: str) -> float | None:
    if _INTEGER.fullmatch(word) and "." not in word:
        return int(word)
    try:
        found = float(word)
    except ValueError:
        return None
    return found if math.isfinite(found) and "_" not in word and word.isascii() else None


def _json(text: str, otherwise: Any) -> Any:
    """The value of JSON text; `otherwise` for text that is not JSON, or has numbers that JSON cannot express."""
    try:
        found = json.loads(text)
        json.dumps(found, allow_nan=False)
    except (ValueError, RecursionError):
        return otherwise
    return found
