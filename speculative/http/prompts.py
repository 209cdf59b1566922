"""Turn the prompt or the conversation of a request into tokens."""

import inspect
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from heavypath.speculative.http.errors import Refusal
from heavypath.speculative.http.requests import ChatRequest, CompletionRequest
from heavypath.speculative.http.served import Limits

# Arguments of apply_chat_template, which requests must not set; and exceptions that a template's code may raise.
_NO_VARIABLES = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"}
_OF_TEMPLATES = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class Prompt(NamedTuple):
    """A prompt as tokens.

    echo: the prompt's text if the answer has to begin with it, otherwise empty
    conversation: the text that the chat template made; empty for a prompt of /v1/completions
    """

    tokens: list[int]
    echo: str = ""
    conversation: str = ""


class PromptTokens:
    """Tokenizes the prompts of requests. Too many or too long prompts are refused before they are tokenized."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, limits: Limits):
        self._tokenizer = tokenizer
        self._limits = limits
        self._longest = max(map(len, tokenizer.get_vocab()))  # in characters
        tokenizer("a")  # the first call may initialise the tokenizer, which must not happen in two threads

    def of(self, request: CompletionRequest | ChatRequest) -> list[Prompt]:
        """The prompts of a request. Raises Refusal if they are not valid."""
        return self._of_chat(request) if isinstance(request, ChatRequest) else self._of_texts(request)

    def _of_texts(self, request: CompletionRequest) -> list[Prompt]:
        """The prompts of a completion request, one or several, given as texts or as tokens.

        Raises Refusal for an empty prompt or list, and for too many or too long prompts.
        """
        given: Any = request.prompt
        several = isinstance(given, list) and not (given and isinstance(given[0], int))
        prompts = given if several else [given]
        if not prompts:
            raise Refusal(400, "prompt: expected one prompt or more, got an empty list", param="prompt")
        self._check_count(len(prompts), request.texts)
        for each in prompts:
            self._check_length(len(each) if isinstance(each, str) else 0)
        return [self._of_text(each, echo=bool(request.echo)) for each in prompts]  # stops at the first error

    def _of_text(self, given: str | list[int], *, echo: bool) -> Prompt:
        tokens = self._tokenizer(given)["input_ids"] if isinstance(given, str) else given
        if not tokens:
            raise Refusal(400, "prompt: expected at least one token to continue, got an empty prompt", param="prompt")
        self._check_room(len(tokens))
        if not echo:
            return Prompt(tokens)
        if isinstance(given, str):
            return Prompt(tokens, given)
        return Prompt(tokens, str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)))

    def _of_chat(self, request: ChatRequest) -> list[Prompt]:
        """The conversation as one prompt, written by the tokenizer's chat template up to where the answer begins.

        Raises Refusal if there is no template, if it cannot write the conversation, and if the text is too long.
        """
        if not self._tokenizer.chat_template:
            message = "this model's tokenizer has no chat template, so it can continue texts alone: use /v1/completions"
            raise Refusal(400, message, param="messages", code="no_chat_template")
        self._check_count(1, request.texts)
        variables = request.chat_template_kwargs or {}
        if wrong := _NO_VARIABLES.intersection(variables):
            message = f"chat_template_kwargs.{min(wrong)}: it is no variable of a chat template"
            raise Refusal(400, message, param="chat_template_kwargs")
        messages = [message.for_template() for message in request.messages]
        written = (message.get(name, "") for message in messages for name in ("content", "reasoning_content"))
        self._check_length(sum(map(len, written)))
        try:
            text: Any = self._tokenizer.apply_chat_template(
                messages,
                tools=[tool.for_template() for tool in request.offered] or None,
                add_generation_prompt=request.add_generation_prompt,
                tokenize=False,
                **variables,
            )
        except _OF_TEMPLATES as error:
            message = f"messages: the chat template cannot write this conversation: {error}"
            raise Refusal(400, message, param="messages") from error
        self._check_length(len(text))
        tokens = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if not tokens:
            raise Refusal(400, "messages: the chat template wrote an empty text of them", param="messages")
        self._check_room(len(tokens))
        return [Prompt(tokens, conversation=text)]

    def _check_count(self, prompts: int, n: int) -> None:
        most = self._limits.choices
        if prompts * n > most:
            message = f"n: this server gives at most {most} texts for a request, got {prompts} prompts with n = {n}"
            raise Refusal(400, message, param="n")

    def _check_length(self, characters: int) -> None:
        """Refuse a text that is too long even if all its tokens were the longest of the vocabulary."""
        if characters > self._limits.max_tokens * self._longest:
            raise self._too_long(f"{characters} characters, of which a token has at most {self._longest}")

    def _check_room(self, tokens: int) -> None:
        """Refuse a prompt that leaves no room for a new token."""
        if tokens >= self._limits.max_tokens:
            raise self._too_long(f"{tokens} tokens")

    def _too_long(self, what: str) -> Refusal:
        message = f"there is room for {self._limits.max_tokens} tokens of prompt and answer, and the prompt has {what}"
        return Refusal(400, message, code="context_length_exceeded")
