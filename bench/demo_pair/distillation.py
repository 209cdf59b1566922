"""The draft learns the target's next-token distribution rather than the text, by the loss TV + 0.5 KL.

The target runs once over the corpus and over text it wrote itself; its last hidden states are kept, and P is recomputed
from them at every step. `python bench/train_demo_pair.py` runs it.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from demo_pair import corpus
from transformers import LlamaForCausalLM

from heavypath.speculative.training.learning import Learnt, learn
from heavypath.speculative.training.loop import Checkpoints, train
from heavypath.speculative.training.losses import LOSSES
from heavypath.speculative.training.optimization import Optimization, Schedule, TrainingProgress, save_whole
from heavypath.speculative.training.student import student_of_model
from heavypath.speculative.training.teacher import Logits, Taught

Result = TypeVar("Result")


@dataclass(frozen=True)
class Distillation(Schedule):
    """Settings for learning from the target, for a draft or a head."""

    tokens_per_step: int
    seed: int
    sampled_rows: int = 1024  # of text the target writes: three quarters at temperature 1, the rest at 0.6
    sampled_length: int = 256
    prompt_length: int = 32
    loss: str = "tv-kl"  # of LOSSES


@dataclass(frozen=True)
class DraftTraining(Distillation):
    """Every setting of the draft's training."""

    steps: int = 2400
    warmup_steps: int = 50
    decay_steps: int = 2000
    matrix_rate: float = 6e-3
    vector_rate: float = 4e-3
    weight_decay: float = 0.01
    tokens_per_step: int = 8192
    corpus_rows: int = 4096  # two thirds of the corpus
    corpus_length: int = 512
    seed: int = 2


@dataclass(frozen=True)
class LongDraftTraining(DraftTraining):
    """A last, gentle phase on long rows: without it the draft loses its way at positions past the first phase's."""

    steps: int = 240
    warmup_steps: int = 20
    decay_steps: int = 220
    matrix_rate: float = 2e-3
    vector_rate: float = 1.5e-3
    corpus_rows: int = 480
    corpus_length: int = 1024
    sampled_rows: int = 0


class TeacherRows(NamedTuple):
    """Token rows of one length, int16 [rows, length], and the target's last hidden states, bf16 [rows, length, H]."""

    tokens: torch.Tensor
    hidden: torch.Tensor


def train_draft(
    draft: LlamaForCausalLM,
    target: LlamaForCausalLM,
    documents: list[torch.Tensor],
    settings: DraftTraining,
    work: Path,
    resume: bool,
) -> float:
    """Distil the target into the draft; checkpoints go to the work folder. Returns the seconds it took."""
    teacher = ask_teacher(target, documents, settings, work, resume)
    student = student_of_model(draft.train())
    student = replace(student, outputs=torch.compile(student.outputs, dynamic=False), dtype=fast_dtype())
    loss, target_logits = torch.compile(LOSSES[settings.loss], dynamic=False), logits_by(target)

    def gradients(rows: TeacherRows) -> Learnt:
        no_taps = rows.hidden.new_empty(*rows.tokens.shape, 0, 0)
        return learn(student, Taught(rows.tokens, no_taps, rows.hidden), target_logits, loss, [1.0])

    return train(
        Optimization(draft, settings),
        teacher_batches(teacher, settings),
        gradients,
        Checkpoints(work / f"draft_{settings.corpus_length}.pt", every=500, resume=resume),
        TrainingProgress(settings.steps, settings.tokens_per_step),
    )


def logits_by(target: LlamaForCausalLM) -> Logits:
    """The target's logits of last hidden states, in the type that is fast here."""
    head = target.lm_head.weight.detach().to(fast_dtype() or torch.float32)  # [V, H]
    return lambda hidden: hidden.to(head.dtype) @ head.T


def fast_dtype() -> torch.dtype | None:
    """bf16 where this CPU has bf16 dot products (AVX-512 BF16), for autocast."""
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else None


def fast_autocast() -> torch.autocast:
    """Autocast to that type, or a context that does nothing."""
    return torch.autocast("cpu", torch.bfloat16, enabled=fast_dtype() is not None)


def ask_teacher(
    target: LlamaForCausalLM, documents: list[torch.Tensor], settings: DraftTraining, work: Path, resume: bool
) -> list[TeacherRows]:
    """The target's hidden states on the corpus and on text of its own."""
    corpus_rows = corpus.windows(documents, settings.corpus_length)
    chosen = torch.randperm(len(corpus_rows), generator=torch.Generator().manual_seed(settings.seed))
    corpus_rows = corpus_rows[chosen[: settings.corpus_rows]]
    sets = {f"hidden_{settings.corpus_length}.pt": corpus_rows}
    if settings.sampled_rows:
        sets["hidden_sampled.pt"] = cached(work / "sampled.pt", resume, lambda: write_text(target, documents, settings))
    return [
        TeacherRows(rows, cached(work / name, resume, lambda rows=rows: last_hidden_states(target, rows)))
        for name, rows in sets.items()
    ]


def teacher_batches(teacher: list[TeacherRows], settings: DraftTraining) -> Iterator[TeacherRows]:
    """Endless batches of rows of one set, the set chosen by its number of tokens, the rows in random order."""
    generator = torch.Generator().manual_seed(settings.seed)
    sizes = torch.tensor([float(rows.tokens.numel()) for rows in teacher])
    streams = [_batches_of(rows, settings.tokens_per_step, generator) for rows in teacher]
    while True:
        yield next(streams[int(torch.multinomial(sizes, 1, generator=generator))])


def _batches_of(rows: TeacherRows, tokens_per_step: int, generator: torch.Generator) -> Iterator[TeacherRows]:
    size = tokens_per_step // rows.tokens.shape[1]
    while True:
        order = torch.randperm(len(rows.tokens), generator=generator)
        for chosen in order.split(size):
            if len(chosen) == size:
                yield TeacherRows(rows.tokens[chosen], rows.hidden[chosen])


@torch.no_grad()
def last_hidden_states(target: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """The normalised hidden states before the head, bf16 [rows, length, H], for int16 rows [rows, length]."""
    hidden = torch.empty(*rows.shape, target.config.hidden_size, dtype=torch.bfloat16)
    progress = TrainingProgress(len(rows), rows.shape[1])
    for start in range(0, len(rows), 8):
        with fast_autocast():
            part = target.model(input_ids=rows[start : start + 8].long(), use_cache=False).last_hidden_state
        hidden[start : start + 8] = part
        done = min(start + 8, len(rows))
        if progress.is_due(done):
            progress.report(done, "hidden states")
    return hidden


@torch.no_grad()
def write_text(target: LlamaForCausalLM, documents: list[torch.Tensor], settings: Distillation) -> torch.Tensor:
    """Rows the target writes after prompts cut from the training text: int16 [sampled_rows, sampled_length]."""
    torch.manual_seed(settings.seed)
    prompts = corpus.windows(documents, settings.prompt_length)
    prompts = prompts[torch.randperm(len(prompts))[: settings.sampled_rows]].long()
    writer = copy.deepcopy(target)
    for parameter in writer.parameters():  # the parameters alone: rotary frequencies stay fp32
        parameter.data = parameter.data.bfloat16()
    writer.generation_config.eos_token_id = None  # a new file may begin within a row, as in training
    progress = TrainingProgress(settings.sampled_rows, settings.sampled_length)
    rows: list[torch.Tensor] = []
    for index, part in enumerate(prompts.split(settings.sampled_rows // 8)):
        written = writer.generate(  # pyright: ignore[reportAttributeAccessIssue]
            part,
            attention_mask=torch.ones_like(part),
            do_sample=True,
            temperature=0.6 if index % 4 == 3 else 1.0,
            top_k=0,
            max_new_tokens=settings.sampled_length - settings.prompt_length,
        )
        rows += written.to(torch.int16)
        if progress.is_due(len(rows)):
            progress.report(len(rows), "sampled text")
    return torch.stack(rows)


def cached(path: Path, resume: bool, compute: Callable[[], Result]) -> Result:
    """The result that an earlier run left at `path` when resuming, else computed anew and left there."""
    if resume and path.exists():
        return torch.load(path, weights_only=True)
    result = compute()
    save_whole(result, path)
    return result
