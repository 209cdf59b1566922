"""Counter-based random numbers: the same (seed, stream, row, token) gives the same number on every device.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with

    key     = (seed low, seed high)
    counter = (token // 4, row low, row high, stream + 256 * draw)

and token v gets word v % 4 of the result. There is no state, so results cannot depend on tile sizes, batch
composition, launch order or implementation.

From 32 random bits:

    u = min((bits + 1/2) * 2**-32, 1 - 2**-24)     exponential E = -log1p(-u)     Gumbel G = -log E

Small u give small E and large G, which win races. Both logarithms are computed in fp64 and G is rounded to fp32 once,
so that a CPU, a GPU and Triton's interpreter agree on all bits of G.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from enum import IntEnum
from numbers import Integral
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.language import tl, triton

_MASK = 0xFFFFFFFF
Words = np.ndarray | int


class Stream(IntEnum):
    """Uses of randomness that must be independent of each other under one seed and row."""

    DRAFT = 0  # drawing children; in a race the target's token is drawn with the same noise
    ACCEPT = 1  # coins, one per child
    TARGET = 2  # recovered, bonus and target-sampled tokens
    FILL = 3  # order of the tokens outside the draft's support


class Noise(NamedTuple):
    """A seed, and a noise row for each distribution to draw from. Together they determine the random numbers.

    seed: any integer, or a LongTensor [], which kernels read when they run
    rows: LongTensor >= 0, one for each row of logits; None means 0, 1, 2, ...
    """

    seed: int | Tensor
    rows: Tensor | None


def philox(seed: int, c0: Words, c1: Words, c2: Words, c3: Words) -> np.ndarray:
    """Return ten rounds of Philox-4x32, uint32 [..., 4], of the low 32 bits of four counters that broadcast."""
    c0, c1, c2, c3 = (np.asarray(counter).astype(np.uint64) & _MASK for counter in (c0, c1, c2, c3))
    seed = int(seed)  # NumPy's integers of 32 bits overflow below
    low = seed & _MASK
    high = seed >> 32 & _MASK
    for _ in range(10):
        even = c0 * 0xD2511F53
        odd = c2 * 0xCD9E8D57
        c0 = odd >> 32 ^ c1 ^ low
        c1 = odd & _MASK
        c2 = even >> 32 ^ c3 ^ high
        c3 = even & _MASK
        low = low + 0x9E3779B9 & _MASK
        high = high + 0xBB67AE85 & _MASK
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), -1).astype(np.uint32)


def noise_bits(seed: int, stream: Stream, noise_rows: np.ndarray, count: int, draws: int | None = None) -> np.ndarray:
    """Return 32 random bits for each noise row and each of `count` tokens; with `draws`, that many independent sets.

    noise_rows: int64 [R], values >= 0. Returns uint32 [R, count], or [R, draws, count] if draws is given.
    """
    row = noise_rows[:, None, None]  # [R, draws, quads]
    draw = np.arange(draws or 1)[:, None]
    words = philox(seed, np.arange(-(-count // 4)), row, row >> 32, int(stream) + 256 * draw)
    words = words.reshape(len(noise_rows), draws or 1, words.shape[2] * 4)[..., :count]
    return words[:, 0] if draws is None else words


def gumbel_noise(seed: int, stream: Stream, noise_rows: Tensor, count: int, draws: int | None = None) -> Tensor:
    """Return standard Gumbel variables, fp32, shaped as `noise_bits`; noise_rows: LongTensor[R]."""
    return torch.from_numpy(gumbels(seed, stream, noise_rows.cpu().numpy(), count, draws)).to(noise_rows.device)


def gumbels(seed: int, stream: Stream, noise_rows: np.ndarray, count: int, draws: int | None = None) -> np.ndarray:
    """Return `gumbel_noise` for an int64 array of noise rows, as an array."""
    return gumbel(noise_bits(seed, stream, noise_rows, count, draws))


def gumbel(words: np.ndarray) -> np.ndarray:
    """Convert random 32-bit words to Gumbel variables, fp32."""
    left = np.maximum((2.0**32 - 0.5 - words) * 2.0**-32, 2.0**-24)  # 1 - u, exactly
    return -np.log(-np.log(left)).astype(np.float32)


def coins(seed: int, noise_rows: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Return each child's coin: uniform in [0, 1), on a grid of 2**-24, by its parent's noise row and its rank.

    noise_rows, ranks: int64 arrays of one shape. Returns fp64 of that shape. A child is accepted if coin < chance.
    """
    words = philox(seed, ranks // 4, noise_rows, noise_rows >> 32, int(Stream.ACCEPT)).reshape(-1, 4)
    word = words[np.arange(ranks.size), ranks.ravel() % 4]
    return ((word >> 8) * 2.0**-24).reshape(ranks.shape)


def check_seed(seed: int | Tensor, device: torch.device) -> None:
    """Raise ValueError unless `seed` is an integer, or a LongTensor [] on this device."""
    if isinstance(seed, Tensor):
        if seed.dim() or seed.dtype != torch.long or seed.device != device:
            given = f"{seed.dtype} {[*seed.shape]} on {seed.device}"
            raise ValueError(f"seed must be an integer or a LongTensor [] on {device}, got {given}")
    elif not isinstance(seed, Integral):
        raise ValueError(f"seed must be an integer or a LongTensor [] on {device}, got {seed!r}")


def seed_arguments(seed: int | Tensor) -> dict[str, Tensor | int | None]:
    """Return a kernel's arguments for a seed: a pointer, or the two halves of the value as signed 32-bit integers."""
    if isinstance(seed, Tensor):
        return {"seed_ptr": seed, "seed_low": 0, "seed_high": 0}
    seed = int(seed)  # Triton takes no integers of NumPy, and those of 32 bits overflow below
    low = seed & _MASK
    high = (seed >> 32) & _MASK
    return {"seed_ptr": None, "seed_low": low - (low >> 31 << 32), "seed_high": high - (high >> 31 << 32)}


@triton.jit
def seed_words(seed_ptr, seed_low, seed_high):
    """Return the two halves of a seed as int32, from the three arguments of `seed_arguments`."""
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
        seed_low = seed.to(tl.int32)
        seed_high = (seed >> 32).to(tl.int32)
    return seed_low, seed_high


@triton.jit
def philox_words(seed_low, seed_high, c0, c1, c2, c3):
    """`philox` in a kernel: return four tensors of words, from uint32 counters and the seed's halves as int32."""
    k0 = seed_low.to(tl.uint32, bitcast=True)
    k1 = seed_high.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(10):
        even = c0.to(tl.uint64) * 0xD2511F53
        odd = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (odd >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (even >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = odd.to(tl.uint32)
        c3 = even.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def gumbel_of(bits):
    """`gumbel` in a kernel, for uint32 words."""
    uniform = tl.minimum((bits.to(tl.float64) + 0.5) * (2.0**-32), 1 - 2.0**-24)
    return (-tl.log(-tl.log(1 - uniform))).to(tl.float32)


@triton.jit
def octet_bits(seed_low, seed_high, octet, row, stream):
    """Return the words [A, 8] of tokens 8 * octet + 0 .. 7, for octets [A], one noise row and one stream."""
    low = row.to(tl.uint32)
    high = (row >> 32).to(tl.uint32)
    even = (2 * octet).to(tl.uint32)
    stream = stream.to(tl.uint32)
    a0, a1, a2, a3 = philox_words(seed_low, seed_high, even, low, high, stream)
    b0, b1, b2, b3 = philox_words(seed_low, seed_high, even + 1, low, high, stream)
    # Each join adds an axis of size 2, one bit of a token's index in its octet; the innermost join is the highest bit.
    first = tl.join(tl.join(a0, b0), tl.join(a2, b2))
    second = tl.join(tl.join(a1, b1), tl.join(a3, b3))
    return tl.reshape(tl.join(first, second), [octet.shape[0], 8])


@triton.jit
def log2_below(bits, INTERPRETED: tl.constexpr):
    """Return a lower bound of log2(u), off by at most 2^-23 in u, or -inf; it takes three instructions.

    G is at most -log(u), so this times -log(2) is an upper bound of G. It shows which tokens cannot win, without exact
    logarithms (see `sampling_kernel`).
    """
    below = ((bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    if INTERPRETED:  # the interpreter has no assembly, and warns of log2(0)
        return tl.log2(tl.maximum(below, 2.0**-33))
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [below], tl.float32, is_pure=True, pack=1)
