"""`LayerStream`: read a model's layers from files while earlier layers compute.

    stream = LayerStream(layers, resident=[0, 5])        # for each layer the places of its tensors, see `source`
    with stream.layer(3):
        ... stream.tensors(3)["mlp.up_proj.weight"] ...

The stream's own threads read ahead in a circle: after the last layer comes the first one of the next pass, which is
read while the next tree is drafted and verified. `slots` describes the order.
"""

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

from torch import Tensor

from heavypath.speculative.models.forward import check_finite
from heavypath.speculative.models.layer_weights import StreamCounts, WeightStream
from heavypath.speculative.streaming.layout import Layout
from heavypath.speculative.streaming.memory import SLOTS
from heavypath.speculative.streaming.slots import LayerSlots
from heavypath.speculative.streaming.source import LayerSource

READERS = 4  # threads that read: a disk is faster with several requests at a time


class LayerStream(WeightStream):
    """The weights of a model's layers in files, of which few are in memory at a time.

    layers:   for each layer, the places of its tensors in files, by name
    resident: the layers that stay in memory once they have been read
    slots:    how many other layers are in memory at a time

    Any number of threads may take layers; `one_pass` keeps their passes apart. Tensors have the same addresses for as
    long as the stream exists. When the last reference to the stream is gone, its threads end and its files are closed;
    memory is freed with the last of its tensors.

    nbytes:  the memory that the stream uses, in bytes
    on_take: called with each layer that is taken, to show progress
    slots:   the state; `slots.read` may be replaced, to observe or slow down reading

    Raises OSError for files that cannot be opened, ValueError for tensors that are not aligned to their types.
    """

    def __init__(self, layers: Sequence[LayerSource], resident: Collection[int] = (), slots: int = SLOTS):
        self.layers = len(layers)
        self.resident = frozenset(resident)
        every = {*range(self.layers)}
        if slots < SLOTS or not self.resident <= every:
            raise ValueError(
                f"expected at least {SLOTS} slots and resident layers within 0 .. {self.layers - 1}, "
                f"got {slots} and {sorted(self.resident)}"
            )
        self.slots = LayerSlots([Layout(layer) for layer in layers], self.resident, slots)
        self.nbytes = self.slots.nbytes
        self.on_take: Callable[[int], None] | None = None
        self._alone = threading.RLock()
        self._unchecked = every
        self._threads = [
            threading.Thread(target=_work, args=(self.slots,), name=f"heavypath reader {number}", daemon=True)
            for number in range(READERS)
        ]
        for thread in self._threads:
            thread.start()
        weakref.finalize(self, _end, self.slots)

    def tensors(self, layer: int) -> dict[str, Tensor]:
        """A layer's tensors by name. They hold its weights while the layer is taken."""
        return self.slots.tensors(layer)

    def take(self, layer: int) -> None:
        """Wait until a layer is in memory, and keep it there until this thread releases it or takes another one.

        Raises OSError, with layer and reason, if it cannot be read; the next call tries again. Raises ValueError for
        weights that are NaN or infinite, RuntimeError if the stream has been closed.
        """
        if self.on_take is not None:
            self.on_take(layer)
        self.slots.take(layer)
        if layer in self._unchecked:
            try:
                check_layer(layer, self.tensors(layer))
            except ValueError:
                self.release(layer)
                raise
            self._unchecked.discard(layer)

    def release(self, layer: int) -> None:
        """Allow a layer's memory to be overwritten by another layer."""
        self.slots.release(layer)

    @contextmanager
    def layer(self, layer: int) -> Iterator[None]:
        """A context in which a layer is in memory, and its tensors hold its weights."""
        self.take(layer)
        try:
            yield
        finally:
            self.release(layer)

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """A context for a pass over the layers, for which passes of other threads wait.

        At its end all layers that this thread took are released, even after Ctrl-C.
        """
        with self._alone:
            try:
                yield
            finally:
                self.slots.let_go()

    def counts(self) -> StreamCounts:
        """Bytes read so far, seconds in which any read was running, and seconds that passes waited for layers."""
        return self.slots.counts()

    def close(self) -> None:
        """End the threads and close the files. Layers cannot be taken any more."""
        self.slots.close()
        _end(self.slots)
        for thread in self._threads:
            thread.join()
        for file in self.slots.files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def check_layer(layer: int, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a weight of layer number `layer` is NaN or infinite. Streams check each layer once."""
    check_finite("the model", ((f"{name} of layer {layer}", tensor) for name, tensor in tensors.items()))


def _work(slots: LayerSlots) -> None:
    """The loop of a reader thread. It refers to the slots, not to the stream, so that the stream can be freed."""
    while (job := slots.jobs.get()) is not None:
        slots.do(job)


def _end(slots: LayerSlots) -> None:
    """Make the reader threads end. This may run in any thread at any time (as a finalizer), so it must not wait."""
    for _ in range(READERS):
        slots.jobs.put(None)
