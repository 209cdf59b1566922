"""Layers in pinned host memory, from which a GPU can copy asynchronously.

A layer is there permanently, at one address; or it passes: it is read from files for each pass, through two buffers.
Memory is pinned after its allocation, by cudaHostRegister, because torch's own pinned allocations are rounded up to
powers of two.
"""

import weakref
from collections.abc import Collection, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from heavypath.speculative.models.layer_weights import StreamCounts
from heavypath.speculative.streaming.layout import Packing, aligned_memory
from heavypath.speculative.streaming.source import Place
from heavypath.speculative.streaming.stream import LayerStream

PORTABLE = 1  # cudaHostRegisterPortable: pinned for all GPUs


class HostLayers:
    """Layers in pinned host memory, for copies to a GPU.

    layers: for each layer, by name, its tensors or their places in files. Tensors are moved: they are removed from the
            mapping, and freed, layer by layer, if nothing else refers to them
    stay:   the layers in files that stay in memory once they have been read
    device: the GPU

    passing: the layers that are read again for each pass
    reader:  reads layers from files; None if there are none

    Raises RuntimeError, with the size, for memory that cannot be pinned, OSError for files that cannot be opened, and
    ValueError for tensors in files that are not aligned to their types.
    """

    def __init__(
        self, layers: Sequence[MutableMapping[str, Tensor | Place]], stay: Collection[int], device: torch.device
    ):
        filed = [index for index, layer in enumerate(layers) if any(isinstance(one, Place) for one in layer.values())]
        self.passing = frozenset(filed) - {*stay}  # layers that share their memory with others
        self._pinned = Pinned(device)
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
        # Memory must be unpinned before it is freed, even if nobody calls `close`.
        self._unpin = weakref.finalize(self, self._pinned.unpin)
        self._unpin.atexit = False

    @property
    def nbytes(self) -> int:
        """The bytes of all pinned memory."""
        return self._pinned.nbytes

    def tensors(self, layer: int) -> dict[str, Tensor]:
        """A layer's tensors by name. Those of a passing layer hold its weights while it is taken."""
        if self.reader is None or layer not in self._number:
            return self._held[layer]
        return self._held[layer] | self.reader.tensors(self._number[layer])

    def take(self, layer: int) -> None:
        """Wait until a layer is in memory. A passing layer stays until this thread releases it or takes another one.

        Raises OSError, with the reason, if it cannot be read, and RuntimeError after `close`.
        """
        if self.reader is not None and layer in self._number:
            self.reader.slots.take(self._number[layer])

    def release(self, layer: int) -> None:
        """Allow the memory of a layer of `passing` to be overwritten; nothing happens for other layers."""
        if self.reader is not None and layer in self.passing:
            self.reader.slots.release(self._number[layer])

    def let_go(self) -> None:
        """Release the passing layer that this thread took and has not released, if there is one."""
        if self.reader is not None:
            self.reader.slots.let_go()

    def counts(self) -> StreamCounts:
        """Bytes and seconds of reads from files, and the seconds that passes waited for them; zeros without files."""
        return StreamCounts() if self.reader is None else self.reader.counts()

    def close(self) -> None:
        """Free the memory. The caller makes sure that no copy from it is running."""
        if self.reader is not None:
            self.reader.close()
        self._unpin()
        self._held.clear()
        self.reader = None


class Pinned:
    """Pins host memory, so that a GPU can copy from it asynchronously, and remembers it, to unpin it later.

    device: the GPU
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime: Any = torch.cuda.cudart()
        self._memories: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """The bytes of all pinned allocations."""
        return sum(memory.nbytes for memory in self._memories)

    def memory(self, nbytes: int) -> Tensor:
        """Allocate and pin memory, uint8 [nbytes]. Raises RuntimeError if the system does not allow it."""
        memory, _ = aligned_memory(nbytes)
        self.pin(memory)
        return memory

    def pin(self, memory: Tensor) -> None:
        """Pin existing memory. Raises RuntimeError, and unpins all allocations, if the system does not allow it."""
        if memory.nbytes == 0:
            return
        code = int(self._runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE))
        if code != 0:
            nbytes = self.nbytes
            self.unpin()
            with suppress(RuntimeError):  # CUDA keeps the error, and PyTorch raises it at the next launch: this one
                torch.ones(1, device=self._device)
            raise RuntimeError(
                f"{memory.nbytes / 1e9:.3f}G of the host's memory cannot be pinned for the GPU, beside "
                f"{nbytes / 1e9:.3f}G that were (CUDA error {code}); give a smaller host_memory, or allow this process "
                "to lock more memory (ulimit -l)"
            )
        self._memories.append(memory)

    def unpin(self) -> None:
        """Unpin all allocations, and drop the references to them."""
        while self._memories:
            self._runtime.cudaHostUnregister(self._memories[-1].data_ptr())
            self._memories.pop()
