"""Read calls in JSON: an object, a list of objects, or a name followed by the object of its arguments."""

import json
import re
from collections.abc import Collection
from typing import Any

from heavypath.speculative.http.tool_calls.formats import ToolFormat
from heavypath.speculative.http.tool_calls.found import FUNCTION_NAME, Call, Found, NoCall, NotYet, call_of

_DECODER = json.JSONDecoder()
# Mistral's later models write a name first. The quantifiers are possessive, so that many spaces cause no backtracking.
_NAMED = re.compile(rf"({FUNCTION_NAME}+)\s*+(?:\[CALL_ID\]\s*+[a-zA-Z0-9]++\s*+)?(?:\[ARGS\]\s*+)?(?={{)")
_MAYBE_NAMED = re.compile(r"[a-zA-Z0-9_.-]++\s*+(?:\[[A-Z_]*+(?:\]\s*+(?:[a-zA-Z0-9]++\s*+)?(?:\[[A-Z]*+\]?+\s*+)?)?)?")
_SPACES = re.compile(r"\s*+")
_WORD = 9  # length of JSON's longest word, -Infinity; an error is reported at the beginning of a word


def read_json(
    text: str, place: int, form: ToolFormat, offered: Collection[str] | None, *, marked: bool, final: bool
) -> Found:
    """Read the JSON calls at position `place` of a text.

    offered: names of the tools; None for any name
    marked:  whether a marker precedes the call; without one it must be of an offered tool and have arguments
    final:   whether the text is complete

    Raises NoCall if there is none, and NotYet if more text is needed to decide.
    """
    begin = place = _end(_SPACES, text, place)
    name = _NAMED.match(text, place) if marked else None
    if name is not None:
        place = name.end()
    if text[place : place + 1] not in ("{", "["):
        maybe = place == len(text) or (marked and _MAYBE_NAMED.fullmatch(text, begin))
        raise NotYet if maybe and not final else NoCall
    try:
        value, end = _DECODER.raw_decode(text, place)
    except json.JSONDecodeError as error:
        unfinished = error.msg.startswith("Unterminated") or error.pos >= len(text.rstrip()) - _WORD
        raise (NotYet if unfinished and not final else NoCall) from None
    except RecursionError:
        raise NoCall from None
    values = value if isinstance(value, list) and name is None else [value]
    try:
        calls = [
            call_of(name[1], each) if name is not None else _call(each, form, offered, marked=marked) for each in values
        ]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise NoCall(end) from None
    if not calls:
        raise NoCall(end)
    return Found(calls, end)


def _end(pattern: re.Pattern[str], text: str, place: int) -> int:
    found = pattern.match(text, place)
    return place if found is None else found.end()


def _call(value: Any, form: ToolFormat, offered: Collection[str] | None, *, marked: bool) -> Call:
    """The call that a decoded JSON value describes. Raises TypeError, KeyError or ValueError if it describes none."""
    name = value["name"]
    is_certain = marked and not form.bare
    has_arguments = bool(value.keys() & {form.arguments, "arguments"})
    if not is_certain and not (has_arguments and (offered is None or name in offered)):
        raise ValueError(f"an answer in JSON, no call: {value!r:.80}")
    return call_of(name, value[form.arguments] if form.arguments in value else value.get("arguments", {}))
