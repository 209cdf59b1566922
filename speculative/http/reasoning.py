"""Separate thinking from answers, by the markers that models write; clients get it as `reasoning_content`.

think     <think> ... </think>              DeepSeek-R1, Qwen3, QwQ, GLM-4.5, MiniMax and most others
mistral   [THINK] ... [/THINK]              Magistral and later models of Mistral
seed_oss  <seed:think> ... </seed:think>    Seed-OSS
kimi      ◁think▷ ... ◁/think▷              Kimi-VL

Thinking is only at the beginning of a text. The chat template may have opened or closed it already at the end of the
prompt. Markers after its end are ordinary text. The channels of gpt-oss are not supported, and stay in the text.
"""

from typing import NamedTuple

from heavypath.speculative.http.text import beginning


class ReasoningFormat(NamedTuple):
    """The markers before and after thinking."""

    open: str
    close: str


REASONING = {
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
}


def reasoning_of(template: str) -> ReasoningFormat | None:
    """The format whose markers a chat template contains; None if it contains none."""
    return next((each for each in REASONING.values() if each.open in template or each.close in template), None)


def state_after(prompt: str, form: ReasoningFormat) -> bool | None:
    """Whether a prompt opens thinking: True if it ends with the opening marker, False with the closing one, or None."""
    ending = prompt.rstrip()
    return True if ending.endswith(form.open) else False if ending.endswith(form.close) else None


class ReasoningReader:
    """Splits a text that arrives piece by piece into thinking and content, without spaces around the thinking.

    form:     the markers of thinking; None for texts without thinking
    is_open:  whether the text begins within thinking; None if it may begin with a marker

    begin: the index in the text of the first character of the content; None before there is content
    is_thinking: whether the end of the text so far belongs to thinking
    """

    def __init__(self, form: ReasoningFormat | None, *, is_open: bool | None):
        self._form = form
        self._held = ""
        self._taken = 0
        self._has_thought = False
        self._is_closed = form is None or is_open is False
        self._is_undecided = not self._is_closed  # an opening marker may follow, even if the prompt has one already
        self.is_thinking = bool(is_open) and not self._is_closed
        self.begin: int | None = 0 if self._is_closed else None

    def add(self, text: str) -> tuple[str, str]:
        """Add the next piece of text. Returns the new thinking and content; what may begin a marker is held back."""
        self._taken += len(text)
        self._held += text
        return self._read(final=False)

    def end(self) -> tuple[str, str]:
        """Return what was held back, after the last piece: thinking if it has not ended, otherwise content."""
        return self._read(final=True)

    def _read(self, *, final: bool) -> tuple[str, str]:
        thought = ""
        if self._form is not None and not self._is_closed:
            if self._is_undecided and not self._decided(self._form, final):
                return "", ""
            if self.is_thinking:
                thought = self._thought(self._form, final)
        return thought, self._said()

    def _decided(self, form: ReasoningFormat, final: bool) -> bool:
        """Whether the text so far shows if it begins with the opening marker; if it does, the marker is removed."""
        text = self._held.lstrip()
        if text.startswith(form.open):
            self.is_thinking = True
            self._held = text[len(form.open) :]
        elif not final and form.open.startswith(text):
            return False
        elif not self.is_thinking:
            self._is_closed = True
            self.begin = 0
        self._is_undecided = False
        return True

    def _thought(self, form: ReasoningFormat, final: bool) -> str:
        place = self._held.find(form.close)
        if place >= 0:
            thought = self._held[:place].rstrip()
            self._held = self._held[place + len(form.close) :]
            self.is_thinking = False
            self._is_closed = True
        else:
            keep = 0 if final else beginning(self._held, (form.close,))
            thought = self._held[: len(self._held) - keep].rstrip()
            self._held = "" if final else self._held[len(thought) :]
        thought = thought if self._has_thought else thought.lstrip()
        self._has_thought |= bool(thought)
        return thought

    def _said(self) -> str:
        if not self._is_closed:
            return ""
        said = self._held
        self._held = ""
        if self.begin is None:
            said = said.lstrip()
            self.begin = self._taken - len(said) if said else None
        return said
