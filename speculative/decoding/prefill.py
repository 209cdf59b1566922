"""Split a prefill into passes: which tokens of which sequences each pass reads.

Sequences of a batch lack different numbers of tokens, because prompts have different lengths and a past may have a part
of them. One pass for all would compute padding, one pass for each would read the weights each time.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from heavypath.speculative.decoding.request import Request
from heavypath.speculative.decoding.step import StepPlan
from heavypath.speculative.models.forward import host_can_read

# One more pass costs about as much time as this many rows: weights are read again, and on a GPU kernels are launched.
ROWS_OF_A_PASS = {"cpu": 16, "cuda": 512}


class Block(NamedTuple):
    """The tokens that one prefill pass reads: `width` consecutive tokens of each sequence in the first `slots` slots.

    starts: for each of these slots, the position of the first token that is read
    """

    slots: int
    width: int
    starts: list[int]


def blocks_of(ends: list[int], cached: list[int], rows_of_pass: float) -> list[Block]:
    """Split prefill into blocks.

    ends, cached: for each slot, how many tokens are to be cached, and how many are; slots that lack most come first

    All sequences with missing tokens take part in the first block. Those with most continue in further blocks, if this
    saves more rows than another pass costs. If a sequence lacks fewer tokens than a block's width, some of its rows are
    computed again, so that no padding lies after the end of the cache.

    rows_of_pass: the number of rows that cost as much as one more pass
    """
    missing = []
    for end, have in zip(ends, cached, strict=True):
        missing.append(max(0, end - have))
    borders = [0, *sorted({*missing} - {0})]  # how many missing tokens may have been read when a block ends
    slots = []  # the slots of a block that begins at each border: up to the last one that lacks more tokens
    for border in borders:
        lacking = [slot for slot, lacks in enumerate(missing) if lacks > border]
        last_slot = max(lacking, default=-1)
        slots.append(last_slot + 1)
    blocks: list[Block] = []
    split = _cheapest_split(borders, slots, rows_of_pass)
    for first, last in pairwise(split):
        width = borders[last] - borders[first]
        starts = []
        for slot in range(slots[first]):
            next_missing = cached[slot] + borders[first]
            start = min(next_missing, ends[slot] - width)
            starts.append(max(0, start))
        blocks.append(Block(slots[first], width, starts))
    return blocks


def _cheapest_split(borders: list[int], slots: list[int], rows_of_pass: float) -> list[int]:
    """The numbers of the borders at which the blocks of least cost begin and end, by dynamic programming.

    slots: for each border, the slots of a block that begins there; rows_of_pass: as in `blocks_of`
    """
    costs: list[float] = [0]  # the least cost of reading up to each border
    splits = [[0]]  # and the borders of the blocks that have it
    for last in range(1, len(borders)):
        ways = []
        for first in range(last):
            width = borders[last] - borders[first]
            rows = slots[first] * width
            cost = costs[first] + rows + rows_of_pass
            ways.append((cost, first))
        cost, first = min(ways)
        costs.append(cost)
        splits.append([*splits[first], last])
    return splits[-1]


def rows_of_a_pass(plan: StepPlan, *, in_one_pass: bool = False) -> float:
    """Return how many rows cost as much as one more pass; infinity if all sequences must go through in one pass.

    This is so if weights are streamed for each pass, if the longest sequence of a pass decides its rotary embeddings,
    and if prompts hold more than tokens (`in_one_pass`).
    """
    if in_one_pass or plan.target.stream is not None:
        return math.inf
    for model in (plan.target, *plan.draft.models):
        if model.rope_limit is not None:
            return math.inf
    on_host = host_can_read(plan.target.device)
    return ROWS_OF_A_PASS["cpu" if on_host else "cuda"]


def most_missing_first(request: Request) -> list[int]:
    """Return the order in which a request's sequences take slots: those with the most tokens to compute first."""
    ends = (request.lengths - 1).tolist()
    sequences = range(len(ends))
    if request.inputs is not None:
        return [*sequences]
    have = [0] * len(ends)
    if request.past is not None:
        before_roots = request.prompt[:, :-1]
        have = request.past.shared(before_roots, ends).lengths

    def missing(sequence: int) -> int:
        return ends[sequence] - have[sequence]

    return sorted(sequences, key=missing, reverse=True)


def pieces(
    tokens: Tensor, blocks: Sequence[Block], chunk: int | None, shared: int = 0
) -> Iterator[tuple[Tensor, list[int]]]:
    """Cut blocks of tokens LongTensor[B, T] into pieces; yield each with the position of each sequence's first token.

    A piece, LongTensor[slots, any], has at most `chunk` tokens of each sequence, and the next `shared` tokens, with
    which the next piece begins again.
    """
    last_column = tokens.shape[1] - 1
    for block in blocks:
        of_slots = tokens[: block.slots]
        starts = torch.tensor(block.starts, device=tokens.device)
        is_last = block is blocks[-1]
        block_end = block.width if is_last else block.width + shared
        width = chunk or block.width
        for begin in range(0, block.width, width):
            end = min(block_end, begin + width + shared)
            column = torch.arange(begin, end, device=tokens.device)
            positions = starts[:, None] + column  # [slots, any]
            positions = positions.clamp(max=last_column)  # undefined after a sequence's end
            first_positions = [start + begin for start in block.starts]
            yield of_slots.gather(1, positions), first_positions
