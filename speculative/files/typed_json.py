"""Read JSON files from others and check their types, so that any mistake is a ValueError that says where it is.

A type describes what is expected: the fields of a dataclass, a NamedTuple or a TypedDict. Fields may be int, float,
str, bool, None, Any, list[T], tuple[T, ...], dict[str, T], dict[int, T], and unions of one of these and None.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from reprlib import repr as shortened
from types import NoneType, UnionType
from typing import Any, TypedDict, Union, get_args, get_origin, get_type_hints, is_typeddict

_PLAIN: dict[Any, set[type]] = {int: {int}, float: {int, float}, str: {str}, bool: {bool}, NoneType: {NoneType}}
_LIMITS = {int: 2**63, float: math.inf}  # the ranges of PyTorch's numbers; NaN is refused, too


class _Index(TypedDict):
    weight_map: dict[str, str]


def parsed(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for any other text, and for one that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: str | Path, kind: Any = dict[str, Any]) -> Any:
    """The value in a JSON file, checked to be of type `kind`; ValueError with the file's name if it is not."""
    try:
        return typed(parsed(Path(path).read_text(encoding="utf-8")), kind)
    except ValueError as error:
        raise ValueError(f"cannot read {str(path)!r}: {error}") from error


def weight_map(path: str | Path) -> dict[str, str]:
    """{tensor: file} from an index as `save_pretrained` writes it; ValueError if it names files of another folder."""
    files = read_json(path, _Index)["weight_map"]
    for file in files.values():
        if file in ("", "..") or Path(file).name != file:
            raise ValueError(f"{str(path)!r} names {file!r}, expected files of its own folder; fetch it again")
    return files


def typed(value: Any, kind: Any, name: str = "it") -> Any:
    """A JSON value, converted to type `kind`; ValueError, which calls it `name`, if it does not fit.

    An object for a dataclass or a NamedTuple must have exactly its fields; for a TypedDict it may have more.
    """
    if kind is Any or _fits(value, _plain(kind)):
        return value
    origin = get_origin(kind)
    inner = get_args(kind)
    if origin in (Union, UnionType):
        for other in (other for other in inner if not _plain(other)):
            return typed(value, other, name)
    if origin in (list, tuple) and isinstance(value, list):
        plain = _plain(inner[0])
        return origin(
            each if _fits(each, plain) else typed(each, inner[0], f"{name}[{index}]")
            for index, each in enumerate(value)
        )
    if origin is dict and isinstance(value, dict):
        if inner[0] is int and not all(key.isdecimal() for key in value):
            raise ValueError(f"{name} has the keys {shortened([*value])}, expected numbers")
        return {inner[0](key): typed(each, inner[1], f"{name}[{key!r}]") for key, each in value.items()}
    if isinstance(value, dict) and (names := _fields(kind)):
        missing = _required(kind) - value.keys()
        unknown = value.keys() - names.keys()
        if missing or (unknown and not is_typeddict(kind)):
            raise ValueError(f"{name} has {'no' if missing else 'an unknown'} field {min(missing or unknown)!r}")
        known = {key: typed(each, names[key], key) for key, each in value.items() if key in names}
        return value | known if is_typeddict(kind) else kind(**known)
    expected = kind.__name__ if isinstance(kind, type) and not inner else str(kind)
    raise ValueError(f"{name} is {shortened(value)}, expected {'an object' if _fields(kind) else expected}")


def _fits(value: Any, plain: set[type]) -> bool:
    kind = type(value)
    return kind in plain and (kind not in _LIMITS or abs(value) < _LIMITS[kind])


@cache
def _plain(kind: Any) -> set[type]:
    """The types of values that are valid without looking inside them."""
    if get_origin(kind) in (Union, UnionType):
        return {found for each in get_args(kind) for found in _plain(each)}
    return _PLAIN.get(kind, set())


@cache
def _fields(kind: Any) -> Mapping[str, Any]:
    """The fields of a dataclass, a NamedTuple or a TypedDict, with their types; empty for other types."""
    has_fields = is_typeddict(kind) or is_dataclass(kind) or hasattr(kind, "_fields")
    return get_type_hints(kind) if has_fields else {}


@cache
def _required(kind: Any) -> frozenset[str]:
    if is_typeddict(kind):
        return kind.__required_keys__
    if is_dataclass(kind):
        return frozenset(each.name for each in fields(kind) if each.default is each.default_factory is MISSING)
    return frozenset(kind._fields) - kind._field_defaults.keys()
