"""Counter-based random numbers: the same (seed, stream, row, token) gives the same number anywhere.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with

    key     = (seed low, seed high)
    counter = (token // 4, row low, row high, stream + 256 * draw)

and token v takes word v % 4 of the result. No state exists, so results cannot depend on tile sizes, batch
composition, launch order or on which implementation asks.

From 32 random bits:

    u = min((bits + 1/2) * 2**-32, 1 - 2**-24)     exponential E = -log1p(-u)     Gumbel G = -log E

Small E (large G), which win races, come from small u, where floats are dense; the clamp keeps the 128 largest
values of bits, which round to u = 1 in fp32, from giving E = inf.
"""

from enum import IntEnum
from typing import TypeVar

import numpy as np
import torch
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


def exponential_noise(seed: int, stream: Stream, rows: Tensor, count: int, draws: int | None = None) -> Tensor:
    """Standard exponential variables, fp32, shaped as `random_bits`."""
    uniform = (random_bits(seed, stream, rows, count, draws).float() + 0.5) * 2.0**-32
    return -torch.log1p(-uniform.clamp(max=1 - 2.0**-24))


def gumbel_noise(seed: int, stream: Stream, rows: Tensor, count: int, draws: int | None = None) -> Tensor:
    """Standard Gumbel variables, fp32, shaped as `random_bits`: minus the logarithm of `exponential_noise`."""
    return -exponential_noise(seed, stream, rows, count, draws).log()


def coins(seed: int, rows: Tensor, ranks: Tensor) -> Tensor:
    """One uniform number in [0, 1), on a grid of 2**-24, for each child, by its rank and the row of the node above it.

    rows, ranks: LongTensors of one shape; fp64 of that shape. Accept with strict `<`.
    """
    stream = torch.full_like(rows, int(Stream.ACCEPT))
    bits = _words(seed, ranks // 4, rows, stream).gather(-1, (ranks % 4)[..., None])[..., 0]
    return (bits >> 8).double() * 2.0**-24


def _words(seed: int, quad: Tensor, row: Tensor, stream: Tensor) -> Tensor:
    """The four words [..., 4] of each counter, from broadcastable LongTensors; by way of NumPy on a CPU."""
    counter = (quad, row & _MASK, row >> 32, stream)
    if row.device.type == "cpu":
        return torch.stack([torch.from_numpy(word) for word in philox(seed, *(part.numpy() for part in counter))], -1)
    return torch.stack(philox(seed, *counter), -1)
