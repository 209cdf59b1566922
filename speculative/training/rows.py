"""Make rows for training and held-out rows: documents are concatenated; some are replaced by the target's output."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from heavypath.speculative.training.documents import Document

MOST_HELD_OUT = 128  # rows; more would take more time and give hardly more information
LONGEST_SHARE = 1 / 20  # of all tokens. Longer texts are cut into sections, so that a part can be held out
LONGEST_ROWS = 32  # of a section, at most
Write = Callable[[list[Tensor]], list[Document]]  # prompts int32 [m] -> prompts with the target's output


class Texts(NamedTuple):
    """Rows of tokens.

    tokens:   int32 [R, L]
    predicts: bool [R, L], whether a draft learns to predict the token after each token, and is measured there
    """

    tokens: Tensor
    predicts: Tensor


class Rows(NamedTuple):
    """The rows for training, and the held-out rows."""

    train: Texts
    held_out: Texts


class RowSettings(NamedTuple):
    """The settings by which rows are made, with the meanings that they have in `DistilSettings`."""

    length: int
    held_out: float
    written: float
    prompt_tokens: int
    seed: int


def make_rows(documents: list[Document], settings: RowSettings, write: Write) -> Rows:
    """Make the rows. A document is either trained on or held out, together with the output after its prompt.

    A text that is longer than a twentieth of all tokens, or than 32 rows, is cut into sections, which then count as
    documents.

    write: generates the target's output after prompts

    Raises ValueError if there is not at least one row for training and one held-out row.
    """
    length = settings.length
    generator = torch.Generator().manual_seed(settings.seed)
    total = sum(len(document.tokens) for document in documents)
    longest = max(length, min(int(LONGEST_SHARE * total), LONGEST_ROWS * length))
    sections = [section for document in documents for section in _sections(document, longest)]
    sizes = torch.tensor([len(section.tokens) or length for section in sections], device="cpu")
    wanted = min(max(settings.held_out * float(sizes.sum()), length), MOST_HELD_OUT * length)
    order = torch.randperm(len(sections), generator=generator, device="cpu")
    before = sizes[order].cumsum(0) - sizes[order]
    is_held_out = torch.zeros(len(sections), dtype=torch.bool, device="cpu")
    is_held_out[order[before < wanted]] = True
    is_written = torch.rand(len(sections), generator=generator, device="cpu") < settings.written
    sides = []
    for held_out in (False, True):
        texts: list[Document] = []
        prompts: list[Tensor] = []
        for section, held, written in zip(sections, is_held_out.tolist(), is_written.tolist(), strict=True):
            if held != held_out:
                continue
            if written or not len(section.tokens):
                prompts += _prompts(section, settings)
            else:
                texts.append(section)
        texts += write(prompts) if prompts else []
        sides.append(_concatenated(texts, length))
    train, held_out = sides
    if not (train.predicts.any() and held_out.predicts.any()):
        raise ValueError(
            f"the data, {int(sizes.sum())} tokens in {len(documents)} documents, give {len(train.tokens)} rows of "
            f"{length} to train on and {len(held_out.tokens)} to hold out, expected at least one each, with answers; "
            "give more text or shorter rows"
        )
    return Rows(train, held_out)


def _concatenated(texts: list[Document], length: int) -> Texts:
    """Rows of `length` tokens of texts one after the other; the last tokens, which fill no row, are left out."""
    empty = torch.zeros(0, dtype=torch.int32, device="cpu")
    tokens = torch.cat([empty, *(text.tokens for text in texts)])
    predicts = torch.cat([empty.bool(), *(text.predicts() for text in texts)])
    used = len(tokens) // length * length
    return Texts(tokens[:used].view(-1, length), predicts[:used].view(-1, length))


def batches_of(rows: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    """Endless batches [size, L] of rows [R, L], R >= size. Each epoch has a new random order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows), generator=generator, device="cpu")
        for chosen in order[: len(rows) // size * size].split(size):
            yield rows[chosen]


def _sections(document: Document, longest: int) -> list[Document]:
    """The document itself if it has a prompt or answers; else its text in sections of at most `longest` tokens."""
    if len(document.prompt) or document.answers:
        return [document]
    return [Document(section, document.prompt) for section in document.tokens.split(longest)]


def _prompts(section: Document, settings: RowSettings) -> list[Tensor]:
    """The prompts after which the target writes in place of a section: its prompt, or the first tokens of each piece.

    A piece is settings.length tokens of the section's text.
    """
    if len(section.prompt):
        return [section.prompt]
    return [piece[: settings.prompt_tokens] for piece in section.tokens.split(settings.length)]
