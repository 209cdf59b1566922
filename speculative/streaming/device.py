"""`DeviceStream`: copy layers from host memory to a GPU while earlier layers compute.

Layer i of n always uses slot i mod S, so that addresses never change. Copies run on a CUDA stream of their own, next to
"current", the stream that computes. This is the order of a pass; each line waits only for what it says:

    begin       the copies wait for everything given to current so far
    copy i      the copies wait until layer i - S has computed, copy layer i, and record event there[i]
    take i      current waits for there[i]; then layer i computes
    release i   current records event free[i]; copy i + S is launched, which waits for it
    end         current waits for the copies, also after an error

So a pass leaves nothing unfinished and depends on nothing before it: captured in a CUDA graph, it forks and joins
within the graph. It may begin early, with `one_pass(ahead=True)`: then the first S layers are copied while a draft
computes. Passes of several threads take turns (`turn`): on the host by a lock, and on the GPU, where they may use
different CUDA streams, by an event that is recorded after each turn and never within a capture.

Layers that the host reads from files during decoding are copied when they are taken, not earlier. Otherwise the host
would wait for the file instead of launching work. Such passes cannot be captured.
"""

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from heavypath.speculative.models.layer_weights import StreamCounts, WeightStream
from heavypath.speculative.streaming.device_tally import DeviceTally
from heavypath.speculative.streaming.host_layers import HostLayers
from heavypath.speculative.streaming.layout import Packing
from heavypath.speculative.streaming.memory import SLOTS
from heavypath.speculative.streaming.source import Place
from heavypath.speculative.streaming.stream import check_layer

Copy = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]  # tensors of a layer from those of the host


@dataclass(eq=False)
class _DeviceSlot:
    """GPU memory for one layer at a time, and its state within a pass.

    memory: uint8 [bytes of the largest layer]
    layer: the layer copied there last in this pass; None for none
    there: the CUDA event after that copy
    free:  the event after which it may be overwritten; None to wait for all work launched on the current stream
    """

    memory: Tensor
    layer: int | None = None
    there: Any = None
    free: Any = None


class DeviceStream(WeightStream):
    """The weights of layers that are copied from the host's memory to a GPU in each pass.

    layers: for each layer, by name, its tensors, which are moved to pinned memory, or their places in files
    device: the GPU
    stay:   the layers in files that stay in the host's memory once they have been read
    slots:  how many layers are in the GPU's memory at a time

    Tensors have the same addresses until `close`. When the last reference to the stream is gone, its memory is freed,
    except that of tensors still in use.

    nbytes:  the GPU memory that the stream uses, in bytes
    on_take: called with each layer that is taken, to show progress, except in a graph
    copy:    copies a layer; may be replaced, to observe it

    Raises RuntimeError for memory that cannot be pinned, OSError for files that cannot be opened, and ValueError for
    tensors in files that are not aligned to their types.
    """

    resident: frozenset[int] = frozenset()  # layers that stay on the GPU are not part of the stream

    def __init__(
        self,
        layers: Sequence[MutableMapping[str, Tensor | Place]],
        device: torch.device,
        stay: Collection[int] = (),
        slots: int = SLOTS,
    ):
        packings = [*map(Packing, layers)]
        size = max(packing.nbytes for packing in packings)
        self.layers = len(layers)
        self.device = device
        self._sizes = [packing.nbytes for packing in packings]
        memories = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(min(slots, len(layers)))]
        self._slots = [*map(_DeviceSlot, memories)]
        self.nbytes = size * len(memories)
        self._views = [packing.views(self._slot(layer).memory) for layer, packing in enumerate(packings)]
        self._parameters: list[weakref.ref[Tensor]] = []
        self.host = HostLayers(layers, stay, device)
        self.on_take: Callable[[int], None] | None = None
        self.copy: Copy = copy_layer
        self._copies = torch.cuda.Stream(device)
        # recorded after the last turn; at first, after earlier users of this memory
        self._left = torch.cuda.current_stream(device).record_event()
        self._tally = DeviceTally()
        self._alone = threading.RLock()
        self._in_turn = self._in_pass = self._forked = False  # of the lock's holder
        self._closed = False
        self._hooked: ExitStack | None = None  # the pass that a call of the model has begun
        self._leaving: tuple[int, Any] | None = None  # the layer from a file being copied, and the event after it
        self._unchecked = {*range(self.layers)}
        weakref.finalize(self, self._left.synchronize).atexit = False  # host memory must not be freed during a copy

    @property
    def is_fixed(self) -> bool:
        """Whether all layers stay in the host's memory, so that a pass may be captured in a CUDA graph."""
        return not self.host.passing

    def tensors(self, layer: int) -> dict[str, Tensor]:
        """A layer's tensors on the GPU by name. They hold its weights while the layer is taken."""
        return self._views[layer]

    def parameter(self, parameter: Tensor) -> None:
        """Register a parameter that is a view of these tensors, to release its memory when the stream is closed."""
        self._parameters.append(weakref.ref(parameter))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A context with exclusive use of the slots, both among threads and on the GPU.

        Raises RuntimeError if the stream has been closed.
        """
        with self._alone:
            self._drop_interrupted()
            if self._closed:
                raise RuntimeError("the stream of this model's weights is closed; load the model anew")
            if self._in_turn or torch.cuda.is_current_stream_capturing():  # a capture runs nothing
                yield
                return
            current = torch.cuda.current_stream(self.device)
            try:
                self._in_turn = True
                current.wait_event(self._left)
                yield
            finally:
                self._left.record(current)
                self._in_turn = False

    @contextmanager
    def replay(self) -> Iterator[None]:
        """A turn in which the caller launches a CUDA graph that contains one pass; it adds the pass to the counts."""
        with self.turn():
            yield
            self._tally.launched(sum(self._sizes))

    @contextmanager
    def one_pass(self, ahead: bool = False) -> Iterator[None]:
        """A context for a pass over the layers. A nested context is part of the outer pass.

        ahead: launch the copies of the first layers at once, instead of when they are taken
        """
        with self.turn():
            if self._in_pass:
                yield
                return
            try:
                self._in_pass = True
                for slot in self._slots:
                    slot.layer = slot.there = slot.free = None
                for layer in range(len(self._slots) if ahead else 0):
                    self._copy_ahead(layer)
                yield
            finally:
                self._in_pass = False
                if self._forked:
                    self._forked = False
                    torch.cuda.current_stream(self.device).wait_stream(self._copies)
                self._release_host()
                self.host.let_go()

    def ahead(self) -> AbstractContextManager[None]:
        """A context for a pass whose first layers are copied at once, while something else computes."""
        return self.one_pass(ahead=True)

    def enter(self) -> None:
        """Begin a pass if none is running, because the model is called. End it by `leave`."""
        with self._alone:
            if self._in_pass and self._hooked is None:
                return
            with ExitStack() as stack:
                stack.enter_context(self.one_pass())
                self._hooked = stack.pop_all()

    def leave(self) -> None:
        """End the pass that `enter` began, if it began one."""
        with self._alone:
            self._drop_interrupted()

    def take(self, layer: int) -> None:
        """Make what this thread launches next wait until a layer is on the GPU.

        Raises OSError, with layer and reason, if it cannot be read; the next pass tries again. Raises ValueError for
        weights that are NaN or infinite, RuntimeError outside of a pass.
        """
        with self._alone:
            if not self._in_pass:
                raise RuntimeError("a streamed layer is called outside of a pass; call the model, or enter one_pass()")
            slot = self._slot(layer)
            current = torch.cuda.current_stream(self.device)
            if slot.layer != layer:
                self._copy(layer)
            slot.free = None
            if torch.cuda.is_current_stream_capturing():
                current.wait_event(slot.there)
                return
            if self.on_take is not None:
                self.on_take(layer)
            begin = current.record_event(torch.cuda.Event(enable_timing=True))
            current.wait_event(slot.there)
            self._tally.waited((begin, current.record_event(torch.cuda.Event(enable_timing=True))))
            if layer in self._unchecked:
                check_layer(layer, self.tensors(layer))
                self._unchecked.discard(layer)

    def release(self, layer: int) -> None:
        """Allow a layer's memory to be overwritten after the work launched so far, and copy the next layer."""
        with self._alone:
            if not self._in_pass or self._slot(layer).layer != layer:  # taking it has failed
                return
            self._slot(layer).free = torch.cuda.current_stream(self.device).record_event()
            if layer + len(self._slots) < self.layers:
                self._copy_ahead(layer + len(self._slots))

    @contextmanager
    def layer(self, layer: int) -> Iterator[None]:
        """A context in which work that this thread launches finds a layer on the GPU."""
        with self.one_pass():
            self.take(layer)
            try:
                yield
            finally:
                self.release(layer)

    def counts(self) -> StreamCounts:
        """Bytes and seconds so far: of copies to the GPU, or, if layers are read during passes, of reads from files.

        This waits for the GPU.
        """
        with self._alone:
            copied = self._tally.counts()
            files = self.host.counts()
        if not self.host.passing:
            return copied
        return files._replace(waiting=files.waiting + copied.waiting)

    def close(self) -> None:
        """Wait for all launched work, and release GPU and pinned memory. Layers cannot be taken any more."""
        with self._alone:
            self._drop_interrupted()
            if self._closed:
                return
            self._closed = True
            self._left.synchronize()
            for reference in self._parameters:
                parameter = reference()
                if parameter is not None:
                    parameter.data = parameter.new_empty(0)
            self._views.clear()
            self._slots.clear()
            self.host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _slot(self, layer: int) -> _DeviceSlot:
        return self._slots[layer % len(self._slots)]

    def _drop_interrupted(self) -> None:
        """End a pass that a call of this thread began and that Ctrl-C may have kept from ending."""
        hooked = self._hooked
        self._hooked = None
        if hooked is not None:
            hooked.close()

    def _copy_ahead(self, layer: int) -> None:
        if layer not in self.host.passing:
            self._copy(layer)

    def _copy(self, layer: int) -> None:
        """Launch the copy of a layer, after the work that still uses its slot."""
        self._release_host()
        self.host.take(layer)
        slot = self._slot(layer)
        current = torch.cuda.current_stream(self.device)
        if slot.free is not None:
            self._copies.wait_event(slot.free)
        elif slot.layer is not None or not self._forked:
            self._copies.wait_stream(current)
        self._forked = True
        slot.layer = None  # unless all of the following is done
        is_timed = not torch.cuda.is_current_stream_capturing()
        with torch.cuda.stream(self._copies):
            begin = self._copies.record_event(torch.cuda.Event(enable_timing=True)) if is_timed else None
            self.copy(self._views[layer], self.host.tensors(layer))
            slot.there = self._copies.record_event(torch.cuda.Event(enable_timing=is_timed))
        if begin is not None:
            self._tally.copied(self._sizes[layer], (begin, slot.there))
        if layer in self.host.passing:
            self._leaving = layer, slot.there
        slot.layer = layer

    def _release_host(self) -> None:
        """Wait until the last layer from a file has been copied, and release its buffer in the host's memory."""
        if self._leaving is not None:
            layer, there = self._leaving
            there.synchronize()
            self.host.release(layer)
            self._leaving = None


def copy_layer(into: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Launch the copy of a layer's tensors from the host (`tensors`) to the GPU (`into`), both by name.

    It writes through `.data`, because a parameter's version marks changes of the model.
    """
    for name, tensor in tensors.items():
        into[name].data.copy_(tensor, non_blocking=True)
