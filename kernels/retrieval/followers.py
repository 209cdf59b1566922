"""The tokens that followed the last tokens of a text before: in a sorted corpus, and earlier in the text itself.

For k = 1 .. M let the last k tokens, suffix k, occur n_k times in the corpus and t_k times in the text so far. An
occurrence in the text counts as much as b in the corpus. Let c_k(v) be the shares of the n_k + b t_k occurrences that v
followed. The law is interpolated from the longest suffix to the shortest:

    Q = sum_k s_k c_k     s_k = (1 - s_M - ... - s_(k+1)) (n_k + b t_k) / (n_k + b t_k + a_k)     a_k = a / k^2

This is the predictive law of a Dirichlet prior of weight a_k around the law of the next shorter suffix (MacKay and Peto
1995, "A hierarchical Dirichlet language model"). The longer a suffix, the fewer of its occurrences outweigh the shorter
ones. A suffix that occurred nowhere has s_k = 0. The weight left after the shortest is left out, so that Q sums to less
than 1, and so are suffixes for which less than 2**-10 is left. It is REST's draft (He et al. 2024, arXiv 2311.08252),
which takes the longest suffix that occurs at all, with shorter ones for the rest. a and b were found by trial, on text
that the shipped target wrote and on held-out text: twice or half as much changes little.

Of more than R occurrences in the corpus R are taken, evenly spaced. Everything is added up as multiples of 2**-30, in
integers, so that Q has the same bits in whatever order that happens.
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
    """log Q after each of n nodes of B texts, fp32 [B, n, V]; -inf for what never followed.

    cache_rows:     LongTensor[B, n], the nodes' rows, which are written
    prefix_lengths: LongTensor[B]; the text so far is in rows 0 .. prefix_lengths[b], the last of which is the root's
    keys, values:   LongTensor[B, 2, rows, M], see `ranges`
    vocab_size:     V, above every token of corpus and texts

    impl "triton" is one launch and three of PyTorch, without host synchronisation; "torch" computes in NumPy. The
    kernel raises ValueError for keys and values whose rows do not lie side by side.
    """
    if choose_impl("follower_logprobs", impl, keys) == "triton":
        return _launch(corpus, cache_rows, prefix_lengths, keys, values, vocab_size)
    return _reference(corpus, cache_rows, prefix_lengths, keys, values, vocab_size)


def _reference(
    corpus: SortedCorpus, cache_rows: Tensor, prefix_lengths: Tensor, keys: Tensor, values: Tensor, vocab_size: int
) -> Tensor:
    """Node by node, because calls for a few short rows cost more than what they compute."""
    followers, lows, highs = corpus.followers.numpy(), keys.numpy(), values.numpy()
    columns = 1 + vocab_size  # the first is for what is between texts
    sums = np.zeros(cache_rows.numel() * columns, np.int64)
    first, entered, counted = 0, [], []  # what followed, as indices into sums, and what it counts; in pieces
    for b, (rows, length) in enumerate(zip(cache_rows.tolist(), prefix_lengths.tolist(), strict=True)):
        before, own = lows[b, 1, : length + 1], highs[b, 1, : length + 1, -1]
        last = before[:, -1]
        for row in rows:
            context, times, matched = highs[b, 1, row], _NEVER, None
            there = (last == context[-1]).nonzero()[0]  # where the last token occurred in the text
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
    """Occurrences in the corpus: entries low .. low + n - 1, of which at most MOST are taken, each with this weight."""

    low: int
    n: int
    weight: int

    def entries(self) -> "slice | np.ndarray":
        if self.n <= MOST.value:
            return slice(self.low, self.low + self.n)
        return self.low + (_SAMPLE * self.n >> MOST.value.bit_length() - 1)


def _weights(low: list[int], high: list[int], times: list[int]) -> tuple[list[int], list[_Part]]:
    """The weights of one occurrence of each suffix in the text, and of all its occurrences in the corpus."""
    in_text, parts, left = [0] * len(low), [], 1.0
    for k in reversed(range(len(low))):
        if left < _LEAST.value:
            break
        n = high[k] - low[k]
        prior = PRIOR.value / (k + 1) ** 2
        one = left / (n + IN_TEXT.value * times[k] + prior)  # of an occurrence in the corpus
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
    BLOCK: tl.constexpr,  # rows of the text that are looked at at once
):
    """A program for each node."""
    sequence = tl.program_id(1).to(tl.int64)
    node = sequence * nodes + tl.program_id(0)
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
        matched, _ = _matches(before_ptr, context, start, text, M, LANES, BLOCK)
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
        matched, rows = _matches(before_ptr, context, start, text, M, LANES, BLOCK)
        weights = tl.sum(tl.where(matched[:, None] > lane[None, :], in_text[None, :], 0), 1)
        token = tl.load(with_self_ptr + rows * M + M - 1, mask=weights > 0, other=-1)
        tl.atomic_add(sums_ptr + 1 + token, weights, mask=weights > 0, sem="relaxed")


@triton.jit
def _matches(before_ptr, context, start, text, M: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens before each of a block of rows are those of the context, nearest first; and the rows."""
    lane = tl.arange(0, LANES)
    rows = start + tl.arange(0, BLOCK).to(tl.int64)
    mask = (rows < text)[:, None] & (lane < M)[None, :]
    before = tl.load(before_ptr + rows[:, None] * M + (M - 1 - lane)[None, :], mask=mask, other=-1)
    alike = (before == context[None, :]) & (before >= 0)
    return tl.min(tl.where(alike, LANES, lane[None, :]), 1), rows


def _launch(
    corpus: SortedCorpus, cache_rows: Tensor, prefix_lengths: Tensor, keys: Tensor, values: Tensor, vocab_size: int
) -> Tensor:
    """As `_reference`."""
    check_kernel_takes(keys, values)
    (batch, count), longest = cache_rows.shape, keys.shape[-1]
    sums = torch.zeros(batch, count, 1 + vocab_size, dtype=torch.int32, device=keys.device)
    with torch.cuda.device_of(keys):
        _followers_kernel[(count, batch)](
            cache_rows.contiguous(), prefix_lengths.contiguous(), corpus.followers, keys, values, sums,
            count, keys.stride(0), keys.stride(1), vocab_size,
            M=longest, LANES=triton.next_power_of_2(longest), BLOCK=256, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    unit = torch.tensor(2.0**-30, dtype=torch.float32, device="cpu")  # a number would make torch's default type
    return (sums[..., 1:] * unit).log_()
