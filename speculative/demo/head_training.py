"""An EAGLE-3 head learns the target's distributions through its own outputs: training-time test (Li et al. 2025, 3.2).

Entry i of a row pairs the target's hidden states at token i with token i + 1. Step k of the test, from 0, feeds the
outputs of step k - 1 in the place of the features, with tokens and targets k further to the left and rotary positions
i + k, so that step k of entry i is the node at depth k + 1 below it. It sees what it will see in decoding: the entries
j <= i with the target's own features, and the nodes above it, entry i of steps 1 to k.

The loss is that of the plain draft, TV + 0.5 KL, with decay^k at step k. The target runs once; its hidden states are
kept, and the last of them, behind its final norm, is both one of the head's taps and what P is recomputed from.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx
from transformers import LlamaForCausalLM

from heavypath.speculative.demo import corpus
from heavypath.speculative.demo.distillation import Distillation, cached, write_text
from heavypath.speculative.demo.optimization import Optimization, Progress
from heavypath.speculative.drafts.heads.config import HeadConfig
from heavypath.speculative.drafts.heads.eagle import EagleHead

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
    progress = Progress(len(rows), rows.shape[1])
    for start in range(0, len(rows), 8):
        part = rows[start : start + 8].long()
        hidden = target.model(input_ids=part, use_cache=False, output_hidden_states=True).hidden_states
        for index, tap in enumerate(taps):
            states[start : start + 8, :, index] = hidden[tap]
        progress.report(min(start + 8, len(rows)), "taps")
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
    steps = settings.steps
    checkpoint = work / f"head_{steps}.pt"
    optimization = Optimization(head, settings)
    done, seconds = optimization.load(checkpoint) if resume else (0, 0.0)
    shared = target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach()
    compiled_loss = torch.compile(chain_loss, dynamic=False)
    progress = Progress(steps, settings.tokens_per_step, done, seconds)

    for step, (rows, depths) in islice(enumerate(tap_batches(teacher, settings)), done, steps):
        loss_of = compiled_loss if rows.tokens.shape[1] <= COMPILED_LENGTH else chain_loss
        loss, overlaps = loss_of(head.train(), rows, shared, depths, settings)
        loss.backward()
        optimization.step(step)
        shown = " ".join(f"{overlap:.3f}" for overlap in overlaps.tolist())
        progress.report(step + 1, f"length {rows.tokens.shape[1]}  overlaps {shown}")
        if (step + 1) % CHECKPOINT_STEPS == 0 or step + 1 == steps:
            optimization.save(checkpoint, step + 1, progress.seconds)
    return progress.seconds


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


def chain_loss(
    head: EagleHead, rows: TapRows, shared: tuple[Tensor, Tensor], depths: int, settings: HeadTraining
) -> tuple[Tensor, Tensor]:
    """The loss, and the mean overlap at every depth [depths]; `shared` are the target's embedding and lm_head."""
    embedding, target_head = shared
    target_logprobs = (rows.taps[:, 1:, -1].float() @ target_head.T).log_softmax(-1)  # [rows, length - 1, V]
    target_probs = target_logprobs.exp()
    negative_entropy = (target_probs * target_logprobs).sum(-1)
    loss, overlaps = torch.zeros(()), []
    for step, hidden in enumerate(chain_outputs(head, rows, embedding, depths)):
        span = slice(step, step + hidden.shape[1])
        overlap, cross_entropy = _Agreement.apply(  # pyright: ignore[reportGeneralTypeIssues]
            head.before_lm_head(hidden).flatten(0, 1),
            target_head,
            target_probs[:, span].flatten(0, 1),
            settings.divergence_weight,
        )
        divergence = cross_entropy + settings.divergence_weight * negative_entropy[:, span].mean()
        loss = loss + settings.decay**step * (1 - overlap + divergence)
        overlaps.append(overlap.detach())
    return loss, torch.stack(overlaps)


def chain_outputs(head: EagleHead, rows: TapRows, embedding: Tensor, depths: int) -> Iterator[Tensor]:
    """The head's outputs [rows, length - depths, H] at every step: entry i of step k predicts token i + k + 2."""
    entries = rows.tokens.shape[1] - depths
    hidden = head.features(rows.taps[:, :entries].float().unbind(2))
    embedded = F.embedding(rows.tokens[:, 1:].long(), embedding)
    cos, sin = head.rotary_emb(hidden, torch.arange(entries + depths)[None])
    attend = ChainAttention()
    for step in range(depths):
        span = slice(step, step + entries)
        hidden = head(hidden, embedded[:, span], (cos[:, span], sin[:, span]), attend)
        yield hidden
        hidden = head.fed_back(hidden)


class ChainAttention:
    """Attention of a step: to the first step's entries up to one's own, and to one's own entry of the later steps."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Of query [B, Hq, N, D], and this step's key and value [B, Hkv, N, D]; as query."""
        groups = query.shape[1] // key.shape[1]
        self.keys.append(key)
        self.values.append(value)
        return _AttentionToChains.apply(  # pyright: ignore[reportReturnType]
            query, *(_for_all_heads(states, groups) for states in (*self.keys, *self.values))
        )


def _for_all_heads(states: Tensor, groups: int) -> Tensor:
    return states[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)


class _AttentionToChains(Function):
    """Causal attention over the first keys, joined with one elementwise product for each of the others.

    Backward, the fused kernel gets the joint output and normaliser: of these it makes the first keys' share of the
    joint gradient, as in ring attention (Liu et al. 2023).
    """

    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, *states: Tensor) -> Tensor:
        keys, values = states[: len(states) // 2], states[len(states) // 2 :]
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys[0], values[0], 0.0, True)
        if len(keys) > 1:
            scores = [(query * key).sum(-1) * query.shape[-1] ** -0.5 for key in keys[1:]]
            first, total = total, torch.stack([total, *scores], -1).logsumexp(-1)
            out = out * (first - total).exp()[..., None]
            for score, value in zip(scores, values[1:], strict=True):
                out = out + (score - total).exp()[..., None] * value
        ctx.save_for_backward(query, out, total, *states)
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, out, total, *states = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue]
        keys, values = states[: len(states) // 2], states[len(states) // 2 :]
        scale = query.shape[-1] ** -0.5
        grad_query, *first = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, keys[0], values[0], out, total, 0.0, True
        )
        grad_keys, grad_values = [first[0]], [first[1]]
        shared = (grad * out).sum(-1)
        for key, value in zip(keys[1:], values[1:], strict=True):
            weight = ((query * key).sum(-1) * scale - total).exp()
            grad_score = (weight * ((grad * value).sum(-1) - shared) * scale)[..., None]
            grad_query = grad_query + grad_score * key
            grad_keys.append(grad_score * query)
            grad_values.append(weight[..., None] * grad)
        return grad_query, *grad_keys, *grad_values


class _Agreement(Function):
    """Mean overlap of P with Q = softmax(hidden @ head^T), and the weighted mean of -sum P log Q.

    The gradient of (weighted mean - overlap) is made on the way, so that no logits are kept.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, head: Tensor, target_probs: Tensor, weight: float
    ) -> tuple[Tensor, Tensor]:
        logprobs = (hidden @ head.T).log_softmax(-1)  # [positions, V]
        probs = logprobs.exp()
        overlap = torch.minimum(target_probs, probs).sum(-1).mean()
        cross_entropy = weight * -(target_probs * logprobs).sum(-1).mean()
        rising = torch.where(probs < target_probs, probs, 0.0)
        grad_logits = probs * rising.sum(-1, keepdim=True) - rising + weight * (probs - target_probs)
        ctx.save_for_backward(grad_logits @ head / len(hidden))
        return overlap, cross_entropy

    @staticmethod
    def backward(ctx: FunctionCtx, grad_overlap: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_hidden,) = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue]
        return grad * grad_hidden, None, None, None
