"""The demo pair's text: the running Python's standard library, its tokenizer, and windows of tokens to train on.

`python bench/train_demo_pair.py` reads it, and scripts that ask for texts which the pair was or was not trained on.
"""

import hashlib
import random
import re
import sysconfig
from collections.abc import Iterator
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
VOCABULARY = 1024

# Tests, generated tables and what does not read like Python; _sysconfigdata holds one machine's paths.
LEFT_OUT_FOLDERS = {
    "site-packages", "test", "tests", "idlelib", "encodings", "pydoc_data", "turtledemo", "ensurepip", "__pycache__",
}  # fmt: skip
LEFT_OUT_FILES = {"html/entities.py"}
LEFT_OUT_PREFIXES = ("config-", "_sysconfigdata")

# A newline takes the indentation after it along; a word, a number or punctuation takes one space before it.
PRE_TOKENS = r"\n[\n ]*| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"


class Source(NamedTuple):
    """One file of the standard library."""

    path: str
    text: str
    held_out: bool


def read_corpus() -> list[Source]:
    """All files in the order of their relative paths; about one in twenty is held out, by a hash of its path."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    return [
        Source(path, (root / path).read_bytes().decode("utf-8", errors="replace"), _is_held_out(path))
        for path in paths
        if not _is_left_out(path)
    ]


def corpus_hash(sources: list[Source]) -> str:
    """SHA-256 over every path and text, in order."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.path.encode() + b"\0" + source.text.encode() + b"\0")
    return digest.hexdigest()


def train_tokenizer(sources: list[Source]) -> PreTrainedTokenizerFast:
    """Byte-level BPE learnt from the training files alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((source.text for source in sources if not source.held_out), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def encode_documents(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[torch.Tensor]:
    """Token ids of each text with the end-of-text token after it, int16 [length]."""
    encodings = tokenizer.backend_tokenizer.encode_batch(texts)
    return [torch.tensor([*encoding.ids, END_OF_TEXT_ID], dtype=torch.int16) for encoding in encodings]


def windows(documents: list[torch.Tensor], length: int) -> torch.Tensor:
    """The documents end to end, cut into whole rows: int16 [rows, length]."""
    tokens = torch.cat(documents)
    return tokens[: len(tokens) // length * length].view(-1, length)


def training_batches(documents: list[torch.Tensor], length: int, rows: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless batches [rows, length + 1], int64; inputs are the first `length` columns, labels the last.

    Every epoch orders the documents anew, starts at a random offset and shuffles the rows, so that windows and
    their contexts never repeat.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(documents), generator=generator).tolist()
        tokens = torch.cat([documents[index] for index in order])
        tokens = tokens[int(torch.randint(length, (), generator=generator)) :]
        starts = torch.arange(0, len(tokens) - length, length)
        starts = starts[torch.randperm(len(starts), generator=generator)]
        for batch in starts.split(rows):
            if len(batch) == rows:
                yield tokens[batch[:, None] + torch.arange(length + 1)].long()


def choose_prompts(sources: list[Source], tokenizer: PreTrainedTokenizerFast, count: int = 24) -> list[str]:
    """Openings of functions and classes in the held-out files, 3 to 8 lines and 30 to 80 tokens, cut at a line end.

    Taken from the files in turn, so that no long file rules. The newline after the last line is left to the model: it
    shares a token with the indentation that follows.
    """
    generator = random.Random(0)
    by_file = [_openings(source.text.split("\n"), tokenizer) for source in sources if source.held_out]
    for openings in by_file:
        generator.shuffle(openings)
    rounds = zip_longest(*by_file)
    return [opening for each in rounds for opening in each if opening is not None][:count]


def _openings(lines: list[str], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    openings, free_from = [], 0
    for start, line in enumerate(lines):
        if start >= free_from and re.match(r"\s*(def|class) \w", line):
            opening = _opening(lines[start : start + 8], tokenizer)
            if opening is not None:
                openings.append(opening)
                free_from = start + 8
    return openings


def _opening(lines: list[str], tokenizer: PreTrainedTokenizerFast) -> str | None:
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    block = takewhile(lambda line: line.startswith(indent) or not line.strip(), lines)
    lines = [line.removeprefix(indent).rstrip() for line in block]
    for size in (5, 6, 4, 7, 8, 3):
        opening = "\n".join(lines[:size])
        if len(lines) >= size and lines[size - 1] and 30 <= len(tokenizer(opening)["input_ids"]) <= 80:
            return opening
    return None


def _is_left_out(path: str) -> bool:
    parts = path.split("/")
    prefixed = any(part.startswith(LEFT_OUT_PREFIXES) for part in parts)
    return prefixed or path in LEFT_OUT_FILES or not LEFT_OUT_FOLDERS.isdisjoint(parts)


def _is_held_out(path: str) -> bool:
    return int(hashlib.sha256(path.encode()).hexdigest(), 16) % 20 == 0
