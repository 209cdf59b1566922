"""An EAGLE-3 head for the demo's target, by the training-time test: its settings, its rows and its rounds.

The target runs once, and its hidden states are kept. The last of them, after its final norm, is one of the head's taps,
and P is recomputed from it. `python bench/train_demo_pair.py` runs it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from demo_pair import corpus
from demo_pair.distillation import Distillation, cached, write_text
from torch import Tensor
from transformers import LlamaForCausalLM

from heavypath.speculative.drafts.heads.config import HeadConfig
from heavypath.speculative.drafts.heads.eagle import EagleHead
from heavypath.speculative.training.learning import Learnt, learn
from heavypath.speculative.training.loop import Checkpoints, train
from heavypath.speculative.training.losses import LOSSES
from heavypath.speculative.training.optimization import Optimization, TrainingProgress
from heavypath.speculative.training.student import student_of_head
from heavypath.speculative.training.teacher import Taught, Teacher

CHECKPOINT_STEPS = 50
COMPILED_LENGTH = 512  # the few steps on longer rows do not pay for minutes of compiling


@dataclass(frozen=True)
class HeadPhase:
    """Optimiser steps on rows of one length, with one number of steps of the training-time test."""

    steps: int
    length: int
    depths: int


@dataclass(frozen=True)
class RowSet:
    """Rows cut from the corpus, and their length."""

    rows: int
    length: int


@dataclass(frozen=True)
class HeadTraining(Distillation):
    """Every setting of the head's training. Few depths come first: they cost less, and all depths learn from them."""

    steps: int = 900
    warmup_steps: int = 40
    decay_steps: int = 550
    matrix_rate: float = 6e-3
    vector_rate: float = 4e-3
    weight_decay: float = 0.01
    tokens_per_step: int = 4096
    phases: tuple[HeadPhase, ...] = (
        HeadPhase(500, 256, 2),
        HeadPhase(280, 256, 5),
        HeadPhase(30, 1024, 2),  # without it the head loses its way past position 512
        HeadPhase(90, 256, 5),
    )
    corpus_sets: tuple[RowSet, ...] = (RowSet(2048, 256), RowSet(128, 1024))
    decay: float = 0.8
    seed: int = 3


@dataclass(frozen=True)
class GentleHeadTraining(HeadTraining):
    """A second, gentle round over the same rows."""

    steps: int = 200
    warmup_steps: int = 15
    decay_steps: int = 185
    matrix_rate: float = 2.5e-3
    vector_rate: float = 1.7e-3
    phases: tuple[HeadPhase, ...] = (HeadPhase(200, 256, 5),)
    seed: int = 4


@dataclass(frozen=True)
class LongHeadTraining(HeadTraining):
    """A round over longer rows, most of them new: the first two rounds left the head weaker past position 256."""

    steps: int = 300
    warmup_steps: int = 15
    decay_steps: int = 285
    matrix_rate: float = 4e-3
    vector_rate: float = 2.7e-3
    sampled_rows: int = 0
    phases: tuple[HeadPhase, ...] = (HeadPhase(180, 512, 2), HeadPhase(20, 1024, 2), HeadPhase(100, 512, 5))
    corpus_sets: tuple[RowSet, ...] = (RowSet(1400, 512), RowSet(128, 1024))
    decay: float = 0.7


@dataclass(frozen=True)
class DeepHeadTraining(LongHeadTraining):
    """A last round over the long rows, at all depths: the round before went to depth 2 for most of its steps."""

    steps: int = 270
    decay_steps: int = 255
    matrix_rate: float = 3e-3
    vector_rate: float = 2e-3
    phases: tuple[HeadPhase, ...] = (HeadPhase(20, 1024, 5), HeadPhase(250, 512, 5))
    seed: int = 5


class TapRows(NamedTuple):
    """Token rows of one length, int16 [rows, length], and the target's taps there, bf16 [rows, length, T, H]."""

    tokens: Tensor
    taps: Tensor


def head_config() -> HeadConfig:
    """An EAGLE-3.1 head of 0.92 million parameters that feeds back unnormed outputs."""
    return HeadConfig(
        generation=3,
        hidden_size=320,
        target_hidden_size=320,
        intermediate_size=432,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=corpus.VOCABULARY,
        draft_vocab_size=corpus.VOCABULARY,
        taps=(2, 5, 8),
        tap_norms=True,
    )


def ask_for_taps(
    target: LlamaForCausalLM,
    documents: list[Tensor],
    taps: tuple[int, ...],
    settings: HeadTraining,
    work: Path,
    resume: bool,
) -> list[TapRows]:
    """The target's taps on the corpus and on text of its own."""
    sets = {}
    for wanted in settings.corpus_sets:
        rows = corpus.windows(documents, wanted.length)
        chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(settings.seed))
        sets[f"taps_{wanted.length}.pt"] = rows[chosen[: wanted.rows]]
    if settings.sampled_rows:
        written = cached(work / "head_sampled.pt", resume, lambda: write_text(target, documents, settings))
        sets["taps_sampled.pt"] = written
    return [
        TapRows(rows, cached(work / name, resume, lambda rows=rows: tapped_states(target, rows, taps)))
        for name, rows in sets.items()
    ]


@torch.no_grad()
def tapped_states(target: LlamaForCausalLM, rows: Tensor, taps: tuple[int, ...]) -> Tensor:
    """The target's hidden states of these numbers, bf16 [rows, length, T, H], for int16 rows [rows, length]."""
    states = torch.empty(*rows.shape, len(taps), target.config.hidden_size, dtype=torch.bfloat16)
    progress, teacher = TrainingProgress(len(rows), rows.shape[1]), Teacher(target, taps)
    for start in range(0, len(rows), 8):
        states[start : start + 8] = teacher(rows[start : start + 8]).taps
        done = min(start + 8, len(rows))
        if progress.is_due(done):
            progress.report(done, "taps")
    return states


def train_head(
    head: EagleHead,
    target: LlamaForCausalLM,
    teacher: list[TapRows],
    settings: HeadTraining,
    work: Path,
    resume: bool,
) -> float:
    """Train the head on the rows of `ask_for_taps`; checkpoints go to the work folder. Returns the seconds it took."""
    target.requires_grad_(False)
    plain = student_of_head(head.train(), target)
    compiled = replace(plain, outputs=torch.compile(plain.outputs, dynamic=False))
    plain_loss = LOSSES[settings.loss]
    compiled_loss = torch.compile(plain_loss, dynamic=False)

    def gradients(batch: tuple[TapRows, int]) -> Learnt:
        rows, depths = batch
        short = rows.tokens.shape[1] <= COMPILED_LENGTH
        student, loss = (compiled, compiled_loss) if short else (plain, plain_loss)
        weights = [settings.decay**depth for depth in range(depths)]
        return learn(
            student, Taught(rows.tokens, rows.taps, rows.taps[:, :, -1].float()), target.lm_head, loss, weights
        )

    return train(
        Optimization(head, settings),
        tap_batches(teacher, settings),
        gradients,
        Checkpoints(work / f"head_{settings.steps}.pt", CHECKPOINT_STEPS, resume),
        TrainingProgress(settings.steps, settings.tokens_per_step),
    )


def tap_batches(teacher: list[TapRows], settings: HeadTraining) -> Iterator[tuple[TapRows, int]]:
    """One batch and its number of depths per optimiser step, through all phases, in random order.

    Rows are cut to the phase's length; shorter ones are left out.
    """
    for index, phase in enumerate(settings.phases):
        generator = torch.Generator().manual_seed(settings.seed + index)
        pieces = [
            (rows, row, slice(start, start + phase.length))
            for rows in teacher
            for row in range(len(rows.tokens))
            for start in range(0, rows.tokens.shape[1] - phase.length + 1, phase.length)
        ]
        for batch in islice(_shuffled(len(pieces), settings.tokens_per_step // phase.length, generator), phase.steps):
            chosen = [pieces[place] for place in batch]
            tokens = torch.stack([rows.tokens[row, span] for rows, row, span in chosen])
            yield TapRows(tokens, torch.stack([rows.taps[row, span] for rows, row, span in chosen])), phase.depths


def _shuffled(count: int, size: int, generator: torch.Generator) -> Iterator[list[int]]:
    while True:
        for batch in torch.randperm(count, generator=generator).split(size):
            if len(batch) == size:
                yield batch.tolist()
