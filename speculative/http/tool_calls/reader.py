"""Split a text that arrives piece by piece into content and tool calls.

A marker that no call follows is content, and the search continues after it.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from heavypath.speculative.http.bodies.messages import Tool
from heavypath.speculative.http.text import beginning
from heavypath.speculative.http.tool_calls.forcing import call_source
from heavypath.speculative.http.tool_calls.formats import ToolFormat
from heavypath.speculative.http.tool_calls.found import Call, Found, NoCall, NotYet
from heavypath.speculative.http.tool_calls.json_calls import read_json
from heavypath.speculative.http.tool_calls.tagged_calls import read_tags

_SHORT = 128  # a possible call up to this length is examined with each piece of text
_MAY_END = re.compile(r"[]}>]")  # a longer one only when one of these arrives, with which a call ends


class CallReader:
    """Splits a text that arrives piece by piece into content and tool calls.

    form:     how the model writes calls; None if all text is content
    offered:  names of the tools; a call without a marker must be of one of them. None for any name
    schemas:  the schemas of the tools' arguments, by name
    parallel: whether the text may have several calls; otherwise only the first one is returned

    settled:  how many characters of the text precede its first call, or what may become one
    """

    def __init__(
        self,
        form: ToolFormat | None,
        offered: Collection[str] | None = None,
        *,
        schemas: Mapping[str, Mapping[str, Any] | None] | None = None,
        parallel: bool = True,
    ):
        self._form = form
        self._offered = offered
        self._schemas = schemas or {}
        self._parallel = parallel
        self._held = ""
        self._said = list[str]()
        self._follows = self._is_closed = False  # whether the held text follows a call, and that call's end marker
        self._calls: list[Call] = []
        self._told = self.settled = 0

    def add(self, text: str) -> str:
        """Add the next piece of text. Returns the new content; what may begin a call is held back."""
        waits = len(self._held) > _SHORT and not _MAY_END.search(text)
        self._held += text
        return "" if waits else self._read(final=False)

    def end(self) -> str:
        """Return the content that was held back, after the last piece."""
        return self._read(final=True)

    def new_calls(self) -> list[Call]:
        """The calls found since the last call of this method."""
        calls = self._calls if self._parallel else self._calls[:1]
        begin = self._told
        self._told = len(calls)
        return calls[begin:]

    def _read(self, *, final: bool) -> str:
        """Process the held text as far as it can be decided; returns content."""
        if self._form is None:
            self._say(len(self._held))
        else:
            with suppress(NotYet):
                while self._held:
                    (self._behind_call if self._follows else self._next)(self._form, final)
        said = "".join(self._said)
        self._said.clear()
        return said

    def _next(self, form: ToolFormat, final: bool) -> None:
        """Move the content before the next call to `_said`, and take the call. Raises NotYet if more text must come."""
        begin = 0
        openings = re.compile("|".join(map(re.escape, form.openings)))
        while (opening := openings.search(self._held, begin)) is not None:
            place = opening.start()
            try:
                found = self._found(form, opening[0], place, final=final)
            except NotYet:
                self._say(place)
                raise
            except NoCall as none:
                begin = opening.end() if none.end is None else none.end
            else:
                self._say(place)
                self._take(found.calls, found.end - place)
                return
        keep = 0 if final else beginning(self._held[begin:], form.openings)
        self._say(len(self._held) - keep)
        if keep:
            raise NotYet

    def _behind_call(self, form: ToolFormat, final: bool) -> None:
        """Process what follows a call: its end marker, another call, or content. Raises NotYet if more must come."""
        self._held = self._held.lstrip()
        while form.end and self._held.startswith(form.end):  # models also write the end marker twice
            self._held = self._held[len(form.end) :].lstrip()
            self._is_closed = True
        if not final and form.end.startswith(self._held):
            raise NotYet
        rest = self._held
        for sign in (";", ","):
            rest = rest.removeprefix(sign).lstrip()
        opening = next((each for each in form.openings if rest.startswith(each)), "")
        if not opening and not final and any(each.startswith(rest) for each in form.openings):
            raise NotYet
        if not rest:
            self._held = ""
        elif opening or (form.tags is None and rest[0] in "{["):
            try:
                found = self._found(form, opening, len(self._held) - len(rest), final=final)
            except NoCall:
                self._follows = False
            else:
                self._take(found.calls, found.end)
        else:
            self._follows = False

    def _found(self, form: ToolFormat, opening: str, place: int, *, final: bool) -> Found:
        """The calls at position `place` of the held text, where `opening` is. Raises NotYet and NoCall."""
        marked = opening == form.marker
        begin = place + (len(opening) if marked else 0)
        if form.tags is not None:
            return read_tags(self._held, begin, form, form.tags, self._offered, self._schemas, final=final)
        goes_on = self._follows and not self._is_closed and bool(form.end)
        return read_json(self._held, begin, form, self._offered, marked=marked or goes_on, final=final)

    def _take(self, calls: Sequence[Call], end: int) -> None:
        self._calls += calls
        self._held = self._held[end:]
        self._follows = True
        self._is_closed = False

    def _say(self, place: int) -> None:
        """Move the held text before `place` to the content."""
        self._said.append(self._held[:place])
        self._held = self._held[place:]
        if not self._calls:
            self.settled += place


class Calls(NamedTuple):
    """The tools that a request's answers may call, and how the model writes calls.

    form:     the format of calls; None if the tokenizer's response template is used, with which no call can be forced
    forced:   tools of which one must be called; empty if the model decides
    tools:    all tools
    parallel: whether an answer may have several calls; otherwise only the first one is returned
    """

    form: ToolFormat | None
    tokenizer: PreTrainedTokenizerBase
    forced: Sequence[Tool]
    tools: Sequence[Tool]
    parallel: bool = True

    def source(self) -> str:
        """The source of a grammar that forces a call of one of `forced`. Raises ValueError without a format."""
        if self.form is None:
            raise ValueError("how this model writes calls is not known here, so that none can be forced")
        return call_source(self.form, self.forced, self.tokenizer)

    def reader(self) -> CallReader:
        """Make a reader that splits one answer into content and calls."""
        schemas = {tool.function.name: tool.function.parameters for tool in self.tools}
        return CallReader(self.form, schemas.keys(), schemas=schemas, parallel=self.parallel)
