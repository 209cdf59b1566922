"""Ranges of a sequence's last k tokens in a sorted corpus, for all k <= M, after each node of a tree.

    [lo_k, hi_k) of a node with token t = [LF(t, lo), LF(t, hi)), with [lo, hi) its parent's range k - 1

where range 0 is the whole corpus, and LF is a binary search (see `corpus`). A sequence of fewer than k tokens has an
empty range k. So a node's ranges are computed from its parent's. They are kept in the rows of a cache, with the tokens:

    keys   [B, 2, rows, M]      lo_1 .. lo_M of the row's token;  and the M tokens before it
    values [B, 2, rows, M]      hi_1 .. hi_M;                     and the M - 1 tokens before it and the token itself

Both are LongTensors. Tokens are stored oldest first, -1 before the beginning of the sequence.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.implementation import choose_impl, operator
from heavypath.kernels.language import tl, triton
from heavypath.kernels.retrieval.corpus import SortedCorpus


class Appended(NamedTuple):
    """n new nodes of each of B sequences; LongTensor[B, n] each.

    cache_rows:  the row in which each node is kept
    parent_rows: the row of each node's parent, -1 for the first token of a sequence. A parent that is appended in the
                 same call must come right before its only child.
    """

    tokens: Tensor
    cache_rows: Tensor
    parent_rows: Tensor


def store_tokens(tokens: Tensor, keys: Tensor, values: Tensor, starts: Sequence[int] | None = None) -> Tensor:
    """Write tokens LongTensor[B, T] into rows starts[b], starts[b] + 1, ... of sequence b; starts default to 0.

    keys:   [B, rows, M], gets the M tokens before each token; values: [B, rows, M], M - 1 tokens before it and itself
    starts: the rows before them must have been written

    Returns the rows, LongTensor[B, T].
    """
    batch, width = tokens.shape
    longest = keys.shape[-1]
    first = torch.zeros(batch, 1, dtype=torch.long, device=tokens.device)
    if starts is not None:
        first = torch.tensor(starts, device=tokens.device)[:, None]
    behind = first + torch.arange(-longest, 0, device=tokens.device)
    before = values[..., -1].gather(1, behind.clamp(min=0)).where(behind >= 0, -1)
    windows = torch.cat([before, tokens], 1).unfold(1, longest, 1)  # [B, T + 1, M]
    rows = first + torch.arange(width, device=tokens.device)
    sequence = torch.arange(batch, device=tokens.device)[:, None]
    keys[sequence, rows], values[sequence, rows] = windows[:, :-1], windows[:, 1:]
    return rows


def store_texts(
    corpus: SortedCorpus, tokens: Tensor, keys: Tensor, values: Tensor, starts: Sequence[int] | None = None
) -> None:
    """Write the rows of tokens, as `store_tokens` does, and their ranges; keys, values: LongTensor[B, 2, rows, M]."""
    rows = store_tokens(tokens, keys[:, 1], values[:, 1], starts)
    batch, width = tokens.shape
    longest = keys.shape[-1]
    size = len(corpus.steps)
    sequence = torch.arange(batch, device=rows.device)
    before = rows[:, :1]  # the row before it has the ranges that the first token continues
    has_any = before > 0
    lows, highs = (field[sequence, 0, (before[:, 0] - 1).clamp(min=0)].where(has_any, 0) for field in (keys, values))
    low = tokens.new_zeros(batch, width)
    high = tokens.new_full((batch, width), size)
    first = (tokens + 1) * size
    for k in range(longest):
        low, high = (torch.searchsorted(corpus.steps, first + bound) for bound in (low, high))
        keys[sequence[:, None], 0, rows, k], values[sequence[:, None], 0, rows, k] = low, high
        low, high = (
            torch.cat([earlier[:, k, None], bound[:, :-1]], 1) for earlier, bound in ((lows, low), (highs, high))
        )  # bounds of the token before


def renew_ranges(corpus: SortedCorpus, rows: Tensor, keys: Tensor, values: Tensor, *, impl: str = "auto") -> None:
    """Recompute the ranges in one row of each sequence from the row's tokens, after the corpus has changed.

    rows: LongTensor[B]; keys, values: LongTensor[B, 2, any, M]
    impl: see `implementation`; "triton" is one launch

    Raises ValueError if the kernel does not support the strides of keys and values.
    """
    if choose_impl("renew_ranges", impl, keys) == "triton":
        _launch_renew(corpus, rows, keys, values)
        return
    sequence = torch.arange(len(rows), device=rows.device)
    size = len(corpus.steps)
    longest = keys.shape[-1]
    tokens = values[sequence, 1, rows]  # [B, M]
    bounds = tokens.new_zeros(len(rows), longest, 2)  # of the last 1 .. M tokens; at first the whole corpus
    bounds[..., 1] = size
    for k in reversed(range(longest)):  # the token that k tokens follow belongs to the suffixes of more than k tokens
        token = tokens[:, longest - 1 - k, None, None]
        found = torch.searchsorted(corpus.steps, (token + 1) * size + bounds[:, k:])
        bounds[:, k:] = found.where(token >= 0, 0)  # empty before the beginning of the sequence
    keys[sequence, 0, rows], values[sequence, 0, rows] = bounds.unbind(-1)


@operator
def append_tokens(corpus: SortedCorpus, nodes: Appended, keys: Tensor, values: Tensor, *, impl: str = "auto") -> None:
    """Write the rows of new nodes. Their parents must have been written before, or be among the nodes.

    keys, values: LongTensor[B, 2, rows, M], whose last dimension is contiguous

    impl "triton" is one launch without host synchronisation; "torch" computes in NumPy.

    Raises ValueError if the kernel does not support the strides of keys and values.
    """
    if choose_impl("append_tokens", impl, keys) == "triton":
        _launch(corpus, nodes, keys, values)
    else:
        _reference(corpus, nodes, keys, values)


def _reference(corpus: SortedCorpus, nodes: Appended, keys: Tensor, values: Tensor) -> None:
    """Write node by node, so that a parent's row is written before its child's."""
    steps = corpus.steps.numpy()
    lows = keys.numpy()
    highs = values.numpy()
    size = len(steps)
    longest = keys.shape[-1]
    bounds = np.empty(2 * longest, np.int64)
    for b, sequence in enumerate(zip(*(field.tolist() for field in nodes), strict=True)):
        low = lows[b, 0]
        high = highs[b, 0]
        before = lows[b, 1]
        own = highs[b, 1]
        for token, row, parent in zip(*sequence, strict=True):
            first = (token + 1) * size
            bounds[0], bounds[longest] = first, first + size
            if parent >= 0:
                bounds[1:longest], bounds[longest + 1 :] = low[parent, :-1] + first, high[parent, :-1] + first
                before[row] = own[parent]
            else:
                bounds[1:longest] = bounds[longest + 1 :] = first
                before[row] = -1
            found = steps.searchsorted(bounds)
            low[row], high[row] = found[:longest], found[longest:]
            own[row, :-1], own[row, -1] = before[row, 1:], token


@triton.jit
def _less(steps_ptr, wanted, size):
    """Return how many of the sorted steps are less than each wanted number, by binary search."""
    low = tl.zeros_like(wanted)
    high = low + size
    while tl.max(high - low) > 0:
        middle = (low + high) // 2
        open = low < high
        step = tl.load(steps_ptr + middle, mask=open, other=0)
        low = tl.where(open & (step < wanted), middle + 1, low)
        high = tl.where(open & (step >= wanted), middle, high)
    return low


@triton.jit(do_not_specialize=["size", "sequence_stride", "head_stride"])
def _renew_kernel(
    rows_ptr,  # [B]
    steps_ptr,  # [size]
    keys_ptr,  # [B, 2, rows, M]
    values_ptr,
    size,
    sequence_stride,
    head_stride,
    M: tl.constexpr,
    LANES: tl.constexpr,  # the first half is for lower bounds, the second for upper ones
):
    """Each program does a sequence's row, from the oldest token to the nearest."""
    sequence = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + sequence)
    keys_ptr += sequence * sequence_stride + row * M
    values_ptr += sequence * sequence_stride + row * M
    lane = tl.arange(0, LANES)
    upper = lane >= LANES // 2
    k = lane % (LANES // 2)  # range k + 1
    bound = tl.where(upper, size, 0).to(tl.int64)
    for older in range(M):
        token = tl.load(values_ptr + head_stride + older)
        found = tl.where(token >= 0, _less(steps_ptr, (token + 1) * size + bound, size), 0)
        bound = tl.where(k >= M - 1 - older, found, bound)
    tl.store(keys_ptr + k, bound, mask=(k < M) & (lane < LANES // 2))
    tl.store(values_ptr + k, bound, mask=(k < M) & upper)


@triton.jit(do_not_specialize=["nodes", "size", "sequence_stride", "head_stride"])
def _append_kernel(
    tokens_ptr,  # [B, nodes]
    rows_ptr,
    parents_ptr,
    steps_ptr,  # [size]
    keys_ptr,  # [B, 2, rows, M]
    values_ptr,
    nodes,
    size,
    sequence_stride,
    head_stride,
    M: tl.constexpr,
    LANES: tl.constexpr,  # the first half is for lower bounds, the second for upper ones
):
    """Each program does one node. It computes a parent among the nodes again, since another program writes its row."""
    sequence = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1)
    given = sequence * nodes + node
    keys_ptr += sequence * sequence_stride
    values_ptr += sequence * sequence_stride
    token = tl.load(tokens_ptr + given)
    row = tl.load(rows_ptr + given)
    parent = tl.load(parents_ptr + given)
    later = node > 0
    before = tl.load(tokens_ptr + given - 1, mask=later, other=0)
    both = later & (parent >= 0) & (tl.load(rows_ptr + given - 1, mask=later, other=-1) == parent)
    parent = tl.where(both, tl.load(parents_ptr + given - 1, mask=later, other=0), parent)  # the last row that is read
    new = 1 + both.to(tl.int64)  # tokens after that row

    lane = tl.arange(0, LANES)
    lower = lane < LANES // 2
    upper = lane >= LANES // 2
    k = lane % (LANES // 2)  # range k + 1
    whole = tl.where(upper, size, 0).to(tl.int64)
    there = tl.where(parent >= 0, M, 0)  # how many numbers that row has
    kept = (k >= new) & (k < there)
    low = tl.load(keys_ptr + parent * M + k - new, mask=kept & lower, other=0)
    high = tl.load(values_ptr + parent * M + k - new, mask=kept & upper, other=0)
    bound = tl.where(k == new - 1, whole, tl.where(upper, high, low))
    if both:
        bound = tl.where(k == 0, whole, _less(steps_ptr, (before + 1) * size + bound, size))
    bound = _less(steps_ptr, (token + 1) * size + bound, size)
    tl.store(keys_ptr + row * M + k, bound, mask=(k < M) & lower)
    tl.store(values_ptr + row * M + k, bound, mask=(k < M) & upper)

    keys_ptr += head_stride
    values_ptr += head_stride
    texts = (k < M) & lower
    with_parent = k + new - 1  # of the M tokens that end with the parent
    old = tl.load(values_ptr + parent * M + with_parent, mask=texts & (with_parent < there), other=-1)
    tl.store(keys_ptr + row * M + k, tl.where(with_parent < M, old, before), mask=texts)
    with_self = k + new
    old = tl.load(values_ptr + parent * M + with_self, mask=texts & (with_self < there), other=-1)
    own = tl.where(k == M - 1, token, tl.where(with_self < M, old, before))
    tl.store(values_ptr + row * M + k, own, mask=texts)


def check_kernel_takes(keys: Tensor, values: Tensor) -> None:
    """Raise ValueError unless keys and values [B, 2, rows, M] have equal strides and contiguous rows."""
    if keys.stride() != values.stride() or keys.stride()[2:] != (keys.shape[3], 1):
        got = f"{keys.stride()} and {values.stride()} of {[*keys.shape]}"
        raise ValueError(f"impl 'triton' takes keys and values of equal strides with rows side by side, got {got}")


def _launch(corpus: SortedCorpus, nodes: Appended, keys: Tensor, values: Tensor) -> None:
    """Compute `_reference` by the kernel."""
    check_kernel_takes(keys, values)
    batch, count = nodes.tokens.shape
    longest = keys.shape[-1]
    with torch.cuda.device_of(keys):
        _append_kernel[(batch, count)](
            *(field.contiguous() for field in nodes),
            corpus.steps.contiguous(),
            keys,
            values,
            count,
            len(corpus.steps),
            keys.stride(0),
            keys.stride(1),
            M=longest,
            LANES=2 * triton.next_power_of_2(longest),
            num_warps=1,
            enable_fp_fusion=False,
        )


def _launch_renew(corpus: SortedCorpus, rows: Tensor, keys: Tensor, values: Tensor) -> None:
    """Compute `renew_ranges` by the kernel."""
    check_kernel_takes(keys, values)
    longest = keys.shape[-1]
    with torch.cuda.device_of(keys):
        _renew_kernel[(len(rows),)](
            rows.contiguous(),
            corpus.steps.contiguous(),
            keys,
            values,
            len(corpus.steps),
            keys.stride(0),
            keys.stride(1),
            M=longest,
            LANES=2 * triton.next_power_of_2(longest),
            num_warps=1,
            enable_fp_fusion=False,
        )
