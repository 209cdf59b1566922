"""Layouts of a layer in memory, of which its tensors are views.

`Layout` has the same bytes as the layer's files, in runs of whole blocks, which can be read directly. So nothing is
converted or copied, and a layer is read in few long runs.

`Packing` has one tensor after another. In files tensors begin at multiples of 8 bytes. Matrix products on a GPU are
faster at multiples of 16, and some need them.
"""

import mmap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from heavypath.speculative.streaming.file import BLOCK
from heavypath.speculative.streaming.source import LayerSource, Place

CHUNK = 8 << 20  # bytes per read: large enough for any disk, small enough for several readers of a small layer
GAP = 1 << 16  # gaps between tensors up to this many bytes are read instead of skipped
ALIGNMENT = 256  # in bytes, for the tensors of a packing; torch's allocations on a GPU have it, too


class Chunk(NamedTuple):
    """A part of a file that one read loads into a layer's memory. All numbers are multiples of BLOCK.

    begin:  its offset in the file
    offset: its offset in the layer's memory
    length: its bytes
    """

    path: str
    begin: int
    offset: int
    length: int


class _Run(NamedTuple):
    path: str
    begin: int
    end: int
    offset: int  # of its first byte in the layer's memory


class Layout:
    """Which parts of files are read into a layer's memory, and where its tensors are in that memory.

    source: the places of the layer's tensors in files, by name
    nbytes: the size of the memory

    Raises ValueError for a tensor whose offset in the file is not a multiple of its dtype's size.
    """

    def __init__(self, source: LayerSource):
        self.source = source
        self._runs: list[_Run] = []
        for place in sorted(source.values(), key=lambda place: (place.path, place.begin)):
            if place.begin % place.dtype.itemsize:
                raise ValueError(
                    f"{place.path!r} has a tensor of type {place.dtype} at the odd byte {place.begin}; write it again "
                    "with save_pretrained, which aligns tensors"
                )
            begin = place.begin // BLOCK * BLOCK
            end = -(-place.end // BLOCK) * BLOCK
            last = self._runs[-1] if self._runs else None
            if last is not None and last.path == place.path and begin <= last.end + GAP:
                self._runs[-1] = last._replace(end=max(last.end, end))
            else:
                offset = 0 if last is None else last.offset + last.end - last.begin
                self._runs.append(_Run(place.path, begin, end, offset))
        self.nbytes = sum(run.end - run.begin for run in self._runs)

    def chunks(self) -> Iterator[Chunk]:
        """The reads, of at most 8 MiB each, that together load the layer."""
        for run in self._runs:
            for begin in range(run.begin, run.end, CHUNK):
                yield Chunk(run.path, begin, run.offset + begin - run.begin, min(CHUNK, run.end - begin))

    def tensors(self, memory: Tensor) -> dict[str, Tensor]:
        """The layer's tensors by name, as views of `memory`, uint8 [at least nbytes]."""
        views = {}
        for name, place in self.source.items():
            run = next(run for run in self._runs if run.path == place.path and run.begin <= place.begin < run.end)
            begin = run.offset + place.begin - run.begin
            views[name] = memory[begin : begin + place.nbytes].view(place.dtype).view(place.shape)
        return views


class Packing:
    """The layout of some tensors in one buffer, in their order, each at a multiple of 256 bytes.

    tensors: the tensors or their places in files, by name; only dtypes and shapes matter
    nbytes:  the size of the buffer
    """

    def __init__(self, tensors: Mapping[str, Tensor | Place]):
        self._facts = {name: (one.dtype, (*one.shape,), one.nbytes) for name, one in tensors.items()}
        self.nbytes = sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for _, _, nbytes in self._facts.values())

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The tensors by name, as views of the buffer `memory`, uint8 [at least nbytes]."""
        views = {}
        begin = 0
        for name, (dtype, shape, nbytes) in self._facts.items():
            views[name] = memory[begin : begin + nbytes].view(dtype).view(shape)
            begin += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return views


def aligned_memory(nbytes: int) -> tuple[Tensor, memoryview]:
    """Allocate zeroed, page-aligned memory. Returns it as a tensor uint8 [nbytes] and as a memoryview of whole pages.

    The memory is freed when both are gone.
    """
    pages = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # the system may have no huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)  # so that a direct read has to look up few pages
    return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes), memoryview(pages)
