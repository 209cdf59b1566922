"""Commit what a verification accepted: append it to each sequence's text and move the state of decoding on, in place.

With a sequence's path 0, n_1, .. n_a and the token t after it, what is emitted is

    tokens[n_1] .. tokens[n_a], t        a + 1 of them, cut behind the first end-of-sequence token and where the text
                                         is as long as it may be

and t is the root of its next tree. How often which child was offered below an accepted node, and how often it was
accepted, is counted at (depth of the node) * branching + (rank of the child).

As PyTorch operations these are fifty launches on a few numbers; here they are one, of a program for each sequence.
"""

# Triton's language is no Python that a type checker knows.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from heavypath.kernels.implementation import check_can_launch, choose_impl
from heavypath.kernels.verification import Verified

FIELDS = ("root", "previous", "lengths", "produced", "left", "steps", "nodes", "member", "noise")
_ROOT, _PREVIOUS, _LENGTHS, _PRODUCED, _LEFT, _STEPS, _NODES, _MEMBER = map(tl.constexpr, range(8))
_BLOCK = tl.constexpr(128)  # nodes that a program looks at at once


class State(NamedTuple):
    """Of the sequences in b slots, B in all, changed in place. What is in a row lies side by side; rows may lie apart.

    numbers: LongTensor[9, b], rows as FIELDS
        root      the last committed token; previous: the one before it
        lengths   tokens before the root
        produced  new tokens so far; left: still to come, 0 where the sequence has ended; -1 if the verification found
                  no distribution
        steps     so far; nodes: that the target scored in them
        member    which row of output is the sequence's
        noise     not used here
    output: LongTensor[B, M], new tokens
    stops:  LongTensor[any], end-of-sequence tokens, -1 for none; stays as it is
    seen:   bool [b, V], the tokens of the text so far, or [b, 0] where nobody asks
    counts: LongTensor[2, any], of offered and of accepted children
    """

    numbers: Tensor
    output: Tensor
    stops: Tensor
    seen: Tensor
    counts: Tensor


class Tree(NamedTuple):
    """tokens: LongTensor[b, N], -1 for an absent node; the others LongTensor[N] or [b, N], the root's depth being 0."""

    tokens: Tensor
    parents: Tensor
    ranks: Tensor
    depths: Tensor


def commit(state: State, tree: Tree, verified: Verified, branching: int, *, impl: str = "auto") -> None:
    """Commit verified trees; of a sequence that has ended only root and previous change.

    impl: "triton": one launch, no host synchronisation; CUDA tensors, or any under Triton's interpreter. "torch": CPU
          tensors. "auto": triton for CUDA tensors, else torch.

    Nothing is checked but where it runs: a decoder calls it with what other functions have checked.
    """
    if choose_impl("commit", impl, tree.tokens) == "triton":
        check_can_launch(tree.tokens)
        _launch(state, tree, verified, branching)
    else:
        if tree.tokens.is_cuda:
            raise ValueError("commit: impl 'torch' takes CPU tensors, got CUDA tensors; take impl 'triton'")
        _reference(state, tree, verified, branching)


def _reference(state: State, tree: Tree, verified: Verified, branching: int) -> None:
    numbers, output, stops, seen, counts = (field.numpy() for field in state)
    token, parents, ranks, depths = (field.numpy() for field in tree)
    path, length, after = (field.numpy() for field in verified)
    root, previous, lengths, produced, left, steps, nodes, member, _ = numbers
    every, place = np.arange(len(path))[:, None], np.arange(path.shape[1])
    active = left > 0

    emitted = np.empty_like(path)  # [b, P], then anything
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
        parent, rank, child = parents[..., 1:], ranks[..., 1:], np.arange(1, token.shape[1])
        above = np.maximum(depths[..., 1:] - 1, 0)  # an absent node may have depth 0
        offered = (path[every, above] == parent) & (token[:, 1:] >= 0) & active[:, None]
        accepted = offered & (path[every, above + 1] == child)
        where = above * branching + rank + 0 * every
        for row, counted in zip(counts, (offered, accepted), strict=True):
            row += np.bincount(where[counted], minlength=len(row))

    previous[:] = token[every[:, 0], path[every[:, 0], length]]
    root[:] = np.maximum(after, 0)
    lengths += (length + 1) * active
    produced += count
    steps += active
    nodes += token.shape[1] * active
    left -= count
    left[until <= most] = 0
    left[active & (after < 0)] = -1


@triton.jit
def _add(number_ptr, more):
    tl.store(number_ptr, tl.load(number_ptr) + more)


@triton.jit(do_not_specialize=["N", "P", "STOPS", "branching", "slots", "columns", "vocabulary", "places"])
def _commit_kernel(
    numbers_ptr, output_ptr, stops_ptr, seen_ptr, counts_ptr,
    tokens_ptr, parents_ptr, ranks_ptr, depths_ptr, path_ptr, length_ptr, after_ptr,
    slots, columns, vocabulary, places, N, P, STOPS, branching,
    PER_SEQUENCE: tl.constexpr, HAS_SEEN: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """A sequence; slots, columns, vocabulary, places: strides of the rows of numbers, output, seen and counts.

    One warp: another would read what this one has already moved on.
    """
    slot = tl.program_id(0).to(tl.int64)
    numbers_ptr += slot
    path_ptr += slot * P
    tokens_ptr += slot * N
    if PER_SEQUENCE:
        parents_ptr += slot * N
        depths_ptr += slot * N
        ranks_ptr += slot * N
    length, after = tl.load(length_ptr + slot), tl.load(after_ptr + slot)
    left, produced = tl.load(numbers_ptr + _LEFT * slots), tl.load(numbers_ptr + _PRODUCED * slots)
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
            tl.atomic_add(where + places, one, mask=accepted, sem="relaxed")
        _add(numbers_ptr + _LENGTHS * slots, length + 1)
        _add(numbers_ptr + _STEPS * slots, 1)
        _add(numbers_ptr + _NODES * slots, N)

    tl.store(numbers_ptr + _PREVIOUS * slots, tl.load(tokens_ptr + tl.load(path_ptr + length)))
    tl.store(numbers_ptr + _ROOT * slots, tl.maximum(after, 0))
    tl.store(numbers_ptr + _PRODUCED * slots, produced + count)
    left_now = tl.where(until <= most, 0, left - count)
    tl.store(numbers_ptr + _LEFT * slots, tl.where(active & (after < 0), -1, left_now))


def _launch(state: State, tree: Tree, verified: Verified, branching: int) -> None:
    """As `_reference`."""
    numbers, output, stops, seen, counts = state
    tokens, *shape = tree
    batch, nodes = tokens.shape
    per_sequence = any(field.dim() == 2 for field in shape)
    shape = [(field.expand(batch, nodes) if per_sequence else field).contiguous() for field in shape]
    path, length, after = (field.contiguous() for field in verified)
    with torch.cuda.device_of(tokens):
        _commit_kernel[(batch,)](
            numbers, output, stops, seen.view(torch.int8), counts, tokens.contiguous(), *shape, path, length, after,
            numbers.stride(0), output.stride(0), seen.stride(0), counts.stride(0), nodes, path.shape[1], len(stops),
            branching, PER_SEQUENCE=per_sequence, HAS_SEEN=seen.shape[1] > 0,
            BLOCK_P=triton.next_power_of_2(path.shape[1]), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
