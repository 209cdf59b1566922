"""Turn prompts into tokens: prompts may be texts, files of texts, or tokens."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

Prompt = str | Path | Tensor  # a text, a file of texts, or the tokens LongTensor[1, T] of a text


def read_prompts(path: str | Path) -> list[str]:
    """The texts of a UTF-8 file, one per line; empty lines are ignored.

    If the file's name ends with .jsonl, each line is a JSON string, or an object with a string "prompt". So a text may
    have several lines.

    Raises OSError for a file that cannot be read, and ValueError for one without prompts or with other content.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines breaks at U+2028 in JSON, too
    except UnicodeError as error:
        raise ValueError(f"the prompts in {str(path)!r} are not UTF-8 text: {error}") from error
    texts = [line for line in lines if line.strip()]
    if path.suffix == ".jsonl":
        texts = [_parsed(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not texts:
        raise ValueError(f"the prompts in {str(path)!r} are empty; expected a text on each line")
    return texts


def tokens_of(
    prompts: Prompt | Sequence[Prompt], tokenizer: PreTrainedTokenizerBase | None, device: torch.device
) -> list[Tensor]:
    """The tokens of each prompt, LongTensor[1, T], on a device.

    Raises TypeError or ValueError for an invalid prompt, for texts without a tokenizer, and if there are no prompts.
    """
    given = [prompts] if isinstance(prompts, str | Path | Tensor) else [*prompts]
    tokens = [ids.to(device) for prompt in given for ids in _tokens(prompt, tokenizer)]
    if not tokens:
        raise ValueError("expected at least one prompt, got none")
    return tokens


def _tokens(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[Tensor]:
    """The tokens of a prompt, or of each prompt of a file."""
    if isinstance(prompt, Tensor):
        if prompt.dtype != torch.long or prompt.dim() != 2 or len(prompt) != 1 or not prompt.numel():
            raise ValueError(f"a prompt must be a LongTensor [1, T], got {prompt.dtype} {[*prompt.shape]}")
        yield prompt
        return
    if not isinstance(prompt, str | Path):
        expected = "a text, a Path of a file of texts, or a LongTensor [1, T]"
        raise TypeError(f"a prompt must be {expected}, got {type(prompt).__name__}")
    if tokenizer is None:
        raise ValueError("prompts that are texts need the tokenizer; give tokenizer=")
    for text in read_prompts(prompt) if isinstance(prompt, Path) else [prompt]:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        assert isinstance(ids, Tensor)
        if not ids.numel():
            raise ValueError(f"a prompt must have at least one token, got none of the text {text!r}")
        yield ids


def _parsed(line: str, place: str) -> str:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: expected JSON, got {line[:60]!r} ({error})") from None
    text = content.get("prompt") if isinstance(content, dict) else content
    if not isinstance(text, str) or not text:
        raise ValueError(f'{place}: expected a JSON string, or an object with a string "prompt", got {line[:60]!r}')
    return text
