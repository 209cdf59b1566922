"""Prompt lookup's distribution: what followed the last tokens earlier in the sequence, the latest with most weight.

A place of the sequence matches a node by k tokens if the last k tokens before the place are the node's last k, and no
more are; k is at most M. Of all places, those with the longest match count, if it has at least `shortest` tokens:

    Q(v) = sum of 2^-j over those j = 1 .. R for which v stands at the j-th latest of these places          R = 32

Q sums to less than 1, and is 0 for all tokens where nothing matches. This extends Saxena 2023, "Prompt lookup
decoding", where the first occurrence alone counts.

The tokens are in the rows of a cache, oldest first, -1 before the beginning of the sequence:

    keys   [B, rows, M]      the M tokens before the row's token
    values [B, rows, M]      the M - 1 tokens before it, and the token itself

A node's kernel reads 8 M bytes for each token of the sequence, from the latest to the oldest, and stops once R places
match by M tokens. PyTorch takes about forty operations, which read and write a tensor of that size each.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false

from typing import NamedTuple

import torch
from torch import Tensor

from heavypath.kernels.implementation import choose_impl, operator
from heavypath.kernels.language import tl, triton
from heavypath.kernels.retrieval.followers import match_lengths
from heavypath.kernels.retrieval.ranges import Appended, check_kernel_takes

MOST = tl.constexpr(32)  # R, a power of two
_TILE = 4096  # tokens of the sequence's rows that are compared in one iteration


class Places(NamedTuple):
    """P places of each sequence, from the oldest to the latest.

    before: LongTensor[B, P, M], the M tokens before each; -1 for missing ones
    tokens: LongTensor[B, P], the tokens that stand there
    counts: bool [B, P], whether the entry is in use
    """

    before: Tensor
    tokens: Tensor
    counts: Tensor


@operator
def latest_logprobs(
    nodes: Appended,
    prefix_lengths: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    shortest: int,
    is_chain: bool,
    vocab_size: int,
    impl: str = "auto",
) -> Tensor:
    """Write the rows of n nodes of B sequences, and return log Q after each; -inf for tokens that are not proposed.

    nodes:          of a level, whose parents have been written before; or a chain, see `is_chain`
    prefix_lengths: LongTensor[B]; the sequence so far is in rows 0 .. prefix_lengths[b], and the last is the root's
    keys, values:   LongTensor[B, 1, rows, M]
    shortest:       least tokens of a match, 1 .. M
    is_chain:       whether the nodes are the last tokens of the sequence, up to the root. Then only log Q after the
                    root is returned
    vocab_size:     V, above every token of the sequences

    Returns fp32 [B, n, V], or [B, 1, V] for a chain. impl "triton" is two launches, of which one fills the result,
    without host synchronisation; it raises ValueError for keys and values whose rows are not contiguous.
    """
    if choose_impl("latest_logprobs", impl, keys) == "triton":
        return _launch(nodes, prefix_lengths, keys, values, shortest, is_chain, vocab_size)
    write_rows(nodes, keys, values, is_chain)
    sequence = torch.arange(len(keys), device=keys.device)[:, None]
    read = nodes.cache_rows[:, -1:] if is_chain else nodes.cache_rows
    in_text = torch.arange(keys.shape[2], device=keys.device) <= prefix_lengths[:, None]
    places = Places(keys[:, 0], values[:, 0, :, -1], in_text)
    return logprobs_by_places(values[sequence, 0, read], places, shortest, vocab_size)


def write_rows(nodes: Appended, keys: Tensor, values: Tensor, is_chain: bool) -> None:
    """Write the rows of nodes; arguments as in `latest_logprobs`."""
    sequence = torch.arange(len(keys), device=keys.device)[:, None]
    count = nodes.tokens.shape[1]
    for first in range(count if is_chain else 1):  # in a chain a node's row is made of the row before it
        token, row, parent = (each[:, first : first + 1] if is_chain else each for each in nodes)
        before = values[sequence, 0, parent.clamp(min=0)].where(parent[..., None] >= 0, -1)
        keys[sequence, 0, row] = before
        values[sequence, 0, row] = torch.cat([before[..., 1:], token[..., None]], -1)


def logprobs_by_places(context: Tensor, places: Places, shortest: int, vocab_size: int) -> Tensor:
    """Return log Q, fp32 [B, n, V], by any places; context: LongTensor[B, n, M], the last tokens of each node."""
    batch, nodes, _ = context.shape
    same = (context[:, :, None] == places.before[:, None]) & (context >= 0)[:, :, None]  # [B, n, P, M]
    length = same.flip(-1).cumprod(-1).sum(-1)  # [B, n, P]
    length *= places.counts[:, None]
    longest = length.amax(-1, keepdim=True)
    best = (length == longest) & (longest >= shortest)
    later = best.flip(-1).cumsum(-1).flip(-1)  # j: 1 for the latest place
    weight = torch.exp2(-later.float()).where(best & (later <= MOST.value), 0)
    followed = places.tokens[:, None].expand(batch, nodes, -1).clamp(min=0)
    return weight.new_zeros(batch, nodes, vocab_size).scatter_add_(2, followed, weight).log()


@triton.jit
def _write(tokens_ptr, rows_ptr, parents_ptr, keys_ptr, values_ptr, given, M: tl.constexpr, LANES: tl.constexpr):
    """Write a node's row, and return its last tokens, the nearest first."""
    lane = tl.arange(0, LANES)
    inside = lane < M
    token = tl.load(tokens_ptr + given)
    row = tl.load(rows_ptr + given)
    parent = tl.load(parents_ptr + given)
    nearest = M - 1 - lane
    there = tl.where(parent >= 0, M, 0)  # how many tokens the parent's row has
    before = tl.load(values_ptr + parent * M + nearest, mask=lane < there, other=-1)
    above = tl.load(values_ptr + parent * M + nearest + 1, mask=(lane > 0) & (lane < there), other=-1)
    context = tl.where(lane == 0, token, above)
    tl.store(keys_ptr + row * M + nearest, before, mask=inside)
    tl.store(values_ptr + row * M + nearest, context, mask=inside)
    return context


@triton.jit(do_not_specialize=["nodes", "shortest", "sequence_stride", "V"])
def _latest_kernel(
    tokens_ptr,  # [B, nodes]
    rows_ptr,
    parents_ptr,
    lengths_ptr,  # [B]
    keys_ptr,  # [B, 1, rows, M]
    values_ptr,
    followed_ptr,  # [B, n, MOST], memory for the tokens at the latest places
    out_ptr,  # [B, n, V], -inf
    nodes,
    shortest,
    sequence_stride,
    V,
    M: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,  # rows of the sequence that are compared in one iteration
    IS_CHAIN: tl.constexpr,
):
    """Each program does one node, or the only result of a chain."""
    sequence = tl.program_id(0).to(tl.int64)
    result = sequence * tl.num_programs(1) + tl.program_id(1)
    keys_ptr += sequence * sequence_stride
    values_ptr += sequence * sequence_stride
    followed_ptr += result * MOST
    first = sequence * nodes
    if IS_CHAIN:
        context = tl.zeros([LANES], tl.int64)
        for node in range(nodes):
            context = _write(tokens_ptr, rows_ptr, parents_ptr, keys_ptr, values_ptr, first + node, M, LANES)
            tl.debug_barrier()  # the next node's row, and the places, are made of what other threads have stored
    else:
        node = first + tl.program_id(1)
        context = _write(tokens_ptr, rows_ptr, parents_ptr, keys_ptr, values_ptr, node, M, LANES)

    text = tl.load(lengths_ptr + sequence) + 1
    start = ((text - 1) // BLOCK) * BLOCK
    best = shortest  # tokens of the longest match so far, or of the shortest that counts
    count = tl.zeros([], tl.int32)  # places with it
    while (start >= 0) & ((best < M) | (count < MOST)):
        matched, rows = match_lengths(keys_ptr, context, start, text, M, LANES, BLOCK)
        longest = tl.max(matched)
        count = tl.where(longest > best, 0, count)
        best = tl.maximum(longest, best)
        counts = (matched == best).to(tl.int32)
        later = count + tl.cumsum(counts, reverse=True) - counts  # places after this one
        kept = (counts > 0) & (later < MOST)
        token = tl.load(values_ptr + rows * M + M - 1, mask=kept, other=-1)
        tl.debug_barrier()  # a longer match overwrites what other threads have stored
        tl.store(followed_ptr + later, token, mask=kept)
        count += tl.sum(counts)
        start -= BLOCK
    tl.debug_barrier()  # other threads have stored the tokens that are read below

    place = tl.arange(0, MOST)
    token = tl.load(followed_ptr + place, mask=place < count, other=-1)
    same = token[:, None] == token[None, :]
    q = tl.sum(tl.where(same, tl.exp2(-1.0 - place.to(tl.float32))[None, :], 0.0), 1)
    tl.store(out_ptr + result * V + token, tl.log(q), mask=place < count)


def _launch(
    nodes: Appended,
    prefix_lengths: Tensor,
    keys: Tensor,
    values: Tensor,
    shortest: int,
    is_chain: bool,
    vocab_size: int,
) -> Tensor:
    """Compute `latest_logprobs` by the kernel."""
    check_kernel_takes(keys, values)
    batch, count = nodes.tokens.shape
    longest = keys.shape[-1]
    lanes = triton.next_power_of_2(longest)
    results = 1 if is_chain else count
    out = torch.full((batch, results, vocab_size), -torch.inf, dtype=torch.float32, device=keys.device)
    followed = keys.new_empty(batch, results, MOST.value)
    with torch.cuda.device_of(keys):
        _latest_kernel[(batch, results)](
            *(field.contiguous() for field in nodes),
            prefix_lengths.contiguous(),
            keys,
            values,
            followed,
            out,
            count,
            shortest,
            keys.stride(0),
            vocab_size,
            M=longest,
            LANES=lanes,
            BLOCK=max(32, _TILE // lanes),
            IS_CHAIN=is_chain,
            num_warps=8,
            enable_fp_fusion=False,
        )
    return out
