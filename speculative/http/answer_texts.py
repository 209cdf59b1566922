"""Split a chat answer, while it arrives, into thinking, content and tool calls."""

from typing import NamedTuple

from heavypath.speculative.http.reasoning import ReasoningReader
from heavypath.speculative.http.tool_calls import Call, CallReader


class AnswerParts(NamedTuple):
    """What was added to an answer: text of the thinking (`thought`), text of the content (`said`), and tool calls."""

    thought: str = ""
    said: str = ""
    calls: tuple[Call, ...] = ()


class MarkedAnswer:
    """Reads an answer whose thinking and tool calls are enclosed in markers.

    A call within thinking is not a call, with one exception: if the model ends its text while thinking, calls at the
    end of the thinking count.

    reasoning:      separates thinking from the rest
    calls:          finds tool calls in the rest
    thinking_calls: finds tool calls in the thinking, for this exception
    """

    def __init__(self, reasoning: ReasoningReader, calls: CallReader, thinking_calls: CallReader):
        self._reasoning = reasoning
        self._calls = calls
        self._thinking_calls = thinking_calls
        self._thinking = ""  # thinking that has not been returned yet
        self._told = 0  # characters of thinking that have been returned

    @property
    def begin(self) -> int | None:
        """The index in the text of the first character of the content; None before there is content."""
        return self._reasoning.begin

    @property
    def is_thinking(self) -> bool:
        """Whether the end of the text so far belongs to thinking."""
        return self._reasoning.is_thinking

    def add(self, text: str) -> AnswerParts:
        """Add the next piece of text. Returns what is certain now; what may begin a marker is held back."""
        thought, said = self._reasoning.add(text)
        thought = self._thought(thought)
        said = self._calls.add(said)
        return AnswerParts(thought, said, tuple(self._calls.new_calls()))

    def end(self, *, stopped: bool) -> AnswerParts:
        """Return what was held back, after the last piece. stopped: whether the model ended the text itself."""
        thought, said = self._reasoning.end()
        thought = self._thought(thought)
        said = self._calls.add(said) + self._calls.end()
        if self.is_thinking and stopped:
            self._thinking_calls.end()
            if calls := self._thinking_calls.new_calls():
                certain = self._thinking_calls.settled - self._told
                before = self._thinking[:certain].rstrip()
                return AnswerParts(thought + before, said, tuple(calls))
        return AnswerParts(thought + self._thinking, said, tuple(self._calls.new_calls()))

    def _thought(self, text: str) -> str:
        """Add thinking. Returns its new part up to what may be a tool call; all of it once thinking has ended."""
        self._thinking += text
        self._thinking_calls.add(text)
        certain = len(self._thinking)
        if self.is_thinking:
            certain = self._thinking_calls.settled - self._told
        thought = self._thinking[:certain]
        self._thinking = self._thinking[certain:]
        self._told += certain
        return thought
