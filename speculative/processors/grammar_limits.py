"""Refuse grammars that would crash the process in llguidance, or take minutes to compile.

llguidance follows references and nested schemas by recursion. So a long chain of either overflows the stack (one of
8 MiB after 2,000 containers or more). Its automaton for the multiples of N has N states; for the multiples of several
numbers, their least common multiple. Nothing in this file is recursive.
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
MOST_LINKS = 64  # of a chain of references in which each leads only to the next one
MOST_ON_A_PATH = 800  # containers around a value, if references are followed
LARGEST_MULTIPLE = 10_000
MOST_RULES = 1_000  # of a Lark grammar


def check_source(source: str, what: str) -> None:
    """Raise ValueError for a source of more than `MOST_BYTES`. what: the name of the source in the message."""
    if (size := len(source.encode(errors="surrogatepass"))) > MOST_BYTES:
        raise ValueError(f"the {what} cannot be followed: expected at most {MOST_BYTES} bytes, got {size}; shorten it")


def check_lark(grammar: str) -> None:
    """Raise ValueError for a Lark grammar with more rules than llguidance can nest."""
    if (rules := grammar.count(":")) > MOST_RULES:  # a rule has a colon at least
        raise ValueError(f"the Lark grammar cannot be followed: expected at most {MOST_RULES} colons, got {rules}")


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise ValueError for a JSON schema beyond one of the limits above: values, nesting, references, or multiples."""
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
            links += 1
            each = targets[name]
            if links > MOST_LINKS:
                raise _refusal(f"more than {MOST_LINKS} references lead to nothing but another reference")
    # No path goes through a target twice. A reference that `_target` cannot follow may lead to any value.
    distinct = {id(each): height_of.get(id(each), 0) for each in targets.values() if each is not None}
    unknown = sum(each is None for each in targets.values())
    if (depth := sum(distinct.values()) + (1 + unknown) * heights[0]) > MOST_ON_A_PATH:
        raise _refusal(f"with its references it may be nested {depth} deep, and may be {MOST_ON_A_PATH}")
    _check_multiples([each["multipleOf"] for each in objects if "multipleOf" in each])


def _containers(schema: Mapping[str, Any]) -> tuple[list[Any], list[int]]:
    """All objects and arrays, parents before children, and the height of each: 1 if it contains no other."""
    containers = []
    parents = []
    values = 0
    waiting = [(schema, -1)]
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
    for index in range(len(containers) - 1, 0, -1):
        heights[parents[index]] = max(heights[parents[index]], heights[index] + 1)
    return containers, heights


def _values(container: Mapping[str, Any] | Sequence[Any]) -> Iterator[Any]:
    return iter(container.values() if isinstance(container, Mapping) else container)


def _target(schema: Mapping[str, Any], name: str) -> Any:
    """The value that a reference points to, if it is a JSON pointer within the schema (RFC 6901), else None."""
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
    """Raise ValueError if the numbers' least common multiple, without its factors of 10, is above the limit.

    That is the number of states of the automaton. A factor of 10 adds only one digit.
    """
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
