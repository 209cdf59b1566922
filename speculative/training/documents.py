"""The user's data as documents: text files, folders of them, and JSON lines of texts, conversations and prompts."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from heavypath.speculative.drafts.texts import read_texts

_EXPECTED = 'a string, or an object with "text", "messages" (a list of role and content) or "prompt"'


class Document(NamedTuple):
    """A text, as tokens.

    tokens: int32 [n], the whole text; empty if only its beginning is known
    prompt: int32 [m], what the target goes on from when it writes a text of its own; empty if any piece will do
    """

    tokens: Tensor
    prompt: Tensor


def read_documents(paths: Iterable[str | Path], tokenizer: PreTrainedTokenizerBase) -> list[Document]:
    """The documents in files and folders (UTF-8).

    A line of a .jsonl file is one of these:

        "text", {"text": "text"}                               a text
        {"messages": [{"role": "user", "content": ..}, ..]}    a conversation, by the tokenizer's chat template; its
                                                               prompt ends before the assistant's last message
        {"prompt": "text"}                                     a prompt alone

    Any other file is one text. After a text comes the end-of-text token. A folder has all files below it, but for
    hidden ones and those that are not UTF-8.

    Raises OSError for what cannot be read; ValueError, naming file and line, for what is none of these, for
    conversations without a chat template, and for no text at all.
    """
    found: list[Document] = []
    for path in paths:
        texts = []
        for file, text in read_texts(Path(path).expanduser()):
            if file.suffix == ".jsonl":
                found += _of_lines(file, text, tokenizer)
            else:
                texts.append(text)
        found += _of_texts(texts, tokenizer)
    found = [document for document in found if len(document.tokens) or len(document.prompt)]
    if not found:
        raise ValueError("the data have no text; expected text files, folders of them, or .jsonl files")
    return found


def check_tokens(documents: Iterable[Document], vocab_size: int) -> None:
    """Raise ValueError for a token that a model of this vocabulary does not have."""
    largest = max((int(part.max()) for document in documents for part in document if len(part)), default=0)
    if largest >= vocab_size:
        raise ValueError(
            f"the data have token {largest}, the target has {vocab_size} tokens; take the target's own tokenizer"
        )


def _of_lines(file: Path, content: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[Document]:
    texts, prompts = [], []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        try:
            given = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{place}: expected JSON, got {line[:60]!r} ({error})") from None
        given = {"text": given} if isinstance(given, str) else given
        match given:
            case {"messages": [*messages]} if messages:
                yield _of_conversation(messages, tokenizer, place)
            case {"text": str(text)} if text:
                texts.append(text)
            case {"prompt": str(prompt)} if prompt:
                prompts.append(prompt)
            case _:
                raise ValueError(f"{place}: expected {_EXPECTED}, got {line[:60]!r}")
    yield from _of_texts(texts, tokenizer)
    if prompts:
        encoded: Any = tokenizer(prompts, verbose=False).input_ids
        yield from (Document(_tokens([]), _tokens(ids)) for ids in encoded)


def _of_texts(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[Document]:
    if texts:
        encoded: Any = tokenizer(texts, verbose=False).input_ids
        end = tokenizer.eos_token_id
        for ids in encoded:
            ended = end is None or ids[-1:] == [end]
            yield Document(_tokens(ids if ended or not ids else [*ids, end]), _tokens([]))


def _of_conversation(messages: list[Any], tokenizer: PreTrainedTokenizerBase, place: str) -> Document:
    if not tokenizer.chat_template:
        raise ValueError(f"{place}: messages need a target whose tokenizer has a chat template, and this one has none")
    try:
        answered = messages[-1]["role"] == "assistant"
        before = messages[:-1] if answered else messages
        prompt: Any = {"input_ids": []}
        if before:
            prompt = tokenizer.apply_chat_template(before, add_generation_prompt=True, return_dict=True)
        whole: Any = tokenizer.apply_chat_template(messages, return_dict=True) if answered else {"input_ids": []}
    except Exception as error:  # of the template, which is a program
        raise ValueError(f"{place}: the chat template does not take these messages: {error!r}") from error
    return Document(_tokens(whole["input_ids"]), _tokens(prompt["input_ids"]))


def _tokens(ids: Any) -> Tensor:
    return torch.tensor(ids, dtype=torch.int32, device="cpu")
