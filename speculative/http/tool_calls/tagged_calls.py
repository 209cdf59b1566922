"""Read calls whose arguments are between tags, as Qwen3-Coder and GLM-4.5 write them.

A value may contain any text, including tags. It ends at the first closing tag that is followed by another tag of the
call.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from heavypath.speculative.http.tool_calls.arguments import typed
from heavypath.speculative.http.tool_calls.formats import Tags, ToolFormat
from heavypath.speculative.http.tool_calls.found import FUNCTION_NAME, Found, NoCall, NotYet, call_of

_SPACES = re.compile(r"\s*+")
_NAME = re.compile(FUNCTION_NAME)
MOST_KEY = 256  # characters of an argument's name


class _Cursor:
    """A position in a text. Text that does not fit raises NoCall, or NotYet if more text may make it fit."""

    def __init__(self, text: str, place: int, *, final: bool):
        self.text = text
        self.place = place
        self._final = final

    def spaces(self) -> None:
        found = _SPACES.match(self.text, self.place)
        self.place = self.place if found is None else found.end()

    def take(self, word: str) -> None:
        """Move the position past this word, which must be here."""
        self.take_one((word,))

    def take_one(self, words: Collection[str]) -> str:
        """Move the position past one of these words, which must be here; returns the word."""
        for word in words:
            if self.text.startswith(word, self.place):
                self.place += len(word)
                return word
        if any(word.startswith(self.text[self.place :]) for word in words):
            self.end()
        raise NoCall

    def name(self) -> str:
        """Read the function's name, and move the position past it. It is complete if another character follows."""
        found = _NAME.match(self.text, self.place)
        if found is None or found.end() == len(self.text):
            self.end(self.text[self.place :] == "" or found is not None)
        assert found is not None
        self.place = found.end()
        return found[0]

    def until(self, word: str, most: int) -> str:
        """Read up to a word, and move the position past it; returns the text before it.

        That text must be one line of at most `most` characters.
        """
        end = self.text.find(word, self.place)
        found = self.text[self.place : end if end >= 0 else None]
        if len(found) > most or "\n" in found:
            raise NoCall
        if end < 0:
            self.end()
        self.place = end + len(word)
        return found

    def value(self, end: str, after: Collection[str]) -> str:
        """Read up to the first tag `end` that one of the words in `after` follows; returns the text before the tag."""
        begin = self.place
        place = self.text.find(end, self.place)
        while place >= 0:
            found = _SPACES.match(self.text, place + len(end))
            rest = place + len(end) if found is None else found.end()
            if any(self.text.startswith(word, rest) for word in after):
                self.place = place + len(end)
                return self.text[begin:place]
            if len(self.text) - rest < max(map(len, after)) and any(
                word.startswith(self.text[rest:]) for word in after
            ):
                break
            place = self.text.find(end, place + 1)
        raise NoCall if self._final else NotYet

    def end(self, is_open: bool = True) -> None:
        """Raise NotYet if more text may come and `is_open`, otherwise NoCall: the text ends before what is expected."""
        raise NotYet if is_open and not self._final else NoCall


def read_tags(
    text: str,
    place: int,
    form: ToolFormat,
    tags: Tags,
    offered: Collection[str] | None,
    schemas: Mapping[str, Mapping[str, Any] | None],
    *,
    final: bool,
) -> Found:
    """Read the call at position `place` of a text, after its marker.

    offered: names of the tools; a name without a tag around it must be one of them. None for any name
    schemas: the JSON schemas of the tools' arguments, by name, which give values their types
    final:   whether the text is complete

    Raises NoCall if there is none, and NotYet if more text is needed to decide.
    """
    cursor = _Cursor(text, place, final=final)
    cursor.spaces()
    if tags.name[0]:
        cursor.take(tags.name[0])
        cursor.spaces()
    name = cursor.name()
    cursor.spaces()
    if tags.name[1]:
        cursor.take(tags.name[1])
    elif offered is not None and name not in offered:
        raise NoCall  # without a tag around it, the name must be that of a tool
    ends = tuple(each for each in (tags.end, form.end) if each)
    schema = schemas.get(name)
    arguments = dict[str, Any]()
    while True:
        cursor.spaces()
        before = cursor.place
        tag = cursor.take_one((tags.key[0], *ends))
        if tag in ends:
            end = before if tag == form.end else cursor.place
            return Found([call_of(name, arguments)], end)
        key = cursor.until(tags.key[1], MOST_KEY).strip()
        if tags.value[0]:
            cursor.spaces()
            cursor.take(tags.value[0])
        value = cursor.value(tags.value[1], (tags.key[0], *ends))
        if tags.lines:
            value = value.removeprefix("\n").removesuffix("\n")
        arguments[key] = typed(value, key, schema, json_unless_told=tags.json)
