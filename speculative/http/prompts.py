"""The tokens that a request's texts begin with."""

from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from heavypath.speculative.http.errors import Refusal
from heavypath.speculative.http.requests import ChatRequest, CompletionRequest


class Prompt(NamedTuple):
    """tokens; and the text that stands before the new one in the answer, which is empty unless it was asked for."""

    tokens: list[int]
    echo: str = ""


def prompts_of(request: CompletionRequest, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """One prompt or several, as texts or as tokens. Raises Refusal for an empty one."""
    given: Any = request.prompt
    several = isinstance(given, list) and not (given and isinstance(given[0], int))
    found = []
    for each in given if several else [given]:
        tokens = tokenizer(each)["input_ids"] if isinstance(each, str) else each
        if not tokens:
            raise Refusal(400, "prompt: expected at least one token to continue, got an empty prompt", param="prompt")
        echo = ""
        if request.echo:
            echo = each if isinstance(each, str) else str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
        found.append(Prompt(tokens, echo))
    if not found:
        raise Refusal(400, "prompt: expected one prompt or more, got an empty list", param="prompt")
    return found


def prompts_of_chat(request: ChatRequest, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The conversation in the tokenizer's chat template, up to where the answer begins.

    Raises Refusal where there is no template, and for a conversation that it does not write.
    """
    if not tokenizer.chat_template:
        message = "this model's tokenizer has no chat template, so it can continue texts alone: use /v1/completions"
        raise Refusal(400, message, param="messages", code="no_chat_template")
    messages = [message.for_template() for message in request.messages]
    try:
        tokens: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except TemplateError as error:
        message = f"messages: the chat template cannot write this conversation: {error}"
        raise Refusal(400, message, param="messages") from error
    if not tokens:
        raise Refusal(400, "messages: the chat template wrote an empty text of them", param="messages")
    return [Prompt(tokens)]
