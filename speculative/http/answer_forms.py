"""Decide how answers of a chat request are read, from chat template, tokenizer, options of the server and request."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from heavypath.speculative.http.answer_texts import MarkedAnswer
from heavypath.speculative.http.reasoning import REASONING, ReasoningFormat, ReasoningReader, reasoning_of, state_after
from heavypath.speculative.http.requests import ChatRequest
from heavypath.speculative.http.served import AUTO
from heavypath.speculative.http.template_answers import TemplateAnswer, closes_of
from heavypath.speculative.http.tool_calls import CallReader, Calls

AnswerReader = MarkedAnswer | TemplateAnswer  # of an answer that arrives piece by piece


@dataclass(frozen=True)
class AnswerForm:
    """How generated texts of a chat request are split into thinking, content and tool calls.

    reasoning: the markers of thinking; None for no thinking
    calls:     how tool calls are read; None without tools
    template:  the tokenizer's response template. If given, it finds all parts, and the markers above are not used
    follows_prompt: whether thinking that the prompt has opened continues in the answer
    """

    tokenizer: PreTrainedTokenizerBase
    reasoning: ReasoningFormat | None = None
    calls: Calls | None = None
    template: Mapping[str, Any] | None = None
    follows_prompt: bool = True

    @property
    def has_reasoning(self) -> bool:
        """Whether thinking is separated from the content."""
        return self.reasoning is not None or self.template is not None

    @cached_property
    def silent(self) -> frozenset[int] | None:
        """Ids of the special tokens to leave out of texts: all that mark no part. None if no part has such a marker."""
        special = dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True))
        if self.template is not None:
            written = json.dumps(self.template, ensure_ascii=False).replace("\\", "")  # without escapes of patterns
            wanted = {each for each in special if each in written}
        else:
            form = None if self.calls is None else self.calls.form
            wanted = {*(self.reasoning or ()), *(() if form is None else form.words)} & special.keys()
        return frozenset(special[each] for each in special.keys() - wanted) if wanted else None

    def reader(self, prompt: str) -> AnswerReader:
        """Make a reader for one answer. prompt: the text before it, which may have opened or closed thinking."""
        if self.template is not None:
            tools = None if self.calls is None else [tool.for_template() for tool in self.calls.tools]
            parallel = self.calls is None or self.calls.parallel
            return TemplateAnswer(self.template, prompt if self.follows_prompt else "", tools, parallel=parallel)
        state = None if self.reasoning is None else state_after(prompt, self.reasoning)
        if state and not self.follows_prompt:
            state = False
        calls = CallReader(None)
        thinking_calls = CallReader(None)
        if self.calls is not None:
            calls = self.calls.reader()
            thinking_calls = self.calls.reader()
        return MarkedAnswer(ReasoningReader(self.reasoning, is_open=state), calls, thinking_calls)


def answer_form(
    request: ChatRequest, tokenizer: PreTrainedTokenizerBase, reasoning: str, calls: Calls | None, template: Any
) -> AnswerForm | None:
    """Decide how the answers of a request are read; None if texts are returned as they are.

    reasoning: "auto", to find the markers of thinking in the chat template; "none"; or the name of a format
    calls:     how tool calls are read; None without tools
    template:  the tokenizer's response template, or None to read by `reasoning` and `calls`
    """
    if template is not None:
        follows = _may_close(request, closes_of(template))
        return AnswerForm(tokenizer, calls=calls, template=template, follows_prompt=follows)
    form = REASONING.get(reasoning)
    if reasoning == AUTO:
        form = reasoning_of(str(tokenizer.get_chat_template(tools=[{}] if request.offered else None)))
    if form is None and calls is None:
        return None
    follows = form is None or _may_close(request, (form.close,))
    return AnswerForm(tokenizer, form, calls, follows_prompt=follows)


def _may_close(request: ChatRequest, closes: tuple[str, ...]) -> bool:
    """Whether the grammar of a request, if any, allows a marker that ends thinking; if not, there is no thinking."""
    if request.must_call:
        return False
    wanted = request.wanted()
    if wanted is None:
        return True
    _, form = wanted
    texts = [*(form.choice or ())]
    texts.append((form.regex or "").replace("\\", ""))
    return any(close in text for close in closes for text in texts)
