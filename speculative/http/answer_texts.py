"""Split a chat answer, while it arrives, into thinking, content and tool calls."""

from typing import NamedTuple, Protocol

from heavypath.speculative.http.reasoning import ReasoningReader
from heavypath.speculative.http.tool_calls import Call, CallReader


class AnswerParts(NamedTuple):
    """The next parts of an answer: thinking, content, tool calls."""

    thought: str = ""
    said: str = ""
    calls: tuple[Call, ...] = ()


class AnswerReader(Protocol):
    """Splits a text that arrives piece by piece.

    begin:       the number of characters before the first character of the content; None before there is any
    is_thinking: whether the end of the text so far belongs to thinking
    """

    @property
    def begin(self) -> int | None:
        """The number of characters before the content; None before there is any."""
        ...

    @property
    def is_thinking(self) -> bool:
        """Whether the end of the text so far belongs to thinking."""
        ...

    def add(self, text: str) -> AnswerParts:
        """Add text. Returns the parts that have become certain."""
        ...

    def end(self, *, stopped: bool) -> AnswerParts:
        """The remaining parts; stopped: whether the model ended the text, so that it is complete."""
        ...


class MarkedAnswer:
    """An answer whose thinking and tool calls are enclosed in markers.

    A call within thinking is not a call, with one exception: if the model ends its text while thinking, calls at the
    end of the thinking count.

    thinking_calls: reads the thinking, to find such calls
    """

    def __init__(self, reasoning: ReasoningReader, calls: CallReader, thinking_calls: CallReader):
        self._reasoning, self._calls, self._thinking_calls = reasoning, calls, thinking_calls
        self._thinking = ""  # thinking that has not been returned yet
        self._told = 0  # characters of thinking that have been returned

    @property
    def begin(self) -> int | None:
        """The number of characters before the content; None before there is any."""
        return self._reasoning.begin

    @property
    def is_thinking(self) -> bool:
        """Whether the end of the text so far belongs to thinking."""
        return self._reasoning.is_thinking

    def add(self, text: str) -> AnswerParts:
        """Add text. Returns the parts that have become certain."""
        thought, said = self._reasoning.add(text)
        thought = self._thought(thought)
        return AnswerParts(thought, self._calls.add(said), tuple(self._calls.new_calls()))

    def end(self, *, stopped: bool) -> AnswerParts:
        """The remaining parts; stopped: whether the model ended the text, so that it is complete."""
        thought, said = self._reasoning.end()
        thought = self._thought(thought)
        said = self._calls.add(said) + self._calls.end()[0]
        if self.is_thinking and stopped:
            self._thinking_calls.end()
            if calls := self._thinking_calls.new_calls():
                before = self._thinking[: self._thinking_calls.settled - self._told].rstrip()
                return AnswerParts(thought + before, said, tuple(calls))
        return AnswerParts(thought + self._thinking, said, tuple(self._calls.new_calls()))

    def _thought(self, text: str) -> str:
        """The thinking up to what may be a call; all of it once thinking has ended."""
        self._thinking += text
        self._thinking_calls.add(text)
        certain = self._thinking_calls.settled - self._told if self.is_thinking else len(self._thinking)
        thought, self._thinking = self._thinking[:certain], self._thinking[certain:]
        self._told += certain
        return thought
