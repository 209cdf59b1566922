"""Refuse grammars before llguidance reads them that could end the process or take minutes to compile.

llguidance follows references and nested schemas by calling itself. So a long chain of either overflows the stack (at
8 MiB after 2,000 containers or more). Its automaton for the multiples of N has N states, for those of several numbers
as many as their least common multiple. Nothing here calls itself.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

MOST_BYTES = 1 << 16  # of a source, for schemas, regular expressions and Lark grammars alike
MOST_VALUES = 10_000
MOST_NESTED = 100  # containers around a value; llguidance's own limit is 128
MOST_LINKS = 64  # references that lead to nothing but another reference
MOST_ON_A_PATH = 800  # containers, by way of references
LARGEST_MULTIPLE = 10_000
MOST_RULES = 1_000  # of a Lark grammar


def check_source(source: str, what: str) -> None:
    """Raise ValueError for a source that is too long."""
    if (size := len(source.encode(errors="surrogatepass"))) > MOST_BYTES:
        raise ValueError(f"the {what} cannot be followed: expected at most {MOST_BYTES} bytes, got {size}; shorten it")


def check_lark(grammar: str) -> None:
    """Raise ValueError for a Lark grammar with more rules than llguidance can nest."""
    if (rules := grammar.count(":")) > MOST_RULES:  # a rule has a colon at least
        raise ValueError(f"the Lark grammar cannot be followed: expected at most {MOST_RULES} colons, got {rules}")


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise ValueError for a schema that is too large, too deep by itself or by its references, or counts too far."""
    containers, heights = _containers(schema)
    height_of = {id(each): height for each, height in zip(containers, heights, strict=True)}
    if heights[0] > MOST_NESTED:
        raise _refusal(f"its values are nested {heights[0]} deep, and may be {MOST_NESTED}")
    objects = [each for each in containers if isinstance(each, Mapping)]
    names = {each["$ref"] for each in objects if isinstance(each.get("$ref"), str)}
    targets = {name: _target(schema, name) for name in names}
    for each in targets.values():
        links = 0
        while isinstance(each, Mapping) and isinstance(name := each.get("$ref"), str):
            links, each = links + 1, targets[name]
            if links > MOST_LINKS:
                raise _refusal(f"more than {MOST_LINKS} references lead to nothing but another reference")
    # No path goes through a target twice. A name that is no path to a value here may be any value's.
    distinct = {id(each): height_of.get(id(each), 0) for each in targets.values() if each is not None}
    unknown = sum(each is None for each in targets.values())
    if (depth := sum(distinct.values()) + (1 + unknown) * heights[0]) > MOST_ON_A_PATH:
        raise _refusal(f"with its references it may be nested {depth} deep, and may be {MOST_ON_A_PATH}")
    _check_multiples([each["multipleOf"] for each in objects if "multipleOf" in each])


def _containers(schema: Mapping[str, Any]) -> tuple[list[Any], list[int]]:
    """All objects and arrays, each after the one that it is in, and how many are nested in each, itself included."""
    containers, parents = [], []
    values, waiting = 0, [(schema, -1)]
    while waiting:
        value, parent = waiting.pop()
        values += 1
        if isinstance(value, Mapping | list | tuple):
            if values + len(waiting) + len(value) > MOST_VALUES:
                raise _refusal(f"it has more than {MOST_VALUES} values")
            waiting += [(each, len(containers)) for each in _values(value)]
            containers.append(value)
            parents.append(parent)
    heights = [1] * len(containers)
    for place in range(len(containers) - 1, 0, -1):
        heights[parents[place]] = max(heights[parents[place]], heights[place] + 1)
    return containers, heights


def _values(container: Mapping[str, Any] | Sequence[Any]) -> Iterator[Any]:
    return iter(container.values() if isinstance(container, Mapping) else container)


def _target(schema: Mapping[str, Any], name: str) -> Any:
    """The meaning of a reference, if it is a path from the schema's beginning (RFC 6901), else None."""
    address, _, path = name.partition("#")
    if address or (path and not path.startswith("/")):
        return None
    value: Any = schema
    for part in unquote(path).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list | tuple) and key.isdecimal() and len(key) < 6 and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def _check_multiples(given: list[Any]) -> None:
    """Count the states: the numbers' least common multiple, without the tens in it, each of which is one digit."""
    numbers = [Decimal(str(each)) for each in {each for each in given if _is_number(each)} if each]
    if not numbers:
        return
    digits = max(0, *(-each.as_tuple().exponent for each in numbers))  # type: ignore[operator]
    common = math.lcm(*(int(Fraction(each) * 10**digits) for each in numbers))
    while common % 10 == 0:
        common //= 10
    if common > LARGEST_MULTIPLE:
        several = "the least common multiple of all multipleOf" if len(numbers) > 1 else "multipleOf"
        raise _refusal(f"{several}, without its factors of ten, may be at most {LARGEST_MULTIPLE}")


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _refusal(reason: str) -> ValueError:
    return ValueError(f"the JSON schema cannot be followed: {reason}; make it simpler")
