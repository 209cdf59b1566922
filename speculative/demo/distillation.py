"""The draft learns the target's next-token distribution rather than the text.

With P the target's distribution and Q the draft's at one position, a drafted token is accepted with probability
sum_v min(P, Q) = 1 - TV(P, Q) (Leviathan et al. 2023, corollary 3.6), so the loss is TV + 0.5 KL(P || Q): the first is
what acceptance is made of, the second keeps a gradient where the two hardly overlap. The target runs once over the
corpus and over text it wrote itself; its last hidden states are kept, and P is recomputed from them at every step.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from transformers import LlamaForCausalLM

from heavypath.speculative.demo import corpus
from heavypath.speculative.demo.optimization import Optimization, Progress, Schedule, fast_autocast, save_whole

Result = TypeVar("Result")


@dataclass(frozen=True)
class Distillation(Schedule):
    """What learning from the target takes, be it a draft or a head that learns."""

    tokens_per_step: int
    seed: int
    sampled_rows: int = 1024  # of text the target writes: three quarters at temperature 1, the rest at 0.6
    sampled_length: int = 256
    prompt_length: int = 32
    divergence_weight: float = 0.5


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
    checkpoint = work / f"draft_{settings.corpus_length}.pt"
    optimization = Optimization(draft, settings)
    done, seconds = optimization.load(checkpoint) if resume else (0, 0.0)
    steps = settings.steps
    progress = Progress(steps, settings.tokens_per_step, done, seconds)
    teacher = ask_teacher(target, documents, settings, work, resume)
    target_head = target.lm_head.weight.detach().bfloat16()  # [V, H]
    compiled_loss = torch.compile(distillation_loss, dynamic=False)

    for step, rows in islice(enumerate(teacher_batches(teacher, settings)), done, steps):
        with fast_autocast():
            variation, divergence = compiled_loss(draft.train(), rows.tokens.long(), rows.hidden, target_head)
        (variation + settings.divergence_weight * divergence).backward()
        optimization.step(step)
        progress.report(step + 1, f"overlap {1 - variation.item():.4f}  KL {divergence.item():.3f}")
        if (step + 1) % 500 == 0 or step + 1 == steps:
            optimization.save(checkpoint, step + 1, progress.seconds)
    return progress.seconds


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


def distillation_loss(
    draft: LlamaForCausalLM, tokens: torch.Tensor, target_hidden: torch.Tensor, target_head: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean TV(P, Q) and mean KL(P || Q) over rows [rows, length] and hidden states [rows, length, H]."""
    draft_logprobs = draft(input_ids=tokens, use_cache=False).logits.float().log_softmax(-1)  # [rows, length, V]
    target_logprobs = (target_hidden @ target_head.T).float().log_softmax(-1)
    target_probs = target_logprobs.exp()
    overlap = torch.minimum(target_probs, draft_logprobs.exp()).sum(-1).mean()
    divergence = (target_probs * (target_logprobs - draft_logprobs)).sum(-1).mean()
    return 1 - overlap, divergence


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
    progress = Progress(len(rows), rows.shape[1])
    for start in range(0, len(rows), 8):
        with fast_autocast():
            part = target.model(input_ids=rows[start : start + 8].long(), use_cache=False).last_hidden_state
        hidden[start : start + 8] = part
        progress.report(min(start + 8, len(rows)), "hidden states")
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
    progress = Progress(settings.sampled_rows, settings.sampled_length)
    rows = []
    for index, part in enumerate(prompts.split(settings.sampled_rows // 8)):
        written = writer.generate(  # pyright: ignore[reportAttributeAccessIssue]
            part,
            attention_mask=torch.ones_like(part),
            do_sample=True,
            temperature=0.6 if index % 4 == 3 else 1.0,
            top_k=0,
            max_new_tokens=settings.sampled_length - settings.prompt_length,
        )
        rows.append(written.to(torch.int16))
        progress.report(sum(map(len, rows)), "sampled text")
    return torch.cat(rows)


def cached(path: Path, resume: bool, compute: Callable[[], Result]) -> Result:
    """What an earlier run left at `path` when resuming, else computed anew and left there."""
    if resume and path.exists():
        return torch.load(path, weights_only=True)
    result = compute()
    save_whole(result, path)
    return result
