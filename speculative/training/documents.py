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
    answers: pairs of numbers (begin, end): tokens[begin:end] is an answer; empty if any part of the text can be one
    """

    tokens: Tensor
    prompt: Tensor
    answers: tuple[tuple[int, int], ...] = ()

    def predicts(self) -> Tensor:
        """bool [n]: whether the token after each token is part of an answer. A draft learns to predict these alone."""
        if not self.answers:
            return torch.ones(len(self.tokens), dtype=torch.bool, device="cpu")
        found = torch.zeros(len(self.tokens), dtype=torch.bool, device="cpu")
        for begin, end in self.answers:
            found[max(begin - 1, 0) : end - 1] = True
        return found

    def answered(self) -> Tensor:
        """The tokens of the answers, int32 [k]; all tokens if there are no answers; the prompt if it is alone."""
        if self.answers:
            return torch.cat([self.tokens[begin:end] for begin, end in self.answers])
        return self.tokens if len(self.tokens) else self.prompt


def with_answer(prompt: Tensor, text: Tensor) -> Document:
    """The document of a text, int32 [n], that begins with a prompt, int32 [m], and goes on with its answer."""
    return Document(text, prompt, ((len(prompt), len(text)),))


def read_documents(paths: Iterable[str | Path], tokenizer: PreTrainedTokenizerBase) -> list[Document]:
    """The documents in files and folders (UTF-8).

    Each line of a .jsonl file is one of these:

        "text", {"text": "text"}                               a text
        {"messages": [{"role": "user", "content": ..}, ..]}    a conversation, by the tokenizer's chat template; its
                                                               prompt ends before the assistant's last message, and
                                                               all of the assistant's messages are answers
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
    parts = [part for document in documents for part in (document.tokens, document.prompt) if len(part)]
    largest = max((int(part.max()) for part in parts), default=0)
    if largest >= vocab_size:
        raise ValueError(
            f"the data have token {largest}, the target has {vocab_size} tokens; use the target's own tokenizer"
        )


def _of_lines(file: Path, content: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[Document]:
    texts = []
    prompts = []
    # Not splitlines, which also breaks at U+2028 and others, and JSON may have these in its strings.
    for number, line in enumerate(content.split("\n"), start=1):
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

    def tokens_of(first: int, *, prompt: bool) -> list[int]:
        """The tokens of the first messages. prompt: whether the beginning of an answer follows them"""
        if first == 0:
            return []
        found: Any = tokenizer.apply_chat_template(messages[:first], add_generation_prompt=prompt, return_dict=True)
        return found["input_ids"]

    try:
        answered = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not answered or answered[-1] != len(messages) - 1:  # a question without an answer
            return Document(_tokens([]), _tokens(tokens_of(len(messages), prompt=True)))
        whole = tokens_of(len(messages), prompt=False)
        prompts = [tokens_of(number, prompt=True) for number in answered]
        ends = [tokens_of(number + 1, prompt=False) for number in answered]
    except Exception as error:  # the template is a program, which can raise anything
        raise ValueError(f"{where}: the chat template does not take these messages: {error!r}") from error
    # A template may write an earlier message in another way after later ones: what differs is no answer.
    spans = [(_in_common(whole, prompt), _in_common(whole, end)) for prompt, end in zip(prompts, ends, strict=True)]
    answers = tuple((begin, end) for begin, end in spans if begin < end)
    return Document(_tokens(whole), _tokens(prompts[-1]), answers)


def _in_common(first: list[int], second: list[int]) -> int:
    """The number of tokens that two texts have in common at their beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((number for number, (one, other) in pairs if one != other), min(len(first), len(second)))


def _tokens(ids: Any) -> Tensor:
    return torch.tensor(ids, dtype=torch.int32, device="cpu")
