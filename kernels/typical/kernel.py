"""The Triton kernels of typical acceptance, whose formula and reference are in `acceptance`, and their launcher.

The programs of a row share its vocabulary. With m the largest logit and t(v) = (x(v) - m) log(e) / T, all to base 2,

    H(P) = log sum_v 2^t(v)  -  sum_v 2^t(v) t(v) / sum_v 2^t(v)

so one pass over the row gives both P and its entropy. The last of the programs to finish weighs the node's children.
Rows of nodes without children are not read.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

import torch

from heavypath.kernels.filter_cuts import filtered
from heavypath.kernels.filtering import LOWEST, softmax_scale
from heavypath.kernels.language import tl, triton
from heavypath.kernels.nodes import Verified, VerifyInputs
from heavypath.kernels.noise import Noise, Stream
from heavypath.kernels.nucleus import launch_tokens
from heavypath.kernels.tickets import is_last, tickets
from heavypath.kernels.verifying.distributions import CHUNK, LANES, NONE, TILE, log_prob
from heavypath.kernels.verifying.drafted_tree import (
    cut_arguments,
    laid_out,
    launch,
    nodes_of,
    store_path,
    tree_arguments,
)


@triton.jit
def _moved(total, moment, shift):
    """The sums of 2^t and 2^t t, where `shift` is added to each t; nothing is left of what is moved too far down.

    Neither is a bare product, for the reason that `sum_of_products` has.
    """
    scale = tl.exp2(shift)
    return tl.where(total == 0.0, 0.0, total * scale), tl.where(scale > 0, scale * (moment + total * shift), 0.0)


@triton.jit(do_not_specialize=["log_epsilon", "log_delta", "temperature"])
def _weigh_kernel(
    tokens_ptr,  # [B, N]
    parents_ptr,  # [B, N], rows parents_stride apart
    target_ptr,  # [B, N, V]
    cut_ptr,  # [B, N] if FILTERED, as end_ptr: see `filter_cuts`
    end_ptr,
    weights_ptr,  # fp32 [B, N]: log2 P of an accepted node's token, -inf for others; the root's is not written
    parts_ptr,  # fp32 [B, N, 3, CHUNKS]: the largest logit, and the sums of 2^t and 2^t t relative to it
    tickets_ptr,  # [B, N]
    N,
    V,
    parents_stride,
    target_batch_stride,
    target_stride,
    log_epsilon,
    log_delta,
    temperature,
    FILTERED: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,  # nodes, rounded up to a power of two
):
    chunk = tl.program_id(0) % CHUNKS
    place = (tl.program_id(0) // CHUNKS).to(tl.int64)
    batch, node = place // N, (place % N).to(tl.int32)
    index = tl.arange(0, BLOCK)
    parent, token, child = nodes_of(tokens_ptr + batch * N, parents_ptr + batch * parents_stride, index, N, V)
    child &= parent == node
    if tl.max(child.to(tl.int32)) > 0:
        row_ptr = target_ptr + batch * target_batch_stride + node.to(tl.int64) * target_stride
        scale = softmax_scale(temperature)
        cut, end_of_ties = tl.full([], float("-inf"), tl.float32), V + tl.full([], 0, tl.int32)
        if FILTERED:
            cut, end_of_ties = tl.load(cut_ptr + place), tl.load(end_ptr + place)
        largest = tl.full([LANES], LOWEST, tl.float32)
        total, moment = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
        end = tl.minimum((chunk + 1) * CHUNK, V)
        for start in range(chunk * CHUNK, end, TILE):
            here = start + tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
            x = tl.load(row_ptr + here, mask=here < end, other=float("-inf")).to(tl.float32)
            if FILTERED:
                x = filtered(x, here, cut, end_of_ties)
            higher = tl.maximum(largest, tl.max(x, 1))
            total, moment = _moved(total, moment, (largest - higher) * scale)
            t = (x - higher[:, None]) * scale
            weight = tl.exp2(t)
            total += tl.sum(weight, 1)
            moment += tl.sum(tl.where(weight > 0, weight * t, 0.0), 1)
            largest = higher
        highest = tl.max(largest)
        total, moment = _moved(total, moment, (largest - highest) * scale)
        part_ptr = parts_ptr + place * 3 * CHUNKS + chunk
        tl.store(part_ptr, highest)
        tl.store(part_ptr + CHUNKS, tl.sum(total))
        tl.store(part_ptr + 2 * CHUNKS, tl.sum(moment))
        if is_last(tickets_ptr + place, CHUNKS):
            every = tl.arange(0, triton.next_power_of_2(CHUNKS))
            every_ptr = parts_ptr + place * 3 * CHUNKS + every
            parts = tl.load(every_ptr, mask=every < CHUNKS, other=LOWEST, cache_modifier=".cg")
            totals = tl.load(every_ptr + CHUNKS, mask=every < CHUNKS, other=0.0, cache_modifier=".cg")
            moments = tl.load(every_ptr + 2 * CHUNKS, mask=every < CHUNKS, other=0.0, cache_modifier=".cg")
            most = tl.max(parts)
            totals, moments = _moved(totals, moments, (parts - most) * scale)
            sum_of_all = tl.sum(totals)
            usable = sum_of_all > 0  # false for a row of -inf alone, and for one with NaN or +inf
            log_total = tl.log2(tl.where(usable, sum_of_all, 1.0))
            entropy = log_total - tl.sum(moments) / tl.where(usable, sum_of_all, 1.0)
            least = tl.where(usable, tl.minimum(log_epsilon, log_delta - entropy), float("inf"))
            x = tl.load(row_ptr + token, mask=child, other=float("-inf")).to(tl.float32)
            log_p = log_prob((row_ptr, most, log_total, temperature, cut, end_of_ties), x, token, FILTERED)
            weight = tl.where(log_p > least, log_p, float("-inf"))
            tl.store(weights_ptr + batch * N + index, weight, mask=child)


@triton.jit(do_not_specialize=["max_depth", "N"])
def _longest_kernel(
    tokens_ptr,  # [B, N]
    parents_ptr,  # [B, N], rows parents_stride apart
    weights_ptr,  # fp32 [B, N], as of `_weigh_kernel`
    path_ptr,  # [B, max_depth + 1]
    length_ptr,  # [B]
    last_ptr,  # [B], the number of the last accepted node among all nodes of the launch
    N,
    V,
    parents_stride,
    max_depth,
    BLOCK: tl.constexpr,  # nodes, rounded up to a power of two
    PATH: tl.constexpr,  # max_depth + 1, rounded up to a power of two
):
    batch = tl.program_id(0).to(tl.int64)
    parents_ptr += batch * parents_stride
    index = tl.arange(0, BLOCK)
    parent, _, there = nodes_of(tokens_ptr + batch * N, parents_ptr, index, N, V)
    weight = tl.load(weights_ptr + batch * N + index, mask=there, other=float("-inf"))
    above = tl.maximum(parent, 0)

    likely = tl.where(index == 0, 0.0, float("-inf"))  # log2 P of the paths to the accepted nodes of a level
    last = tl.full([], 0, tl.int32)
    length = tl.full([], 0, tl.int32)
    going = length < max_depth
    while going:
        likely = tl.where(there, tl.gather(likely, above, 0) + weight, float("-inf"))
        best = tl.max(likely)
        going = best > float("-inf")
        if going:
            last = tl.min(tl.where(likely == best, index, NONE))
            length += 1
            going = length < max_depth

    path_ptr += batch * (max_depth + 1)
    store_path(path_ptr, length_ptr + batch, parents_ptr, last, length, max_depth, PATH)
    tl.store(last_ptr + batch, batch * N + last)


def launch_typical(given: VerifyInputs, limits: tuple[float, float]) -> Verified:
    """`acceptance.accept_typical` of nodes [B, N]; limits: log2 of epsilon and of delta."""
    given = laid_out(given)
    tokens, (seed, rows), target, max_depth = given.nodes.tokens, given.noise, given.target_logits, given.max_depth
    batch, count = tokens.shape
    device, vocab_size = tokens.device, target.shape[-1]
    chunks = triton.cdiv(vocab_size, CHUNK.value)
    numbers = torch.empty(batch * count * (1 + 3 * chunks), dtype=torch.float32, device=device)
    weights, parts = numbers.split([batch * count, batch * count * 3 * chunks])
    path = torch.empty(batch, max_depth + 1, dtype=torch.long, device=device)
    length, last = torch.zeros(2, batch, dtype=torch.long, device=device)  # rows that are read even if nothing is run
    shared = tree_arguments(given) | {"weights_ptr": weights}
    with torch.cuda.device_of(tokens):
        if count > 1:
            launch(
                _weigh_kernel, batch * count * chunks, shared | cut_arguments(given), parts_ptr=parts,
                tickets_ptr=tickets(batch * count, device), log_epsilon=limits[0], log_delta=limits[1], CHUNKS=chunks,
            )  # fmt: skip
        launch(
            _longest_kernel, batch, shared, path_ptr=path, length_ptr=length, last_ptr=last, max_depth=max_depth,
            PATH=triton.next_power_of_2(max_depth + 1), num_warps=4,
        )  # fmt: skip
    ends = target.reshape(batch * count, vocab_size).index_select(0, last)
    rows = last if rows is None else rows.view(-1).index_select(0, last)
    drawn, _, _ = launch_tokens(ends, 1, given.target_filters, noise=Noise(seed, rows), stream=Stream.TARGET)
    return Verified(path, length, drawn[:, 0])
