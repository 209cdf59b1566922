"""Compute a batch's gradients, and measure how well a student agrees with its target, in chunks of positions.

Logits are the largest tensors of a training: for each position, V of the target and Vd of the draft at each depth. So
logits and their gradients are computed for a chunk of positions at a time. Only hidden states are kept for the whole
batch. The loss of a batch is the sum over depths of weight * mean over positions, which does not depend on the chunks.
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
    """A chunk of n entries of a student's outputs at one depth.

    entries: which of the outputs' entries
    target_logits: [R, n, V], the target's logits for the tokens that these entries predict
    target_logprobs: [R, n, Vd], log P of the student's tokens
    """

    depth: int
    entries: slice
    target_logits: Tensor
    target_logprobs: Tensor


def learn(
    student: Student,
    rows: Taught,
    target_logits: Logits,
    loss: Loss,
    weights: Sequence[float],
    share: float = 1.0,
) -> Learnt:
    """Add the gradients of a batch's loss to the student's parameters. Returns the loss and the overlaps.

    rows:          the teacher's output for the rows
    target_logits: a function from the target's last hidden states to its logits, `Teacher.logits`; for kept rows to
                   those of the student's tokens, `KeptStates.logits`
    loss:          one of `training.losses`
    weights:       the weight of each depth; their number is the number of depths. No logits are computed for weight 0
    share:         the rows' share of the batch, if they are only a part of it
    """
    with student.autocast():
        outputs = student.outputs(rows, len(weights))
    zeros = partial(torch.zeros, dtype=torch.float32, device=outputs[0].device)
    found = Learnt(zeros(()), zeros(len(outputs)))
    gradients = {depth: torch.zeros_like(output) for depth, output in enumerate(outputs) if weights[depth]}
    for depth, entries, _, target_logprobs in _pieces(student, rows, target_logits, outputs):
        if depth not in gradients:
            found.overlaps[depth] = torch.nan
            continue
        hidden = outputs[depth][:, entries].detach().requires_grad_()
        part = share * hidden.shape[1] / outputs[depth].shape[1]
        with student.autocast():
            draft_logits = student.logits(hidden, depth)
        losses, overlaps = loss(target_logprobs, draft_logits)
        weighted = weights[depth] * part * losses.mean()
        weighted.backward()
        assert hidden.grad is not None
        gradients[depth][:, entries] = hidden.grad
        found.loss.add_(weighted.detach())
        found.overlaps[depth] += part * overlaps.detach().mean()
    torch.autograd.backward([outputs[depth] for depth in gradients], [*gradients.values()])
    return found


@torch.no_grad()
def measure_agreement(
    student: Student, teacher: Teacher, rows: Tensor, depths: int, parts: RowsAtATime
) -> tuple[Tensor, Tensor]:
    """E[sum_v min(P, Q)] at temperature 1, and how often P and Q have the same most probable token, [K] each.

    Averages over all positions, for each of K depths. A node's path consists of the rows' own tokens; a head reads its
    own outputs at the depths above. For a draft model K = 1, because all depths are alike.

    rows:   integers [R, L], tokens
    depths: number of depths
    parts:  decides how many rows are processed at a time
    """

    def sums(part: Tensor) -> Tensor:  # [2, K]
        taught = teacher(part)
        with student.autocast():
            outputs = student.outputs(taught, depths)
        found = torch.zeros(2, len(outputs), dtype=torch.float32, device=outputs[0].device)
        for depth, entries, logits, target_logprobs in _pieces(student, taught, teacher.logits, outputs):
            hidden = outputs[depth][:, entries]
            with student.autocast():
                draft_logits = student.logits(hidden, depth)
            overlap, _ = overlap_and_divergence(target_logprobs, draft_logits)
            best = draft_logits.argmax(-1)
            best = best if student.tokens is None else student.tokens[best]
            both = torch.stack([overlap.mean(), (best == logits.argmax(-1)).float().mean()])
            found[:, depth] += both * len(part) * hidden.shape[1] / outputs[depth].shape[1]
        return found

    overlaps, same = sum(parts.run(rows, sums), torch.zeros((), device="cpu")) / len(rows)
    return overlaps, same


def _pieces(student: Student, rows: Taught, target_logits: Logits, outputs: list[Tensor]) -> Iterator[_Piece]:
    """Cut the outputs of all depths, [R, N, H] each, into chunks, with the target's logits for each.

    The target's logits at a position are computed once for all depths that predict it.
    """
    entries = outputs[0].shape[1]
    stride = student.stride
    first = student.first
    last = student.first + len(outputs) + (entries - 1) * stride
    if rows.hidden.is_cpu:
        size = max(1, POSITIONS_AT_ONCE // len(rows.hidden))
    else:
        size = max(1, LOGITS_AT_ONCE // target_logits(rows.hidden[:, :1]).numel())
    for start in range(first, last, size):
        stop = min(start + size, last)
        logits = target_logits(rows.hidden[:, start:stop].contiguous())  # one product, not one for each row
        if rows.sums is not None:
            logprobs = logits.float() - rows.sums[:, start:stop, None]
        elif student.tokens is not None:
            logprobs = logits.float().log_softmax(-1).index_select(-1, student.tokens)
        else:
            logprobs = logits.float().log_softmax(-1)
        for depth in range(len(outputs)):
            shift = first + depth
            begin = max(-((shift - start) // stride), 0)
            end = min(-((shift - stop) // stride), entries)
            if begin < end:
                there = slice(begin * stride + shift - start, end * stride + shift - start, stride)
                yield _Piece(depth, slice(begin, end), logits[:, there], logprobs[:, there])
