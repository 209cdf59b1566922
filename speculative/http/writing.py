"""Writing of answers, as JSON: of long ones in a thread, a piece at a time, so that the event loop goes on.

An answer may have log-probabilities of hundreds of thousands of tokens. The standard library's encoder lets no other
thread run until it is through, and neither does its garbage collector. So a list of places of a text may be a `map`,
each of whose objects is made, written and gone before the next one.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

FEW = 16  # places of texts with log-probabilities, which are written at once
LEVELS = 5  # of objects and lists, down to those of one place


class Writing:
    """Writes the answers of a server."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "writing")

    async def written(self, make: Callable[[], Any], places: int) -> str:
        """The JSON of what a function makes, which has the log-probabilities of so many places."""
        if places <= FEW:
            return compact(make())
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: "".join(in_pieces(make())))


def compact(content: Any) -> str:
    """JSON in ASCII alone, which also writes what a client sent as half a character; a `map` as a list."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False, default=list)


def in_pieces(content: Any, levels: int = LEVELS) -> Iterator[str]:
    """The text of `compact`; a piece has no more than what is so many levels below."""
    if not levels or not isinstance(content, dict | list | map):
        yield compact(content)
        return
    is_object, before = isinstance(content, dict), ""
    yield "{" if is_object else "["
    for each in content.items() if is_object else content:
        name, value = each if is_object else (None, each)
        yield f"{before}{compact(name)}:" if is_object else before
        yield from in_pieces(value, levels - 1)
        before = ","
    yield "}" if is_object else "]"
