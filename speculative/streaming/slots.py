"""Buffers for streamed layers: which layer is in which buffer (slot), and what is read next.

Resident layers have memory of their own and stay. The others pass through a few slots in turn: streamed layer number j
always uses slot j mod S, so that addresses never change. A pass takes each layer and releases it. While one is held,
other slots are filled, in this order of priority:

    1. layers that a thread waits for, in the order of the requests
    2. the streamed layers after the one taken last, in a circle: after the last comes the first of the next pass
    3. resident layers, once

There is no other state. If a pass takes another layer than the expected one, for example after an aborted pass, it
waits for that layer, and reading continues from there. A slot is given to another layer only if nobody holds its layer
and no read into it is running. A layer can be taken when it has been read completely and without an error.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple

from torch import Tensor

from heavypath.speculative.models.layer_weights import StreamCounts
from heavypath.speculative.streaming.file import WeightFile
from heavypath.speculative.streaming.holds import LOOK_AGAIN, Hold
from heavypath.speculative.streaming.layout import Chunk, Layout, aligned_memory

Read = Callable[[WeightFile, memoryview, int], None]  # fill memory with bytes of a file from an offset on


@dataclass(eq=False)
class _Slot:
    """Memory for one layer at a time, and the state of reading into it.

    memory, bytes: the memory as a tensor uint8 [any], and as a memoryview
    layer:   the layer that is in it, or is being read into it; None for nothing
    turn:    how many times it has been given to a layer; reads of earlier turns are ignored
    left:    how many chunks of the layer have not been read yet
    running: how many reads into it are running
    error:   the first error of a read in this turn
    """

    memory: Tensor
    bytes: memoryview
    layer: int | None = None
    turn: int = 0
    left: int = 0
    running: int = 0
    error: BaseException | None = None


class Job(NamedTuple):
    """One chunk of a layer to be read into a slot.

    turn: the slot's turn when the read was queued; it is ignored if the slot has another turn by then
    """

    slot: _Slot
    turn: int
    chunk: Chunk


@dataclass(eq=False)
class _Tally:
    bytes_read: int = 0
    reading: float = 0.0
    waiting: float = 0.0
    running: int = 0  # reads under way
    since: float = 0.0  # when the first of them began


@dataclass(eq=False)
class LayerSlots:
    """The memory into which layers are read, and the queue of reads that fill it.

    layouts:  the layout of each layer
    resident: the numbers of the layers that stay in memory; each has its own slot
    count:    the number of slots that all other layers share, in turn

    jobs:  the queue of reads. Threads take from it and call `do`; None ends a thread
    read:  reads bytes of a file into memory; tests and benchmarks replace it
    files: the open files by path; memories: the memory of all slots; nbytes: the size of all slots
    """

    layouts: Sequence[Layout]
    resident: Collection[int]
    count: int
    jobs: "SimpleQueue[Job | None]" = field(default_factory=SimpleQueue)
    read: Read = WeightFile.read
    closed: bool = False

    def __post_init__(self) -> None:
        streamed = [index for index in range(len(self.layouts)) if index not in self.resident]
        self._order = {index: order for order, index in enumerate(streamed)}
        self._streamed = streamed
        size = max((self.layouts[index].nbytes for index in streamed), default=0)
        shared = [_Slot(*aligned_memory(size)) for _ in range(min(self.count, len(streamed)))]
        own = {index: _Slot(*aligned_memory(self.layouts[index].nbytes)) for index in sorted({*self.resident})}
        self._slot_of = [
            own[index] if index in own else shared[self._order[index] % len(shared)]
            for index in range(len(self.layouts))
        ]
        self.files = {place.path: WeightFile(place.path) for layout in self.layouts for place in layout.source.values()}
        self.memories = [slot.memory for slot in [*shared, *own.values()]]
        self.nbytes = sum(memory.nbytes for memory in self.memories)
        self._lock = threading.RLock()  # used directly: Ctrl-C within Condition.__enter__ would leave it locked
        self._changed = threading.Condition(self._lock)
        self._position = 0  # the streamed layer that is expected to be taken next, by its order
        self._asked: dict[threading.Thread, int] = {}  # layers that threads wait for; a thread waits for one at a time
        self._held: dict[threading.Thread, Hold] = {}  # by whom; a thread holds one layer at a time
        self._tally = _Tally()
        with self._lock:
            self._fill()

    def tensors(self, layer: int) -> dict[str, Tensor]:
        """A layer's tensors by name, views of its slot. They hold its weights while the layer is taken."""
        return self.layouts[layer].tensors(self._slot_of[layer].memory)

    def take(self, layer: int) -> None:
        """Block until a layer is in memory, and keep it there for this thread, until `release` or the next `take`.

        Raises OSError, with layer and reason, if it cannot be read, and RuntimeError after `close`.
        """
        slot = self._slot_of[layer]
        hold = Hold.of_this_call(layer)
        thread = hold.thread
        begin: float | None = None
        with self._lock:
            try:
                self._held.pop(thread, None)  # of a pass that was interrupted
                self._asked[thread] = layer
                if slot.layer == layer and slot.error is not None and not slot.running:
                    slot.layer = None  # reading ahead failed; try again, now that the layer is needed
                while not self._is_there(slot, layer):
                    begin = time.perf_counter() if begin is None else begin
                    self._fill()
                    self._changed.wait(LOOK_AGAIN)
                if layer in self._order:
                    self._held[thread] = hold
                    self._position = self._order[layer]
            finally:
                self._asked.pop(thread, None)
                if begin is not None:
                    self._tally.waiting += time.perf_counter() - begin
            self._fill()

    def _is_there(self, slot: _Slot, layer: int) -> bool:
        """Whether a layer has been read; raises the error if it could not be."""
        if self.closed:
            raise RuntimeError("the stream of this model's weights is closed; load the model anew")
        if slot.layer != layer or slot.running:
            return False
        if slot.error is not None:
            error = slot.error
            slot.layer = None
            raise OSError(f"layer {layer} of the model cannot be read: {error}") from error
        return slot.left == 0

    def release(self, layer: int) -> None:
        """Allow the slot of a layer that this thread took to be filled with another layer."""
        with self._lock:
            hold = self._held.get(threading.current_thread())
            if hold is not None and hold.layer == layer:
                del self._held[hold.thread]
                self._position = (self._order[layer] + 1) % len(self._streamed)
                self._fill()
                self._changed.notify_all()

    def let_go(self) -> None:
        """Release the layer that this thread took and has not released, if there is one."""
        with self._lock:
            if self._held.pop(threading.current_thread(), None) is not None:
                self._fill()
                self._changed.notify_all()

    def _wanted(self) -> Iterator[int]:
        """The numbers of layers to have in memory, the most urgent first; more than there are slots for."""
        yield from self._asked.values()
        yield from (self._streamed[(self._position + ahead) % len(self._streamed)] for ahead in range(len(self._order)))
        yield from self.resident

    def _fill(self) -> None:
        """Queue reads of wanted layers into free slots."""
        if self.closed:
            return
        for hold in [hold for hold in self._held.values() if hold.is_over]:
            del self._held[hold.thread]
        for thread in [thread for thread in self._asked if not thread.is_alive()]:
            del self._asked[thread]
        held = {id(self._slot_of[hold.layer]) for hold in self._held.values()}
        claimed: set[int] = set()
        for layer in self._wanted():
            slot = self._slot_of[layer]
            if id(slot) in claimed:
                continue
            claimed.add(id(slot))
            if slot.layer != layer and not slot.running and id(slot) not in held:
                # The order is safe if Ctrl-C interrupts anywhere: the slot is empty then, or the jobs are ignored.
                chunks = [*self.layouts[layer].chunks()]
                for chunk in chunks:
                    self.jobs.put(Job(slot, slot.turn + 1, chunk))
                slot.layer = None
                slot.turn += 1
                slot.left = len(chunks)
                slot.error = None
                slot.layer = layer

    def do(self, job: Job) -> None:
        """Do one read, unless its slot has been given to another layer, a read into it failed, or all is closed.

        An error is kept in the slot, and raised by `take`.
        """
        slot = job.slot
        file = self.files[job.chunk.path]
        tally = self._tally
        with self._lock:
            if slot.turn != job.turn or slot.error is not None or self.closed:
                return
            slot.running += 1
            tally.since = time.perf_counter() if tally.running == 0 else tally.since
            tally.running += 1
        error: BaseException | None = None
        try:
            file.check()
            self.read(file, slot.bytes[job.chunk.offset : job.chunk.offset + job.chunk.length], job.chunk.begin)
        except BaseException as raised:
            error = raised
        with self._lock:
            slot.running -= 1
            slot.left -= 1
            slot.error = slot.error or error
            tally.running -= 1
            if tally.running == 0:
                tally.reading += time.perf_counter() - tally.since
            tally.bytes_read += job.chunk.length if error is None else 0
            if slot.left == 0 or slot.error is not None:
                self._fill()
                self._changed.notify_all()

    def counts(self) -> StreamCounts:
        """Bytes read so far, seconds in which any read was running, and seconds that threads waited in `take`."""
        with self._lock:
            tally = self._tally
            now = time.perf_counter() - tally.since if tally.running else 0.0
            return StreamCounts(tally.bytes_read, tally.reading + now, tally.waiting)

    def close(self) -> None:
        """Make all waiting and later calls of `take` raise RuntimeError."""
        with self._lock:
            self.closed = True
            self._changed.notify_all()
