"""Tokens of a user's texts, which are given as strings, as files and folders, or already as tokens."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

Text = str | Path | Sequence[int] | Tensor | np.ndarray

_LARGEST = 2**31 - 3  # largest token; the sorted corpus stores them as int32 with an offset


def tokens_of(texts: Iterable[Text], tokenizer: PreTrainedTokenizerBase | None) -> list[np.ndarray]:
    """The tokens of each text, int64 [any]. The tokenizer's end-of-text token is appended to texts that it encoded.

    A folder contributes all files below it, except hidden ones and those that are not UTF-8. Raises ValueError or
    TypeError for anything that is not a text, for a single file that is not UTF-8, and for tokens out of range;
    FileNotFoundError for a path that does not exist.
    """
    if isinstance(texts, str | Path):
        given = "Path" if isinstance(texts, Path) else "str"
        raise TypeError(f"texts must be several: a list of texts, paths or tokens, got one {given}; put it into a list")
    found = []
    strings = []
    for text in texts:
        if isinstance(text, str | Path):
            strings += [content for _, content in read_texts(text)] if isinstance(text, Path) else [text]
        else:
            found.append(_checked(text))
    if strings and tokenizer is None:
        raise ValueError("texts that are not tokens need the target's tokenizer: Retrieval(texts, tokenizer)")
    if strings:
        assert tokenizer is not None
        ids: Any = tokenizer(strings, add_special_tokens=False, verbose=False).input_ids
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        found += [np.array([*one, *end], np.int64) for one in ids]
    return found


def _checked(tokens: Any) -> np.ndarray:
    array = tokens.cpu().numpy() if isinstance(tokens, Tensor) else np.asarray(tokens)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(
            "a text must be a str, a Path, or tokens: integers [any]; got "
            f"{type(tokens).__name__} of {array.dtype} {[*array.shape]}"
        )
    if array.min() < 0 or array.max() > _LARGEST:
        raise ValueError(f"tokens must be in 0 .. {_LARGEST}, got {array.min()} .. {array.max()}")
    return array.astype(np.int64)


def read_texts(path: Path) -> Iterator[tuple[Path, str]]:
    """A file and its text, or all files below a folder with their texts, except hidden files and files not in UTF-8.

    Raises ValueError for a single file that is not UTF-8, OSError for one that cannot be read.
    """
    if not path.is_dir():
        text = _decoded(path)
        if text is None:
            raise ValueError(f"the file {str(path)!r} must be text in UTF-8, and is not")
        yield path, text
        return
    for below in sorted(path.rglob("*")):
        hidden = any(part.startswith(".") for part in below.relative_to(path).parts)
        text = None if hidden or not below.is_file() else _decoded(below)
        if text is not None:
            yield below, text


def _decoded(path: Path) -> str | None:
    """A file's text; None if it is not text in UTF-8."""
    content = path.read_bytes()
    try:
        return None if b"\0" in content else content.decode("utf-8-sig")  # without the mark that Windows writes first
    except UnicodeDecodeError:
        return None
