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
from heavypath.kernels.native.library import compiled, thread_count
from heavypath.kernels.native.recording import do

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
        self.weight, self.epsilon = (None, 0.0) if norm is None else (norm.weight.data_ptr(), norm.epsilon)


class Blocks(NamedTuple):
    """Weights [N_i, K] of layers that share an input, stacked and repacked in blocks of outputs.

    weight: [blocks, PARTS, steps, BLOCK], of which part p has the columns p, PARTS + p, ..; padded with zeros
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
        if any(bias is not None for bias in biases):
            present = [w.new_zeros(len(w)) if bias is None else bias for w, bias in zip(weights, biases, strict=True)]
            bias = _in_blocks([each[:, None] for each in present], paired).flatten()
        else:
            bias = None
        blocks = _in_blocks(weights, paired)  # [blocks, BLOCK, K]
        columns = blocks.shape[2]
        parts = compiled().parts()
        split = pad(blocks, (0, -columns % parts)).unflatten(2, (-1, parts)).permute(0, 3, 2, 1)
        weight = _HUGE_PAGES.room(split.nbytes).view(split.dtype).view(split.shape).copy_(split)
        outputs = sum(map(len, weights))
        struct = WeightStruct(weight.data_ptr(), None if bias is None else bias.data_ptr(), outputs, columns)
        return cls(weight, bias, struct)


def _in_blocks(weights: Sequence[Tensor], paired: bool) -> Tensor:
    """Return weights [N_i, K] as [blocks, BLOCK, K]."""
    width = compiled().block() // (2 if paired else 1)
    joined = weights if paired else [torch.cat([*weights]) if len(weights) > 1 else weights[0]]
    cut = [pad(each, (0, 0, 0, -len(each) % width)).unflatten(0, (-1, width)) for each in joined]
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
        with self._lock:
            if len(self._free) < nbytes:
                size = max(nbytes, REGION) + HUGE_PAGE
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                memory = mmap.mmap(-1, size, flags)
                with suppress(OSError):  # a system without huge pages gives small ones
                    memory.madvise(mmap.MADV_HUGEPAGE)
                whole = torch.frombuffer(memory, dtype=torch.uint8)
                self._free = whole[-whole.data_ptr() % HUGE_PAGE :]
            room = self._free[:nbytes]
            self._free = self._free[-(-nbytes // 64) * 64 :]
        return room


_HUGE_PAGES = _HugePages()


def product(hidden: Tensor, blocks: Blocks) -> Tensor:
    """Return hidden [..., K] times the weight, [..., N]; ValueError for rows of another dtype or width."""
    weight, struct = blocks.weight, blocks.struct
    if (hidden.dtype, hidden.shape[-1]) != (weight.dtype, struct.columns):
        given = f"{hidden.dtype} {[*hidden.shape]}"
        raise ValueError(f"product needs rows [..., {struct.columns}] of {weight.dtype}, got {given}")
    rows = hidden.reshape(-1, hidden.shape[-1]).float().contiguous()
    result = hidden.new_empty(*hidden.shape[:-1], struct.outputs)
    multiply = getattr(compiled(), f"product_{TYPES[hidden.dtype]}")
    count = c_int64(len(rows))
    threads = c_int64(thread_count(weight.nbytes))
    addresses = c_void_p(rows.data_ptr()), c_void_p(result.data_ptr())
    do(partial(multiply, byref(struct), addresses[0], count, addresses[1], threads), (blocks, rows, result))
    return result
