"""Counter-based random numbers: the same (seed, stream, row, token) gives the same number anywhere.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with

    key     = (seed low, seed high)
    counter = (token // 4, row low, row high, stream + 256 * draw)

and token v takes word v % 4 of the result. No state exists, so results cannot depend on tile sizes, batch
composition, launch order or on which implementation asks.

From 32 random bits:

    u = min((bits + 1/2) * 2**-32, 1 - 2**-24)     exponential E = -log1p(-u)     Gumbel G = -log E

Small E (large G), which win races, come from small u. Both logarithms are taken in fp64 and the result is rounded to
fp32 once, so that a CPU, a GPU and Triton's interpreter agree on every bit of G.
"""

# Triton's language is no Python that a type checker knows.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from enum import IntEnum
from typing import TypeVar

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

_MASK = 0xFFFFFFFF
Words = TypeVar("Words", Tensor, np.ndarray)


class Stream(IntEnum):
    """Uses of randomness that must be independent of each other under one seed and row."""

    DRAFT = 0  # drawing children; an exponential race takes the target's token with the same noise
    ACCEPT = 1  # coins, one per child
    TARGET = 2  # recovered, bonus and target-sampled tokens
    FILL = 3  # order of the tokens outside the draft's support


def philox(seed: int, c0: Words, c1: Words, c2: Words, c3: Words) -> tuple[Words, Words, Words, Words]:
    """Ten Philox-4x32 rounds on broadcastable int64 counters that hold 32-bit words; four words of the same kind.

    The arithmetic is the same for tensors and NumPy arrays; on small arrays NumPy takes a third of the time.
    """
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        # The int64 product wraps, but its 64 bits are those of the unsigned product.
        even, odd = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0 = ((odd >> 32) & _MASK) ^ c1 ^ k0
        c2 = ((even >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = odd & _MASK, even & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def random_bits(seed: int, stream: Stream, rows: Tensor, count: int, draws: int | None = None) -> Tensor:
    """32 random bits for each row and each of `count` tokens, and for each of `draws` independent draws if given.

    rows: LongTensor[R], values >= 0. Returns LongTensor [R, count] or [R, draws, count], values in [0, 2**32).
    """
    quads = -(-count // 4)
    row = rows[:, None, None]  # [R, draws, quads]
    word = torch.arange(quads, device=rows.device)
    draw = torch.arange(draws or 1, device=rows.device)[:, None]
    bits = _words(seed, word, row, int(stream) + 256 * draw).flatten(-2)[..., :count]
    return bits[:, 0] if draws is None else bits


def gumbel_noise(seed: int, stream: Stream, rows: Tensor, count: int, draws: int | None = None) -> Tensor:
    """Standard Gumbel variables, fp32, shaped as `random_bits`."""
    return gumbel(random_bits(seed, stream, rows, count, draws))


def gumbel(bits: Tensor) -> Tensor:
    """fp32 Gumbel variables of 32-bit words in a LongTensor."""
    uniform = bits.double().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().add_(1).log_().neg_().log_().neg_().float()


def gumbel_argmax(weights: Tensor, bits: Tensor, scores: Tensor | None = None) -> Tensor:
    """Arg-max of log(weights) + `gumbel(bits)`, LongTensor[R], of weights >= 0 and words [R, V]; -1 where none is > 0.

    scores: fp32 [R, V], to take for log(weights) where exact keys are compared. -log u bounds G = -log E from above,
    and falls short of twice its distance below it for all but large u, so that few tokens need exact keys.
    """
    ratio = weights / (bits.float().add_(0.5).mul_(2.0**-32))  # no less than weight / E
    most = ratio.amax(-1, keepdim=True)
    least = most / 2
    while True:
        row, token = _places(ratio >= least)
        keys = (weights[row, token].double().log() if scores is None else scores[row, token]) + gumbel(bits[row, token])
        best = torch.full_like(most[:, 0], -torch.inf, dtype=keys.dtype).scatter_reduce_(0, row, keys, "amax")
        surely = best.double().exp().float()[:, None] * (1 - 1e-5)
        if not (surely < least).any():  # or tokens with smaller ratios might be better still
            break
        least = torch.minimum(least, surely)
    won = (keys == best[row]) & (keys > -torch.inf)
    none = torch.full([len(weights)], weights.shape[-1], device=weights.device)
    winner = none.scatter_reduce(0, row[won], token[won], "amin")  # of equal keys the first
    return winner.where(winner < none, -1)


def _places(mask: Tensor) -> tuple[Tensor, ...]:
    """`nonzero`, which on a CPU is several times as fast in NumPy."""
    if mask.device.type == "cpu":
        return tuple(torch.from_numpy(place) for place in np.nonzero(mask.numpy()))
    return mask.nonzero(as_tuple=True)


def coins(seed: int, rows: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """One uniform number in [0, 1), on a grid of 2**-24, for each child, by its rank and the row of the node above it.

    rows, ranks: int64 arrays of one shape; fp64 of that shape. Accept with strict `<`.
    """
    words = philox(seed, ranks // 4, rows & _MASK, rows >> 32, np.full_like(rows, int(Stream.ACCEPT)))
    return (np.choose(ranks % 4, words) >> 8) * 2.0**-24


def _words(seed: int, quad: Tensor, row: Tensor, stream: Tensor) -> Tensor:
    """The four words [..., 4] of each counter, from broadcastable LongTensors; by way of NumPy on a CPU."""
    counter = (quad, row & _MASK, row >> 32, stream)
    if row.device.type == "cpu":
        words = philox(seed, *(part.numpy() for part in counter))
        together = np.empty((*np.broadcast_shapes(*(word.shape for word in words)), 4), dtype=np.int64)
        for place, word in enumerate(words):
            together[..., place] = word
        return torch.from_numpy(together)
    return torch.stack(philox(seed, *counter), -1)


def seed_words(seed: int) -> tuple[int, int]:
    """A seed's two halves as signed 32-bit integers, which is how kernels take it."""
    low, high = seed & _MASK, (seed >> 32) & _MASK
    return low - (low >> 31 << 32), high - (high >> 31 << 32)


@triton.jit
def philox_words(seed_low, seed_high, c0, c1, c2, c3):
    """`philox` of uint32 counters: four tensors of words. The seed's halves come as int32."""
    k0, k1 = seed_low.to(tl.uint32, bitcast=True), seed_high.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(10):
        even, odd = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (odd >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (even >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = odd.to(tl.uint32), even.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def gumbel_of(bits):
    """`gumbel` of uint32 words."""
    uniform = tl.minimum((bits.to(tl.float64) + 0.5) * (2.0**-32), 1 - 2.0**-24)
    return (-tl.log(-tl.log(1 - uniform))).to(tl.float32)


@triton.jit
def octet_bits(seed_low, seed_high, octet, row, stream):
    """Words [A, 8] of the tokens 8 * octet[A] + (0 .. 7), for one row and stream."""
    low, high = row.to(tl.uint32), (row >> 32).to(tl.uint32)
    even, stream = (2 * octet).to(tl.uint32), stream.to(tl.uint32)
    a0, a1, a2, a3 = philox_words(seed_low, seed_high, even, low, high, stream)
    b0, b1, b2, b3 = philox_words(seed_low, seed_high, even + 1, low, high, stream)
    # The axes that joins add are the bits of a token's place in its octet, the highest first.
    first = tl.join(tl.join(a0, b0), tl.join(a2, b2))
    second = tl.join(tl.join(a1, b1), tl.join(a3, b3))
    return tl.reshape(tl.join(first, second), [octet.shape[0], 8])


@triton.jit
def log2_below(bits, INTERPRETED: tl.constexpr):
    """log2 of u less up to 2^-23, or -inf, in three instructions: -log u, and more so this, is at least G."""
    below = ((bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    if INTERPRETED:  # which has no assembly, and warns of log2(0)
        return tl.log2(tl.maximum(below, 2.0**-33))
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [below], tl.float32, is_pure=True, pack=1)
