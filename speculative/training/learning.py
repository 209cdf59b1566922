"""Compute a batch's gradients, and measure how well a student agrees with its target, in chunks of positions.

Logits are the largest tensors of a training: for each position, V of the target and Vd of the draft at each depth. So
logits and their gradients are computed for a chunk of positions at a time, and only where `Taught.predicts` asks for
them, which is after no token of a prompt. Only hidden states are kept for the whole batch. The loss of a batch is the
sum over depths of weight * mean over the entries that are predicted, which does not depend on the chunks.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from heavypath.speculative.training.losses import Loss, overlap_and_divergence
from heavypath.speculative.training.memory import RowsAtATime
from heavypath.speculative.training.student import Student
from heavypath.speculative.training.teacher import Logits, Taught, Teacher

LOGITS_AT_ONCE = 2**25  # of the target, on a GPU: 128 MB, and a few times as much for tensors computed from them
POSITIONS_AT_ONCE = 64  # on a CPU, so that the logits of a draft's vocabulary stay in the cache


class Learnt(NamedTuple):
    """The result of a batch; of a part of a batch, its contribution to both.

    loss: [], the weighted loss
    overlaps: [K], the mean of sum_v min(P, Q) at each depth, which is the chance that a drafted token is accepted; NaN
        at depths whose weight is 0
    """

    loss: Tensor
    overlaps: Tensor


class _Piece(NamedTuple):
    """A chunk of m entries of a student's outputs at one depth.

    rows, entries: LongTensor[m] each, where they are in the outputs
    target_logits: [m, V], the target's logits for the tokens that these entries predict
    target_logprobs: [m, Vd], log P of the student's tokens
    """

    depth: int
    rows: Tensor
    entries: Tensor
    target_logits: Tensor
    target_logprobs: Tensor


def learn(
    student: Student,
    rows: Taught,
    target_logits: Logits,
    loss: Loss,
    weights: Sequence[float],
    batch: Tensor | None = None,
) -> Learnt:
    """Add the gradients of a batch's loss to the student's parameters. Returns the loss and the overlaps.

    rows:          the teacher's output for the rows
    target_logits: a function from the target's last hidden states to its logits, `Teacher.logits`; for kept rows to
                   those of the student's tokens, `KeptStates.logits`
    loss:          one of `training.losses`
    weights:       the weight of each depth; their number is the number of depths. No logits are computed for weight 0
    batch:         bool [R, L], `Taught.predicts` of the whole batch, if the rows are only a part of it
    """
    with student.autocast():
        outputs = student.outputs(rows, len(weights))
    zeros = partial(torch.zeros, dtype=torch.float32, device=outputs[0].device)
    found = Learnt(zeros(()), zeros(len(outputs)))
    gradients = {depth: torch.zeros_like(output) for depth, output in enumerate(outputs) if weights[depth]}
    for depth in range(len(outputs)):
        if depth not in gradients:
            found.overlaps[depth] = torch.nan
    counts = _counts(student, _predicts(rows) if batch is None else batch, outputs)
    for depth, row, entries, _, target_logprobs in _pieces(student, rows, target_logits, outputs):
        if depth not in gradients:
            continue
        hidden = outputs[depth][row, entries].detach().requires_grad_()
        with student.autocast():
            (draft_logits,) = student.logits(hidden[None], depth)
        losses, overlaps = loss(target_logprobs, draft_logits)
        weighted = weights[depth] * losses.sum() / counts[depth]
        weighted.backward()
        assert hidden.grad is not None
        gradients[depth][row, entries] = hidden.grad
        found.loss.add_(weighted.detach())
        found.overlaps[depth] += overlaps.detach().sum() / counts[depth]
    torch.autograd.backward([outputs[depth] for depth in gradients], [*gradients.values()])
    return found


@torch.no_grad()
def measure_agreement(
    student: Student,
    teacher: Teacher,
    tokens: Tensor,
    depths: int,
    parts: RowsAtATime,
    predicts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """E[sum_v min(P, Q)] at temperature 1, and how often P and Q have the same most probable token, [K] each.

    Averages over all positions that are predicted, for each of K depths. A node's path consists of the rows' own
    tokens; a head reads its own outputs at the depths above. For a draft model K = 1, because all depths are alike.

    tokens:   integers [R, L]
    depths:   number of depths
    parts:    decides how many rows are processed at a time
    predicts: bool [R, L], as in `Taught`
    """

    def sums(part: Tensor) -> Tensor:  # [3, K]
        taught = teacher(tokens[part])
        if predicts is not None:
            taught = taught._replace(predicts=predicts[part])
        with student.autocast():
            outputs = student.outputs(taught, depths)
        found = torch.zeros(3, len(outputs), dtype=torch.float32, device=outputs[0].device)
        for depth, row, entries, logits, target_logprobs in _pieces(student, taught, teacher.logits, outputs):
            with student.autocast():
                (draft_logits,) = student.logits(outputs[depth][row, entries][None], depth)
            overlap, _ = overlap_and_divergence(target_logprobs, draft_logits)
            best = draft_logits.argmax(-1)
            best = best if student.tokens is None else student.tokens[best]
            same = (best == logits.argmax(-1)).float()
            found[:, depth] += torch.stack([overlap, same, torch.ones_like(same)]).sum(1)
        return found

    numbers = torch.arange(len(tokens), device=tokens.device)
    overlaps, same, counts = sum(parts.run(numbers, sums), torch.zeros((), device="cpu"))
    return overlaps / counts, same / counts


def _predicts(rows: Taught) -> Tensor:
    """bool [R, L], whether the token after each token is predicted."""
    if rows.predicts is None:
        return torch.ones(rows.tokens.shape, dtype=torch.bool, device=rows.hidden.device)
    return rows.predicts.to(rows.hidden.device)


def _counts(student: Student, predicts: Tensor, outputs: list[Tensor]) -> list[int]:
    """The number of entries that are predicted, at least 1, for each depth.

    predicts: bool [R, L]; outputs: [R, N, H] for each depth, of these rows or of some of them
    """
    entries = outputs[0].shape[1]
    firsts = [student.first + depth for depth in range(len(outputs))]  # position that entry 0 predicts
    return [max(1, int(predicts[:, first :: student.stride][:, :entries].sum())) for first in firsts]


def _pieces(student: Student, rows: Taught, target_logits: Logits, outputs: list[Tensor]) -> Iterator[_Piece]:
    """The outputs of all depths, [R, N, H] each, in chunks, with the target's logits for each.

    The target's logits at a position are computed once for all depths that predict it.
    """
    entries = outputs[0].shape[1]
    last = student.first + len(outputs) - 1 + (entries - 1) * student.stride  # position that the outputs predict
    in_rows, numbers = _predicts(rows)[:, student.first : last + 1].nonzero(as_tuple=True)
    if rows.hidden.is_cpu:
        size = POSITIONS_AT_ONCE
    else:
        size = max(1, LOGITS_AT_ONCE // target_logits(rows.hidden[:1, :1]).numel())
    for row, number in zip(in_rows.split(size), numbers.split(size), strict=True):
        position = student.first + number
        (logits,) = target_logits(rows.hidden[row, position][None])  # [m, V]
        logprobs = logits.float()
        if rows.sums is not None:
            logprobs = logprobs - rows.sums[row, position, None]
        else:
            logprobs = logprobs.log_softmax(-1)
            logprobs = logprobs if student.tokens is None else logprobs.index_select(-1, student.tokens)
        for depth in range(len(outputs)):
            entry = (number - depth) // student.stride
            is_there = ((number - depth) % student.stride == 0) & (entry >= 0) & (entry < entries)
            if is_there.all():
                yield _Piece(depth, row, entry, logits, logprobs)
            elif is_there.any():
                chosen = is_there.nonzero()[:, 0]
                yield _Piece(depth, row[chosen], entry[chosen], logits[chosen], logprobs[chosen])
