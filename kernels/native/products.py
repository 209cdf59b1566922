"""Linear layers on a CPU, with weights repacked in blocks of outputs; see products.h."""

import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress
from ctypes import Structure, byref, c_double, c_int64, c_void_p
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from heavypath.kernels.layers.rms_norm import Norm
from heavypath.kernels.native.library import compiled, has_tiles, thread_count
from heavypath.kernels.native.recording import do

TILE = 16  # outputs of a tile, and pairs of columns
HUGE_PAGE = 1 << 21  # bytes
REGION = 1 << 26  # bytes that are taken from the system together, for the weights of many layers

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}  # suffixes of the functions' names


class WeightStruct(Structure):
    """`Weight` of products.h."""

    _fields_ = [("blocks", c_void_p), ("bias", c_void_p), ("outputs", c_int64), ("columns", c_int64)]


class NormStruct(Structure):
    """`Norm` of norms.h. It holds the weight's address only; the caller keeps the weight alive."""

    _fields_ = [("weight", c_void_p), ("epsilon", c_double)]

    def take(self, norm: Norm | None) -> None:
        """Point to a norm; None leaves rows as they are."""
        if norm is None:
            self.weight = None
            self.epsilon = 0.0
        else:
            self.weight = norm.weight.data_ptr()
            self.epsilon = norm.epsilon


class Blocks(NamedTuple):
    """Weights [N_i, K] of layers that share an input, stacked and repacked in blocks of outputs.

    weight: [blocks, PARTS, steps, BLOCK], of which part p has the columns p, PARTS + p, ..; padded with zeros. In bf16
            BLOCK is [VECTORS / 2, WIDTH, 2], pairs of outputs; on a CPU with AMX all is as in tiles.h,
            [blocks, K / 32, 2, 16, 16, 2]
    bias:   [blocks * BLOCK], or None if no layer has one
    struct: the argument of the kernels
    """

    weight: Tensor
    bias: Tensor | None
    struct: WeightStruct

    @classmethod
    @torch.inference_mode()
    def of(cls, weights: Sequence[Tensor], biases: Sequence[Tensor | None], paired: bool = False) -> Self:
        """Repack weights [N_i, K] and biases [N_i] (or None).

        paired: of two weights of equal shape, half of each block's outputs come from the first, half from the second
        """
        blocks = _in_blocks(weights, paired)  # [blocks, BLOCK, K]
        columns = blocks.shape[2]
        in_tiles = blocks.dtype == torch.bfloat16 and has_tiles()
        split = _in_tiles(blocks) if in_tiles else _in_parts(blocks)
        room = _HUGE_PAGES.room(split.nbytes)
        weight = room.view(split.dtype).view(split.shape)
        weight.copy_(split)
        bias = _stacked_biases(weights, biases, paired)
        bias_address = None if bias is None else bias.data_ptr()
        outputs = sum(map(len, weights))
        struct = WeightStruct(weight.data_ptr(), bias_address, outputs, columns)
        return cls(weight, bias, struct)


def _in_parts(blocks: Tensor) -> Tensor:
    """Return weights [blocks, BLOCK, K] as [blocks, PARTS, steps, BLOCK], padded with zeros."""
    parts = compiled().parts()
    padded = pad(blocks, (0, -blocks.shape[2] % parts))
    split = padded.unflatten(2, (-1, parts)).permute(0, 3, 2, 1)  # [blocks, PARTS, steps, BLOCK]
    if blocks.dtype == torch.float32:
        return split
    width = compiled().vector_bits() // 32
    pairs = split.unflatten(3, (-1, 2, width))  # two vectors become the halves of one of words
    return pairs.transpose(4, 5).flatten(3)


def _in_tiles(blocks: Tensor) -> Tensor:
    """Return weights [blocks, BLOCK, K] as tiles [blocks, K / 32, 2, 16 pairs, 16 outputs, 2], padded with zeros."""
    padded = pad(blocks, (0, -blocks.shape[2] % (2 * TILE)))
    split = padded.unflatten(2, (-1, TILE, 2)).unflatten(1, (-1, TILE))  # [blocks, 2, 16, K / 32, 16, 2]
    return split.permute(0, 3, 1, 4, 2, 5)


def _stacked_biases(weights: Sequence[Tensor], biases: Sequence[Tensor | None], paired: bool) -> Tensor | None:
    """Return biases [N_i] in the order of the blocks, [blocks * BLOCK], zeros for layers without; None for none."""
    if all(bias is None for bias in biases):
        return None
    columns = []
    for weight, bias in zip(weights, biases, strict=True):
        column = weight.new_zeros(len(weight)) if bias is None else bias
        columns.append(column[:, None])
    return _in_blocks(columns, paired).flatten()


def _in_blocks(weights: Sequence[Tensor], paired: bool) -> Tensor:
    """Return weights [N_i, K] as [blocks, BLOCK, K]."""
    width = compiled().block()
    if paired:
        width //= 2
    elif len(weights) > 1:
        weights = [torch.cat([*weights])]
    cut = []
    for weight in weights:
        padded = pad(weight, (0, 0, 0, -len(weight) % width))
        cut.append(padded.unflatten(0, (-1, width)))
    return torch.cat(cut, 1)


class _HugePages:
    """Memory for weights in pages of 2 MB. Pages of 4 KB make a processor read weights at half of the memory's speed.

    Weights lie one after the other in regions, and a region is freed with the last of its weights.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._lock = threading.Lock()

    def room(self, nbytes: int) -> Tensor:
        """Return uint8[nbytes], aligned to 64 bytes."""
        aligned = -(-nbytes // 64) * 64
        with self._lock:
            if len(self._free) < nbytes:
                self._free = _new_region(nbytes)
            room = self._free[:nbytes]
            self._free = self._free[aligned:]
        return room


def _new_region(nbytes: int) -> Tensor:
    """Return uint8[at least nbytes] that begins with a huge page, and is large enough for other weights, too."""
    size = max(nbytes, REGION) + HUGE_PAGE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size, flags)
    with suppress(OSError):  # a system without huge pages gives small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    before_page = -whole.data_ptr() % HUGE_PAGE
    return whole[before_page:]


_HUGE_PAGES = _HugePages()


def product(hidden: Tensor, blocks: Blocks) -> Tensor:
    """Return hidden [..., K] times the weight, [..., N]; ValueError for rows of another dtype or width."""
    weight = blocks.weight
    struct = blocks.struct
    *lead, width = hidden.shape
    if hidden.dtype != weight.dtype or width != struct.columns:
        given = f"{hidden.dtype} {[*hidden.shape]}"
        raise ValueError(f"product needs rows [..., {struct.columns}] of {weight.dtype}, got {given}")
    rows = hidden.reshape(-1, width).float().contiguous()  # [R, K]
    result = hidden.new_empty(*lead, struct.outputs)
    multiply = getattr(compiled(), f"product_{TYPES[hidden.dtype]}")
    call = partial(
        multiply,
        byref(struct),
        c_void_p(rows.data_ptr()),
        c_int64(len(rows)),
        c_void_p(result.data_ptr()),
        c_int64(thread_count(weight.nbytes)),
    )
    do(call, kept=(blocks, rows, result))
    return result
