"""Read answers by the tokenizer's `response_template`, with transformers' parser."""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from heavypath.speculative.http.answer_texts import AnswerParts
from heavypath.speculative.http.tool_calls import Call
from heavypath.speculative.http.tool_calls.found import call_of

CONTENT = "content"
CALLS = "tool_calls"
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_UNREADABLE = (ValueError, TypeError, KeyError, RecursionError)  # raised by the parser for an invalid region


def closes_of(template: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts that end thinking, from a tokenizer's response template; empty if it has no thinking."""
    found = [template["fields"].get(name, {}).get("close", ()) for name in REASONING_FIELDS]
    words: list[str] = []
    for each in found:
        words += [each] if isinstance(each, str) else each
    return tuple(words)


def check_response_template(template: Any) -> None:
    """Raise ValueError if transformers cannot read the `response_template` of a tokenizer."""
    try:
        load_response_template(template)
    except _UNREADABLE as error:
        message = "the tokenizer's response_template cannot be read, --reasoning none does without it"
        raise ValueError(f"{message}: {error}") from None


class TemplateAnswer:
    """Reads an answer by a response template, which says how thinking, content and calls begin and end.

    If what was read as a call is none, its first character is content, and reading goes on after it.

    template: the tokenizer's `response_template`
    prompt:   the text before the answer, which may have opened thinking
    tools:    in the format of chat templates; None if calls are ordinary text
    parallel: whether an answer may have several calls; otherwise only the first is kept

    begin: the index in the text of the first character of the content; None before there is content
    """

    def __init__(
        self, template: Mapping[str, Any], prompt: str, tools: Sequence[dict[str, Any]] | None, *, parallel: bool
    ):
        fields = {
            name: {**field, "optional": True}
            for name, field in template["fields"].items()
            if tools is not None or name != CALLS
        }
        self._form = load_response_template({**template, "fields": fields})
        self._tools: list[Any] = [*(tools or ())]
        self._parallel = parallel
        self.begin: int | None = None
        self._field: str | None = None  # the region that is open
        self._base = 0  # characters before the text of this parser
        self._has_thought = self._is_plain = False
        self._thought = ""
        self._said = ""
        self._spaces = ""
        self._calls = list[Call]()
        self._count = 0
        self._start()
        try:
            self._parser = ResponseParser(self._form, prompt, tools=self._tools)
        except _UNREADABLE:
            return  # the prompt may contain such markers, too
        for event in self._parser.initial_events:
            if event["type"] == "region_open":
                self._field = event["field"]
            elif event["type"] == "region_close":
                self._field = None

    @property
    def is_thinking(self) -> bool:
        """Whether the end of the text so far belongs to thinking."""
        return self._field in REASONING_FIELDS

    def add(self, text: str) -> AnswerParts:
        """Add the next piece of text. Returns what is certain now; what may begin a marker is held back."""
        self._feed(text)
        return self._parts()

    def end(self, *, stopped: bool) -> AnswerParts:
        """Return what was held back, after the last piece. A part still open is closed; `stopped` is not used."""
        while not self._is_plain:
            try:
                _, events = self._parser.finalize()
                self._obey(events)
                break
            except _UNREADABLE:
                self._feed(self._go_on())
        if self.begin is None and not self.is_thinking and not self._has_thought:
            self.begin = 0
        return self._parts()

    def _start(self) -> None:
        self._parser = ResponseParser(self._form, "", tools=self._tools)
        self._fed = list[str]()
        self._safe = 0
        self._call_place = 0
        self._field = None

    def _feed(self, text: str) -> None:
        """Parse character by character, so that the beginning of each region is known."""
        waiting = deque(text)
        while waiting and not self._is_plain:
            character = waiting.popleft()
            self._fed.append(character)
            try:
                self._obey(self._parser.feed(character))
            except _UNREADABLE:
                waiting.extendleft(reversed(self._go_on()))
        if self._is_plain:
            self._say("".join(waiting), self._base)

    def _go_on(self) -> str:
        """Start again after an invalid region: one of calls is content up to its first character.

        Returns the text to be read again.
        """
        text = "".join(self._fed)
        if self._field != CALLS:
            self._base += len(text)
            self._start()
            return ""
        found = re.compile(r"\s*.", re.DOTALL).match(text, self._call_place)
        end = self._call_place + 1 if found is None else found.end()
        self._is_plain = self._form.implicit != CONTENT  # the parser would drop text between regions then
        said = text[self._call_place : None if self._is_plain else end]
        self._say(said, self._base + self._call_place)
        self._base += end
        self._start()
        return "" if self._is_plain else text[end:]

    def _obey(self, events: Sequence[dict[str, Any]]) -> None:
        for event in events:
            kind = event["type"]
            field = event["field"]
            if kind == "region_open":
                self._field = field
                if field == CALLS:
                    self._call_place = self._place_of_call()
            elif kind == "region_chunk" and field == CONTENT:
                text = event["text"]
                self._say(text, self._base + len(self._fed) - len(text))
            elif kind == "region_chunk" and field in REASONING_FIELDS:
                self._think(event["text"])
            elif kind == "region_close":
                if field == CALLS:
                    self._calls += _calls(event["value"])
                if field != self._form.implicit:  # the implicit region ends where another one begins
                    self._safe = max(0, len(self._fed) - 1)  # a closing marker that may grow ends a character later
                self._field = None
                self._spaces = ""

    def _place_of_call(self) -> int:
        text = "".join(self._fed)
        found = self._form.fields[CALLS].open_re.search(text, self._safe)
        place = len(text) if found is None else found.start()
        if self.begin is None:
            self.begin = self._base + place if self._has_thought else 0
        return place

    def _think(self, text: str) -> None:
        """Add thinking, without the spaces around it."""
        text = self._spaces + text if self._has_thought else text.lstrip()
        thought = text.rstrip()
        self._spaces = text[len(thought) :]
        self._thought += thought
        self._has_thought |= bool(thought)

    def _say(self, text: str, place: int) -> None:
        if self.begin is None:
            said = text.lstrip() if self._has_thought else text
            if not said:
                return
            self.begin = place + len(text) - len(said) if self._has_thought else 0
            text = said
        self._said += text

    def _parts(self) -> AnswerParts:
        thought = self._thought
        said = self._said
        calls = self._calls
        self._thought = ""
        self._said = ""
        self._calls = []
        if not self._parallel:
            calls = calls[: max(0, 1 - self._count)]
        self._count += len(calls)
        return AnswerParts(thought, said, tuple(calls))


def _calls(value: Any) -> list[Call]:
    """The calls in what the parser found between two markers. Raises TypeError, KeyError or ValueError if none is."""
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError("no call in an empty list")
    functions = [each.get("function", each) if isinstance(each, Mapping) else {} for each in values]
    return [call_of(each["name"], each.get("arguments", {})) for each in functions]
