"""Layers in a host's memory, from where a GPU copies them by itself: so this memory is pinned, it stays where it is.

A layer is there for good, at one address, or it passes: then it is read from files for each pass, through two places.
Memory is pinned as it is allocated, by cudaHostRegister, because torch's own pinned memory comes in powers of two.
"""

import weakref
from collections.abc import Collection, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from heavypath.speculative.models.layer_weights import StreamCounts
from heavypath.speculative.streaming.layout import aligned_memory
from heavypath.speculative.streaming.packing import Packing
from heavypath.speculative.streaming.source import Place
from heavypath.speculative.streaming.stream import LayerStream

PORTABLE = 1  # cudaHostRegisterPortable: pinned for all GPUs


class HostLayers:
    """The layers that a GPU copies, pinned.

    layers: of each its tensors, or where they lie in files. Tensors are moved: the mapping is empty after it, and what
            nobody else holds has gone, layer by layer
    stay:   the layers in files that stay in memory once they have been read

    passing: those that do not; reader: what reads files, if there are any

    Raises RuntimeError, with the size, for memory that cannot be pinned, and as LayerStream does.
    """

    def __init__(self, layers: Sequence[MutableMapping[str, Tensor | Place]], stay: Collection[int]):
        filed = [index for index, layer in enumerate(layers) if any(isinstance(one, Place) for one in layer.values())]
        self.passing = frozenset(filed) - {*stay}  # the layers whose memory is another one's at another time
        self._pinned = Pinned()
        self._number = {index: number for number, index in enumerate(filed)}
        self._held: list[dict[str, Tensor]] = []
        for layer in layers:
            held = {name: one for name, one in layer.items() if isinstance(one, Tensor)}
            packing = Packing(held)
            views = packing.views(self._pinned.memory(packing.nbytes)) if held else {}
            for name in [*held]:
                views[name].copy_(held.pop(name))
                del layer[name]
            self._held.append(views)
        sources = [{name: one for name, one in layers[index].items() if isinstance(one, Place)} for index in filed]
        self.reader = LayerStream(sources, [self._number[index] for index in stay]) if filed else None
        if self.reader is not None:
            for memory in self.reader.slots.memories:
                self._pinned.pin(memory)
        # Pinned memory must not be given back before it is unpinned, even by who never calls `close`.
        self._unpin = weakref.finalize(self, self._pinned.unpin)
        self._unpin.atexit = False

    @property
    def nbytes(self) -> int:
        """Bytes of pinned memory."""
        return self._pinned.nbytes

    def tensors(self, layer: int) -> dict[str, Tensor]:
        """A layer's tensors by their names; those of a layer that passes hold its weights while it is taken."""
        if self.reader is None or layer not in self._number:
            return self._held[layer]
        return self._held[layer] | self.reader.tensors(self._number[layer])

    def take(self, layer: int) -> None:
        """Wait until a layer is in memory. One that passes stays until this thread releases it or takes another one.

        Raises OSError, with the reason, if it cannot be read, and RuntimeError after `close`.
        """
        if self.reader is not None and layer in self._number:
            self.reader.slots.take(self._number[layer])

    def release(self, layer: int) -> None:
        """Allow the memory of a layer that passes to be filled with another one."""
        if self.reader is not None and layer in self.passing:
            self.reader.slots.release(self._number[layer])

    def let_go(self) -> None:
        """Release what this thread may still hold."""
        if self.reader is not None:
            self.reader.slots.let_go()

    def counts(self) -> StreamCounts:
        """The reads from files, and how long passes waited for them."""
        return StreamCounts() if self.reader is None else self.reader.counts()

    def close(self) -> None:
        """Give the memory back. Nothing may copy from it any more."""
        if self.reader is not None:
            self.reader.close()
        self._unpin()
        self._held.clear()
        self.reader = None


class Pinned:
    """Pinned memory, and how it ceases to be."""

    def __init__(self) -> None:
        self._runtime: Any = torch.cuda.cudart()
        self._memories: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return sum(memory.nbytes for memory in self._memories)

    def memory(self, nbytes: int) -> Tensor:
        """New pinned memory, uint8 [nbytes]."""
        memory, _ = aligned_memory(nbytes)
        self.pin(memory)
        return memory

    def pin(self, memory: Tensor) -> None:
        """Pin memory; raise RuntimeError, and unpin all, if the system does not allow it."""
        if memory.nbytes == 0:
            return
        code = int(self._runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE))
        if code != 0:
            nbytes = self.nbytes
            self.unpin()
            raise RuntimeError(
                f"{memory.nbytes / 1e9:.3f}G of the host's memory cannot be pinned for the GPU, beside "
                f"{nbytes / 1e9:.3f}G that were (CUDA error {code}); give a smaller host_memory, or allow this process "
                "to lock more memory (ulimit -l)"
            )
        self._memories.append(memory)

    def unpin(self) -> None:
        """Unpin all, and hold it no longer."""
        while self._memories:
            self._runtime.cudaHostUnregister(self._memories[-1].data_ptr())
            self._memories.pop()
