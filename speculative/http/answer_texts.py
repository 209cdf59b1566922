"""The text of one answer to a conversation, parted as it comes into thinking, what is said, and calls of tools."""

from typing import NamedTuple, Protocol

from heavypath.speculative.http.reasoning import ReasoningReader
from heavypath.speculative.http.tool_calls import Call, CallReader


class AnswerParts(NamedTuple):
    """More of an answer."""

    thought: str = ""
    said: str = ""
    calls: tuple[Call, ...] = ()


class AnswerReader(Protocol):
    """Takes a text as it comes.

    begin:       the number of characters before the first that is said; None while nothing is
    is_thinking: whether what came last belongs to thinking
    """

    @property
    def begin(self) -> int | None:
        """See above."""
        ...

    @property
    def is_thinking(self) -> bool:
        """See above."""
        ...

    def add(self, text: str) -> AnswerParts:
        """What is certain of the text so far, and was not before."""
        ...

    def end(self, *, stopped: bool) -> AnswerParts:
        """The rest. stopped: whether the model ended the text, which was not cut off."""
        ...


class MarkedAnswer:
    """An answer whose thinking and calls stand between markers.

    A call in thinking is no call. Where a model ends its text without an end of thinking, what it did last was to call.

    thinking_calls: reads thinking for such calls
    """

    def __init__(self, reasoning: ReasoningReader, calls: CallReader, thinking_calls: CallReader):
        self._reasoning, self._calls, self._thinking_calls = reasoning, calls, thinking_calls
        self._thinking = ""  # and has not been told
        self._told = 0  # characters of thinking

    @property
    def begin(self) -> int | None:
        """See `AnswerReader`."""
        return self._reasoning.begin

    @property
    def is_thinking(self) -> bool:
        """See `AnswerReader`."""
        return self._reasoning.is_thinking

    def add(self, text: str) -> AnswerParts:
        """See `AnswerReader`."""
        thought, said = self._reasoning.add(text)
        thought = self._thought(thought)
        return AnswerParts(thought, self._calls.add(said), tuple(self._calls.new_calls()))

    def end(self, *, stopped: bool) -> AnswerParts:
        """See `AnswerReader`."""
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
        """The part of thinking that stands before what may be a call, or all of it once thinking has ended."""
        self._thinking += text
        self._thinking_calls.add(text)
        certain = self._thinking_calls.settled - self._told if self.is_thinking else len(self._thinking)
        thought, self._thinking = self._thinking[:certain], self._thinking[certain:]
        self._told += certain
        return thought
