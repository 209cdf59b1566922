"""Commit accepted tokens: append them to each sequence and update the state of decoding, in place.

With a sequence's path 0, n_1, .. n_a and the token t after it, the emitted tokens are

    tokens[n_1] .. tokens[n_a], t        a + 1 tokens, cut after the first end-of-sequence token, and at the
                                         sequence's full length

and t is the root of the sequence's next tree. How often a child was offered below an accepted node, and how often it
was accepted, is counted at index (depth of the node) * branching + (rank of the child).

In PyTorch operations this would take fifty launches on a few numbers each. The kernel is one launch with a program for
each sequence.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.implementation import check_rows, choose_impl, operator
from heavypath.kernels.language import tl, triton
from heavypath.kernels.nodes import Nodes, Verified
from heavypath.kernels.step_kernels import kernels_by


class StateField(IntEnum):
    """The rows of `State.numbers`, with one number for each sequence that is being decoded.

    LEFT is -1 if the sequence's logits gave no distribution, and has other values below 0 by `ranks.agreement`.
    """

    ROOT = 0  # the last committed token, which is not in the target's cache yet
    PREVIOUS = 1  # the token before the root; the root again if there is none
    LENGTHS = 2  # tokens before the root; also the rows of the target's cache in use
    PRODUCED = 3  # new tokens so far
    LEFT = 4  # new tokens still to come; 0 if the sequence has ended, below 0 if an error stopped it
    STEPS = 5  # steps of the sequence so far
    NODES = 6  # tree nodes that the target scored in these steps
    MEMBER = 7  # the sequence's index in the batch, which is its row of `State.output`
    NOISE = 8  # the first of the sequence's noise rows; a commit neither reads nor changes it


_ROOT = tl.constexpr(StateField.ROOT.value)
_PREVIOUS = tl.constexpr(StateField.PREVIOUS.value)
_LENGTHS = tl.constexpr(StateField.LENGTHS.value)
_PRODUCED = tl.constexpr(StateField.PRODUCED.value)
_LEFT = tl.constexpr(StateField.LEFT.value)
_STEPS = tl.constexpr(StateField.STEPS.value)
_NODES = tl.constexpr(StateField.NODES.value)
_MEMBER = tl.constexpr(StateField.MEMBER.value)
_BLOCK = tl.constexpr(128)  # nodes that a program reads in one iteration


class State(NamedTuple):
    """The state of the sequences in b slots, of a batch of B. A commit changes it in place.

    numbers: LongTensor[9, b], a row for each `StateField`
    output:  LongTensor[B, M], each sequence's new tokens
    stops:   LongTensor[any], end-of-sequence tokens, -1 for none; a commit does not change them
    seen:    bool [b, V], the tokens of each sequence so far, for a repetition penalty; [b, 0] without one
    counts:  LongTensor[2, any], how often each child was offered, and how often it was accepted

    Rows are contiguous in memory, but need not be adjacent.
    """

    numbers: Tensor
    output: Tensor
    stops: Tensor
    seen: Tensor
    counts: Tensor


@operator
def commit(
    state: State, nodes: Nodes, depths: Tensor, verified: Verified, branching: int, *, impl: str = "auto"
) -> None:
    """Commit verified trees. In a sequence that has ended only root and previous change.

    nodes:     the drafted trees of the b slots, with ranks
    depths:    LongTensor shaped as nodes.parents; the root's depth is 0
    verified:  the result of `verify_tree`
    branching: the most children that any node has
    impl:      see `implementation`; "triton" is one launch without host synchronisation, and "torch" takes CPU tensors.
               Only the device is checked, and that the rows of the state are contiguous, unless impl is "torch"
    """
    impl = choose_impl("commit", impl, nodes.tokens, native=True)
    if impl == "torch" and nodes.tokens.is_cuda:
        raise ValueError("commit: impl 'torch' takes CPU tensors, got CUDA tensors; take impl 'triton'")
    check_rows(impl, {f"state.{name}": field for name, field in state._asdict().items() if name != "stops"})
    kernels_by(impl).commit(state, nodes, depths, verified, branching)


def reference(state: State, nodes: Nodes, depths: Tensor, verified: Verified, branching: int) -> None:
    """Compute `commit` for CPU tensors, in NumPy."""
    numbers, output, stops, seen, counts = (field.numpy() for field in state)
    assert nodes.ranks is not None
    token, parents, ranks, depth = (field.numpy() for field in (nodes.tokens, nodes.parents, nodes.ranks, depths))
    path, length, after = (field.numpy() for field in verified)
    produced, left, member = (numbers[field] for field in (StateField.PRODUCED, StateField.LEFT, StateField.MEMBER))
    every = np.arange(len(path))[:, None]
    place = np.arange(path.shape[1])
    active = left > 0

    emitted = np.empty_like(path)  # [b, P]; undefined after a sequence's last token
    emitted[:, :-1] = token[every, path[:, 1:]]
    emitted[every[:, 0], length] = after
    stop = (emitted[..., None] == stops).any(-1) & (place <= length[:, None])
    until = np.where(stop.any(1), stop.argmax(1), len(place)) + 1  # tokens up to the first end-of-sequence token
    most = np.minimum(length + 1, left)
    count = np.maximum(np.minimum(most, until), 0)
    slot, column = (place < count[:, None]).nonzero()
    output[member[slot], produced[slot] + column] = emitted[slot, column]
    if seen.shape[1]:
        slot, column = ((place < count[:, None]) & (emitted >= 0)).nonzero()
        seen[slot, emitted[slot, column]] = True

    if token.shape[1] > 1:
        parent = parents[..., 1:]
        rank = ranks[..., 1:]
        child = np.arange(1, token.shape[1])
        above = np.maximum(depth[..., 1:] - 1, 0)  # an absent node may have depth 0
        offered = (path[every, above] == parent) & (token[:, 1:] >= 0) & active[:, None]
        accepted = offered & (path[every, above + 1] == child)
        where = above * branching + rank + 0 * every
        for total, counted in zip(counts, (offered, accepted), strict=True):
            total += np.bincount(where[counted], minlength=len(total))

    numbers[StateField.PREVIOUS] = token[every[:, 0], path[every[:, 0], length]]
    numbers[StateField.ROOT] = np.maximum(after, 0)
    numbers[StateField.LENGTHS] += (length + 1) * active
    numbers[StateField.STEPS] += active
    numbers[StateField.NODES] += token.shape[1] * active
    produced += count
    left -= count
    left[until <= most] = 0
    left[active & (after < 0)] = -1


@triton.jit
def _add(number_ptr, more):
    tl.store(number_ptr, tl.load(number_ptr) + more)


@triton.jit(do_not_specialize=["N", "P", "STOPS", "branching", "slots", "columns", "vocabulary", "count_slots"])
def _commit_kernel(
    numbers_ptr,
    output_ptr,
    stops_ptr,
    seen_ptr,
    counts_ptr,
    tokens_ptr,
    parents_ptr,
    ranks_ptr,
    depths_ptr,
    path_ptr,
    length_ptr,
    after_ptr,
    slots,
    columns,
    vocabulary,
    count_slots,
    N,
    P,
    STOPS,
    branching,
    PER_SEQUENCE: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Each program does one sequence, in one warp: a second warp could read numbers that the first has changed already.

    slots, columns, vocabulary, count_slots: strides between the rows of numbers, output, seen and counts.
    """
    slot = tl.program_id(0).to(tl.int64)
    numbers_ptr += slot
    path_ptr += slot * P
    tokens_ptr += slot * N
    if PER_SEQUENCE:
        parents_ptr += slot * N
        depths_ptr += slot * N
        ranks_ptr += slot * N
    length = tl.load(length_ptr + slot)
    after = tl.load(after_ptr + slot)
    left = tl.load(numbers_ptr + _LEFT * slots)
    produced = tl.load(numbers_ptr + _PRODUCED * slots)
    active = left > 0

    place = tl.arange(0, BLOCK_P)
    node = tl.load(path_ptr + place + 1, mask=place < length, other=0)
    emitted = tl.load(tokens_ptr + node, mask=place < length, other=0)
    emitted = tl.where(place < length, emitted, after)
    stop = tl.zeros([BLOCK_P], tl.int32)
    for i in range(STOPS):
        stop = tl.where(emitted == tl.load(stops_ptr + i), 1, stop)
    until = tl.min(tl.where((stop > 0) & (place <= length), place, BLOCK_P)) + 1
    most = tl.minimum(length + 1, left)
    count = tl.maximum(tl.minimum(most, until), 0)
    output_ptr += tl.load(numbers_ptr + _MEMBER * slots) * columns + produced
    tl.store(output_ptr + place, emitted, mask=place < count)
    if HAS_SEEN:
        tl.store(seen_ptr + slot * vocabulary + emitted, 1, mask=(place < count) & (emitted >= 0))

    if active:
        for start in range(1, N, _BLOCK):
            child = start + tl.arange(0, _BLOCK)
            there = child < N
            there = there & (tl.load(tokens_ptr + child, mask=there, other=-1) >= 0)
            above = tl.load(depths_ptr + child, mask=there, other=1) - 1
            there = there & (above >= 0) & (above <= length)
            parent = tl.load(parents_ptr + child, mask=there, other=-1)
            offered = there & (tl.load(path_ptr + above, mask=there, other=-2) == parent)
            accepted = offered & (above < length)
            accepted = accepted & (tl.load(path_ptr + above + 1, mask=accepted) == child)
            where = counts_ptr + above * branching + tl.load(ranks_ptr + child, mask=there, other=0)
            one = tl.full([_BLOCK], 1, tl.int64)
            tl.atomic_add(where, one, mask=offered, sem="relaxed")
            tl.atomic_add(where + count_slots, one, mask=accepted, sem="relaxed")
        _add(numbers_ptr + _LENGTHS * slots, length + 1)
        _add(numbers_ptr + _STEPS * slots, 1)
        _add(numbers_ptr + _NODES * slots, N)

    tl.store(numbers_ptr + _PREVIOUS * slots, tl.load(tokens_ptr + tl.load(path_ptr + length)))
    tl.store(numbers_ptr + _ROOT * slots, tl.maximum(after, 0))
    tl.store(numbers_ptr + _PRODUCED * slots, produced + count)
    left_now = tl.where(until <= most, 0, left - count)
    tl.store(numbers_ptr + _LEFT * slots, tl.where(active & (after < 0), -1, left_now))


def launch(state: State, nodes: Nodes, depths: Tensor, verified: Verified, branching: int) -> None:
    """Compute `reference` by the kernel."""
    numbers, output, stops, seen, counts = state
    tokens, parents, ranks = nodes
    assert ranks is not None
    per_sequence = any(field.dim() == 2 for field in (parents, ranks, depths))
    parents, ranks, depths = (
        (field.expand_as(tokens) if per_sequence else field).contiguous() for field in (parents, ranks, depths)
    )
    path, length, after = (field.contiguous() for field in verified)
    with torch.cuda.device_of(tokens):
        _commit_kernel[(len(tokens),)](
            numbers_ptr=numbers,
            output_ptr=output,
            stops_ptr=stops.contiguous(),
            seen_ptr=seen.view(torch.int8),
            counts_ptr=counts,
            tokens_ptr=tokens.contiguous(),
            parents_ptr=parents,
            ranks_ptr=ranks,
            depths_ptr=depths,
            path_ptr=path,
            length_ptr=length,
            after_ptr=after,
            slots=numbers.stride(0),
            columns=output.stride(0),
            vocabulary=seen.stride(0),
            count_slots=counts.stride(0),
            N=tokens.shape[1],
            P=path.shape[1],
            STOPS=len(stops),
            branching=branching,
            PER_SEQUENCE=per_sequence,
            HAS_SEEN=seen.shape[1] > 0,
            BLOCK_P=triton.next_power_of_2(path.shape[1]),
            num_warps=1,
            enable_fp_fusion=False,
        )
