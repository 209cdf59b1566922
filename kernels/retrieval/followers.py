"""The retrieval draft's distribution: which tokens followed the same context in a corpus, and earlier in the sequence.

For k = 1 .. M let the last k tokens, suffix k, occur n_k times in the corpus and t_k times in the sequence so far. An
occurrence in the sequence counts as much as b in the corpus. Let c_k(v) be the share of the n_k + b t_k occurrences
that v followed. The distribution is interpolated from the longest suffix to the shortest:

    Q = sum_k s_k c_k     s_k = (1 - s_M - ... - s_(k+1)) (n_k + b t_k) / (n_k + b t_k + a_k)     a_k = a / k^2

This is the predictive distribution of a Dirichlet prior of weight a_k around that of the next shorter suffix (MacKay
and Peto 1995, "A hierarchical Dirichlet language model"). The longer a suffix, the fewer of its occurrences outweigh
the shorter ones. A suffix that never occurred has s_k = 0. The weight left after the shortest suffix is dropped, so
that Q sums to less than 1; so are suffixes once less than 2**-10 is left. This extends REST's draft (He et al. 2024,
arXiv 2311.08252), which uses only the longest suffix that occurs. a and b were chosen by trial, on text that the
shipped target wrote and on held-out text: doubling or halving them changes little.

If a suffix has more than R occurrences in the corpus, R evenly spaced ones are used. Everything is added up as integer
multiples of 2**-30, so that Q has the same bits whatever the order of the additions.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.implementation import choose_impl, operator
from heavypath.kernels.language import tl, triton
from heavypath.kernels.retrieval.corpus import SortedCorpus
from heavypath.kernels.retrieval.ranges import check_kernel_takes

PRIOR = tl.constexpr(256.0)  # a, in occurrences in the corpus
IN_TEXT = tl.constexpr(64)  # b
MOST = tl.constexpr(256)  # R, a power of two
_LEAST = tl.constexpr(2.0**-10)
_UNIT = tl.constexpr(2.0**30)
_NEVER = [0] * 64
_SAMPLE = np.arange(MOST.value)


@operator
def follower_logprobs(
    corpus: SortedCorpus,
    cache_rows: Tensor,
    prefix_lengths: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    vocab_size: int,
    impl: str = "auto",
) -> Tensor:
    """Return log Q after each of n nodes of B sequences, fp32 [B, n, V]; -inf for tokens that never followed.

    cache_rows:     LongTensor[B, n], the nodes' rows, which `append_tokens` has written
    prefix_lengths: LongTensor[B]; the sequence so far is in rows 0 .. prefix_lengths[b], and the last is the root's
    keys, values:   LongTensor[B, 2, rows, M], see `ranges`
    vocab_size:     V, above every token of corpus and sequences

    impl "triton" is one launch and three of PyTorch, without host synchronisation; "torch" computes in NumPy. The
    kernel raises ValueError for keys and values whose rows are not contiguous.
    """
    if choose_impl("follower_logprobs", impl, keys) == "triton":
        return _launch(corpus, cache_rows, prefix_lengths, keys, values, vocab_size)
    return _reference(corpus, cache_rows, prefix_lengths, keys, values, vocab_size)


def _reference(
    corpus: SortedCorpus, cache_rows: Tensor, prefix_lengths: Tensor, keys: Tensor, values: Tensor, vocab_size: int
) -> Tensor:
    """Compute node by node in NumPy, because calls of PyTorch for a few short rows cost more than they compute."""
    followers = corpus.followers.numpy()
    lows = keys.numpy()
    highs = values.numpy()
    columns = 1 + vocab_size  # column 0 is for the separator between texts
    sums = np.zeros(cache_rows.numel() * columns, np.int64)
    first = 0
    entered = []  # pieces of: indices into sums of the followers
    counted = []  # pieces of: their weights
    for b, (rows, length) in enumerate(zip(cache_rows.tolist(), prefix_lengths.tolist(), strict=True)):
        before = lows[b, 1, : length + 1]
        own = highs[b, 1, : length + 1, -1]
        last = before[:, -1]
        for row in rows:
            context = highs[b, 1, row]
            times = _NEVER
            matched = None
            there = (last == context[-1]).nonzero()[0]  # where the last token occurred in the sequence
            if len(there):
                alike = before[there] == context
                if context[0] < 0:
                    alike &= context >= 0
                matched = np.logical_and.accumulate(alike[:, ::-1], 1)  # [occurrences, M], whether the last k did
                times = matched.sum(0).tolist()
            in_text, parts = _weights(lows[b, 0, row].tolist(), highs[b, 0, row].tolist(), times)
            if matched is not None:
                entered.append(own[there] + (first + 1))
                counted.append(matched @ in_text)
            for part in parts:
                entered.append(followers[part.entries()] + first)
                counted.append(np.full(len(entered[-1]), part.weight))
            first += columns
    if entered:
        np.add.at(sums, np.concatenate(entered), np.concatenate(counted))
    sums = sums.reshape(-1, columns)[:, 1:]
    with np.errstate(divide="ignore"):
        logs = np.log(sums.astype(np.float32) * np.float32(1 / _UNIT.value))
    return torch.from_numpy(logs).view(*cache_rows.shape, vocab_size)


class _Part(NamedTuple):
    """Occurrences in the corpus: entries low .. low + n - 1. At most MOST of them are used, each with this weight."""

    low: int
    n: int
    weight: int

    def entries(self) -> "slice | np.ndarray":
        if self.n <= MOST.value:
            return slice(self.low, self.low + self.n)
        return self.low + (_SAMPLE * self.n >> MOST.value.bit_length() - 1)


def _weights(low: list[int], high: list[int], times: list[int]) -> tuple[list[int], list[_Part]]:
    """Return the weight of one occurrence of each suffix in the sequence, and a `_Part` of those in the corpus."""
    in_text = [0] * len(low)
    parts = []
    left = 1.0
    for k in reversed(range(len(low))):
        if left < _LEAST.value:
            break
        n = high[k] - low[k]
        prior = PRIOR.value / (k + 1) ** 2
        one = left / (n + IN_TEXT.value * times[k] + prior)  # weight of one occurrence in the corpus
        left = one * prior
        in_text[k] = int(one * IN_TEXT.value * _UNIT.value)
        weight = int(one * (n / max(min(n, MOST.value), 1)) * _UNIT.value)
        if n and weight:
            parts.append(_Part(low[k], n, weight))
    return in_text, parts


@triton.jit(do_not_specialize=["nodes", "sequence_stride", "head_stride", "V"])
def _followers_kernel(
    rows_ptr,  # [B, nodes]
    lengths_ptr,  # [B]
    followers_ptr,  # [N]
    keys_ptr,  # [B, 2, rows, M]
    values_ptr,
    sums_ptr,  # [B, nodes, 1 + V], zeros
    nodes,
    sequence_stride,
    head_stride,
    V,
    M: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,  # rows of the sequence that are compared in one iteration
):
    """Each program does one node."""
    sequence = tl.program_id(0).to(tl.int64)
    node = sequence * nodes + tl.program_id(1)
    row = tl.load(rows_ptr + node)
    text = tl.load(lengths_ptr + sequence) + 1
    low_ptr = keys_ptr + sequence * sequence_stride + row * M
    high_ptr = values_ptr + sequence * sequence_stride + row * M
    before_ptr = keys_ptr + sequence * sequence_stride + head_stride
    with_self_ptr = values_ptr + sequence * sequence_stride + head_stride
    sums_ptr += node * (V + 1)

    lane = tl.arange(0, LANES)  # suffix lane + 1
    nearest = M - 1 - lane
    inside = lane < M
    context = tl.load(with_self_ptr + row * M + nearest, mask=inside, other=-1)
    times = tl.zeros_like(lane)
    for start in range(0, text, BLOCK):
        matched, _ = match_lengths(before_ptr, context, start, text, M, LANES, BLOCK)
        times += tl.sum((matched[:, None] > lane[None, :]).to(tl.int32), 0)

    in_corpus = tl.load(high_ptr + lane, mask=inside, other=0) - tl.load(low_ptr + lane, mask=inside, other=0)
    total = in_corpus + IN_TEXT * times
    left = tl.full([], 1.0, tl.float64)
    in_text = tl.zeros_like(times)
    sample = tl.arange(0, MOST)
    for longer in tl.static_range(M):
        k = M - 1 - longer
        left = tl.where(left < _LEAST, 0.0, left)
        here = lane == k
        n = tl.sum(tl.where(here, in_corpus, 0))
        prior = PRIOR / ((k + 1) * (k + 1))
        one = left / (tl.sum(tl.where(here, total, 0)).to(tl.float64) + prior)
        left = one * prior
        in_text = tl.where(here, (tl.minimum(one * IN_TEXT, 1.0) * _UNIT).to(tl.int32), in_text)
        taken = tl.maximum(tl.minimum(n, MOST), 1)
        weight = (one * (n.to(tl.float64) / taken.to(tl.float64)) * _UNIT).to(tl.int32)
        counted = sample < tl.where(weight > 0, n, 0)
        follower = tl.load(followers_ptr + tl.load(low_ptr + k) + sample * n // taken, mask=counted, other=0)
        tl.atomic_add(sums_ptr + follower, tl.zeros_like(follower) + weight, mask=counted, sem="relaxed")

    for start in range(0, text, BLOCK):
        matched, rows = match_lengths(before_ptr, context, start, text, M, LANES, BLOCK)
        weights = tl.sum(tl.where(matched[:, None] > lane[None, :], in_text[None, :], 0), 1)
        token = tl.load(with_self_ptr + rows * M + M - 1, mask=weights > 0, other=-1)
        tl.atomic_add(sums_ptr + 1 + token, weights, mask=weights > 0, sem="relaxed")


@triton.jit
def match_lengths(before_ptr, context, start, text, M: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """Return the lengths of the matches of BLOCK rows of the sequence, from row `start`, and the numbers of these rows.

    The tokens before a row are compared with the context, nearest first, up to the first that differs.
    """
    lane = tl.arange(0, LANES)
    rows = start + tl.arange(0, BLOCK).to(tl.int64)
    mask = (rows < text)[:, None] & (lane < M)[None, :]
    before = tl.load(before_ptr + rows[:, None] * M + (M - 1 - lane)[None, :], mask=mask, other=-1)
    alike = (before == context[None, :]) & (before >= 0)
    return tl.min(tl.where(alike, LANES, lane[None, :]), 1), rows


def _launch(
    corpus: SortedCorpus, cache_rows: Tensor, prefix_lengths: Tensor, keys: Tensor, values: Tensor, vocab_size: int
) -> Tensor:
    """Compute `_reference` by the kernel."""
    check_kernel_takes(keys, values)
    batch, count = cache_rows.shape
    longest = keys.shape[-1]
    sums = torch.zeros(batch, count, 1 + vocab_size, dtype=torch.int32, device=keys.device)
    with torch.cuda.device_of(keys):
        _followers_kernel[(batch, count)](
            cache_rows.contiguous(),
            prefix_lengths.contiguous(),
            corpus.followers.contiguous(),
            keys,
            values,
            sums,
            count,
            keys.stride(0),
            keys.stride(1),
            vocab_size,
            M=longest,
            LANES=triton.next_power_of_2(longest),
            BLOCK=256,
            num_warps=4,
            enable_fp_fusion=False,
        )
    unit = torch.tensor(2.0**-30, dtype=torch.float32, device="cpu")  # a Python number would give torch's default dtype
    return (sums[..., 1:] * unit).log_()
