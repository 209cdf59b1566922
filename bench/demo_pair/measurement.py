"""Acceptance of the pair and the head, on text that neither the tokenizer nor the models saw.

`python bench/train_demo_pair.py --stage measure` and `--stage measure-head` run it.
"""

from itertools import pairwise

import torch
from demo_pair import corpus
from transformers import LlamaForCausalLM

from heavypath.speculative.drafts.heads.eagle import EagleHead
from heavypath.speculative.training.learning import measure_agreement
from heavypath.speculative.training.memory import RowsAtATime
from heavypath.speculative.training.record import environment
from heavypath.speculative.training.student import student_of_head
from heavypath.speculative.training.teacher import Teacher
from heavypath.speculative.trees.acceptance import measure_acceptance

ROW_LENGTH = 512
TRAIN_ROWS = 200  # of 513 tokens, spread over the corpus
TEMPERATURES = (0.0, 0.6, 1.0)
CHILDREN = 8
HEAD_DEPTHS = 5


def measure_pair(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, documents: list[torch.Tensor], held_out: list[torch.Tensor]
) -> dict:
    """Sizes, losses, overlap and acceptance vectors of a pair, with the machine and versions that measured them."""
    models = {"target": target, "draft": draft}
    held_out_rows = corpus.windows(held_out, ROW_LENGTH + 1)
    train_rows = corpus.windows(documents, ROW_LENGTH + 1)
    train_rows = train_rows[:: len(train_rows) // TRAIN_ROWS]
    input_ids = held_out_rows[:, :-1].long()
    return {
        "parameters": {name: sum(each.numel() for each in model.parameters()) for name, model in models.items()},
        "loss": {
            name: {
                "train": _rounded(losses(model, train_rows).mean()),
                "held_out": _rounded(losses(model, held_out_rows).mean()),
                "held_out_by_position": _loss_by_position(model, corpus.windows(held_out, 1025)),
            }
            for name, model in models.items()
        },
        "overlap_at_temperature_1": _rounded(mean_overlap(target, draft, input_ids)),
        "acceptance": {
            str(temperature): _acceptance(target, draft, input_ids, temperature) for temperature in TEMPERATURES
        },
        "acceptance_measured_on": f"{input_ids.numel()} held-out positions, rows of {ROW_LENGTH}, children without "
        "replacement (temperature 0: the draft's largest logits)",
        **environment(),
    }


def agreement_on(head: EagleHead, target: LlamaForCausalLM, held_out: list[torch.Tensor]) -> dict:
    """A head's size and, for every depth from the root, how well it agrees with the target."""
    rows = corpus.windows(held_out, ROW_LENGTH)
    teacher = Teacher(target, head.config.taps)
    parts = RowsAtATime(8, "free some", print)
    overlaps, same = measure_agreement(student_of_head(head, target), teacher, rows, HEAD_DEPTHS, parts)
    return {
        "parameters": sum(each.numel() for each in head.parameters()),
        "overlap_at_temperature_1": [_rounded(value) for value in overlaps],
        "same_likeliest_token": [_rounded(value) for value in same],
        "measured_on": f"{len(rows) * (ROW_LENGTH - HEAD_DEPTHS)} held-out positions, rows of {ROW_LENGTH}, at depths "
        f"1 to {HEAD_DEPTHS}, the text's own tokens on the way",
        **environment(),
    }


@torch.no_grad()
def losses(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Next-token loss at every position, [rows, length], for int16 rows [rows, length + 1]."""
    parts = []
    for part in rows.long().split(8):
        logprobs = model(input_ids=part[:, :-1], use_cache=False).logits.float().log_softmax(-1)
        parts.append(-logprobs.gather(2, part[:, 1:, None]).squeeze(2))
    return torch.cat(parts)


@torch.no_grad()
def mean_overlap(target: LlamaForCausalLM, draft: LlamaForCausalLM, input_ids: torch.Tensor) -> torch.Tensor:
    """E[sum_v min(P, Q)] at temperature 1 over all positions of [rows, length]: a first child's acceptance."""
    parts = []
    for part in input_ids.split(8):
        target_probs, draft_probs = (
            model(input_ids=part, use_cache=False).logits.float().softmax(-1) for model in (target, draft)
        )
        parts.append(torch.minimum(target_probs, draft_probs).sum(-1))
    return torch.cat(parts).mean()


def _acceptance(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, input_ids: torch.Tensor, temperature: float
) -> dict[str, list[float]]:
    unconditional = measure_acceptance(target, draft, input_ids, temperature=temperature, children=CHILDREN)
    all_earlier_rejected = 1 - unconditional.cumsum(0) + unconditional
    return {
        "unconditional": [_rounded(value) for value in unconditional],
        "given_earlier_rejected": [_rounded(value) for value in unconditional / all_earlier_rejected],
    }


def _loss_by_position(model: LlamaForCausalLM, rows: torch.Tensor) -> dict[str, float]:
    by_position = losses(model, rows).mean(0)  # [1024]
    edges = (0, 64, 256, 512, 768, 1024)
    return {f"{start}-{end - 1}": _rounded(by_position[start:end].mean()) for start, end in pairwise(edges)}


def _rounded(value: torch.Tensor) -> float:
    return round(value.item(), 4)
