"""Checks of numbers that users give: of Python, of NumPy, or in a tensor of one element. Booleans are refused."""

from numbers import Integral, Real
from typing import Any


def real(name: str, value: object) -> float | int:
    """Return the value as a Python int or float; TypeError, with the argument's name, if it is not a real number."""
    plain = _plain(value)
    if isinstance(plain, bool) or not isinstance(plain, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return plain if isinstance(plain, int) else float(plain)


def whole(name: str, value: object) -> int:
    """Return the value as a Python int; TypeError, with the argument's name, if it is not an integer."""
    plain = _plain(value)
    if isinstance(plain, bool) or not isinstance(plain, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    return int(plain)


def _plain(value: Any) -> object:
    count = getattr(value, "size", None)  # of an array; a tensor has a method of this name
    if callable(count):
        count = getattr(value, "numel", count)()
    return value.item() if count == 1 and hasattr(value, "item") else value
