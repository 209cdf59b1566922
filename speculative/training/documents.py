"""Read training data as documents: text files, folders of them, and JSON lines of texts, conversations and prompts."""

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
    """A tokenised text, or a prompt, or both.

    tokens: int32 [n], the whole text; empty if there is only a prompt
    prompt: int32 [m], the prompt after which the target generates; empty if any part of the text can be a prompt
    """

    tokens: Tensor
    prompt: Tensor


def read_documents(paths: Iterable[str | Path], tokenizer: PreTrainedTokenizerBase) -> list[Document]:
    """The documents in files and folders (UTF-8).

    Each line of a .jsonl file is one of these:

        "text", {"text": "text"}                               a text
        {"messages": [{"role": "user", "content": ..}, ..]}    a conversation, by the tokenizer's chat template; its
                                                               prompt ends before the assistant's last message
        {"prompt": "text"}                                     a prompt alone

    Any other file is one text. An end-of-sequence token is appended to each text. A folder stands for all files in it
    and in its subfolders, except hidden files and those that are not UTF-8.

    Raises OSError for files that cannot be read. Raises ValueError, with file and line, for lines of another form and
    for conversations if the tokenizer has no chat template. Raises ValueError if there is no text at all.
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
    """Raise ValueError for a token that is not in a vocabulary of this size."""
    largest = max((int(part.max()) for document in documents for part in document if len(part)), default=0)
    if largest >= vocab_size:
        raise ValueError(
            f"the data have token {largest}, the target has {vocab_size} tokens; use the target's own tokenizer"
        )


def _of_lines(file: Path, content: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[Document]:
    texts = []
    prompts = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            given = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: expected JSON, got {line[:60]!r} ({error})") from None
        given = {"text": given} if isinstance(given, str) else given
        match given:
            case {"messages": [*messages]} if messages:
                yield _of_conversation(messages, tokenizer, where)
            case {"text": str(text)} if text:
                texts.append(text)
            case {"prompt": str(prompt)} if prompt:
                prompts.append(prompt)
            case _:
                raise ValueError(f"{where}: expected {_EXPECTED}, got {line[:60]!r}")
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


def _of_conversation(messages: list[Any], tokenizer: PreTrainedTokenizerBase, where: str) -> Document:
    if not tokenizer.chat_template:
        raise ValueError(f"{where}: messages need a target whose tokenizer has a chat template, and this one has none")
    try:
        answered = messages[-1]["role"] == "assistant"
        before = messages[:-1] if answered else messages
        prompt: Any = {"input_ids": []}
        if before:
            prompt = tokenizer.apply_chat_template(before, add_generation_prompt=True, return_dict=True)
        whole: Any = tokenizer.apply_chat_template(messages, return_dict=True) if answered else {"input_ids": []}
    except Exception as error:  # the template is a program, which can raise anything
        raise ValueError(f"{where}: the chat template does not take these messages: {error!r}") from error
    return Document(_tokens(whole["input_ids"]), _tokens(prompt["input_ids"]))


def _tokens(ids: Any) -> Tensor:
    return torch.tensor(ids, dtype=torch.int32, device="cpu")
