"""Which of the works that a program gives a GPU may run at the same time: found out by vector clocks, without a GPU.

`played()` puts streams, events and graphs that only write down what they are given in the place of torch's. `check`
then goes through what was written, and raises RaceError for the first two works that touch the same memory, one of them
writing, with nothing that puts them in order; for a layer that computes with another one's weights; and for what CUDA
refuses in a capture. Each stream has a clock, and knows of the others' what its waits have told it (Fidge 1988, Mattern
1989); so does the host, which is one more stream: its works are what it writes, its waits are synchronisations.

A work is launched in the order of the program, which is one of the orders that may be. A graph is gone through when it
is replayed, on streams of its own, which begin with what the stream knows that it is launched on.
"""

import threading
from collections import defaultdict
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import NamedTuple

import torch

from heavypath.speculative.streaming.file import WeightFile

HOST, ANY = "host", "any"  # content of memory that is not known


class RaceError(AssertionError):
    """Two works may run at the same time, or what CUDA does not allow."""


class Entry(NamedTuple):
    """What was written: `kind` is launch, record, wait, begin, end or replay.

    stream: that it was given to
    mark:   of an event's record: each record of an event is one of its own
    reads, writes: what memory a work touches, with whose content
    graph:  that is replayed, begun or ended
    """

    kind: str
    stream: str
    mark: int = 0
    reads: tuple = ()
    writes: tuple = ()
    graph: int = 0
    thread: int = 0


class Stream:
    """A CUDA stream that writes down what it is given."""

    def __init__(self, order: "Order", name: str):
        self.order, self.name, self.device = order, name, torch.device("cpu")

    def record_event(self, event=None):
        event = event or Event(self.order)
        event.record(self)
        return event

    def wait_event(self, event):
        if event.mark:
            self.order.note("wait", self.name, mark=event.mark)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())


class Event:
    """A CUDA event; waits mean its last record."""

    def __init__(self, order: "Order"):
        self.order, self.mark = order, 0

    def record(self, stream=None):
        self.mark = next(self.order.marks)
        self.order.note("record", (stream or self.order.current()).name, mark=self.mark)

    def synchronize(self):
        self.order.host.wait_event(self)

    def query(self):
        return True

    def elapsed_time(self, end):
        return 1.0


class Order:
    """All that was written, and the streams and graphs that were made."""

    def __init__(self):
        self.entries: list[Entry] = []
        self.marks, self._names, self._graphs = count(1), count(1), count(1)
        self.pinned: dict[int, int] = {}
        self.host, self._first = Stream(self, HOST), Stream(self, "first")
        self._of_thread = threading.local()
        self._capturing: int | None = None  # the thread

    def note(self, kind, stream, **facts):
        self.entries.append(Entry(kind, stream, thread=threading.get_ident(), **facts))

    def new_stream(self, device=None):
        return Stream(self, f"stream {next(self._names)}")

    def current(self, device=None):
        return getattr(self._of_thread, "stream", self._first)

    @contextmanager
    def on(self, stream):
        before, self._of_thread.stream = self.current(), stream
        try:
            yield
        finally:
            self._of_thread.stream = before

    def is_capturing(self):
        return self._capturing == threading.get_ident()

    def launch(self, reads=(), writes=()):
        self.note("launch", self.current().name, reads=tuple(reads), writes=tuple(writes))

    def host_writes(self, *memory):
        self.note("launch", HOST, writes=tuple((each, ANY) for each in memory))

    @contextmanager
    def capture(self, stream):
        """Capture what the block gives a stream; the number of the graph."""
        graph, self._capturing = next(self._graphs), threading.get_ident()
        with self.on(stream):
            self.note("begin", stream.name, graph=graph)
            try:
                yield graph
            finally:
                self.note("end", stream.name, graph=graph)
                self._capturing = None

    def replay(self, graph):
        self.note("replay", self.current().name, graph=graph)

    def register(self, begin, nbytes, flags):
        self.pinned[begin] = nbytes
        return 0

    def unregister(self, begin):
        self.pinned.pop(begin)
        self.host_writes(("pinned", begin))  # whoever gets this memory next may write
        return 0


@contextmanager
def played(monkeypatch):
    """torch.cuda as of a machine whose GPU only has its works written down; tensors of its are the CPU's."""
    order = Order()
    runtime = SimpleNamespace(cudaHostRegister=order.register, cudaHostUnregister=order.unregister)
    parts = {
        "Stream": order.new_stream, "Event": lambda enable_timing=False: Event(order), "current_stream": order.current,
        "stream": order.on, "is_current_stream_capturing": order.is_capturing, "cudart": lambda: runtime,
        "mem_get_info": lambda device=None: (80 << 30, 80 << 30), "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
    }  # fmt: skip
    with monkeypatch.context() as patched:
        for name, part in parts.items():
            patched.setattr(torch.cuda, name, part)
        yield order


def observe(order: Order, stream) -> None:
    """Have copies of a DeviceStream, what computes with its layers, and what fills the host's memory be written."""
    copy, release = stream.copy, stream.release
    views = {id(stream.tensors(layer)): layer for layer in range(stream.layers)}
    pinned = sorted(order.pinned)
    for slot in {slot_of(stream, layer) for layer in range(stream.layers)}:
        order.entries.insert(0, Entry("launch", "first", writes=((slot, None),)))  # by who had this memory before

    def places(tensors):
        """The pinned memory that tensors lie in."""
        begins = {max(begin for begin in pinned if begin <= one.data_ptr()) for one in tensors}
        return [("pinned", begin) for begin in sorted(begins)]

    def copied(into, tensors):
        layer = views[id(into)]
        order.launch([(place, layer) for place in places(tensors.values())], [(slot_of(stream, layer), layer)])
        copy(into, tensors)

    def released(layer):
        order.launch([(slot_of(stream, layer), layer)])  # what was launched since the layer was taken
        release(layer)

    def read(file, into, begin):
        order.host_writes(*places([torch.frombuffer(into, dtype=torch.uint8)]))
        WeightFile.read(file, into, begin)

    stream.copy, stream.release = copied, released
    if stream.host.passing:
        stream.host.reader.slots.read = read


def slot_of(stream, layer):
    """What a layer's place on the GPU is called."""
    return "slot", next(iter(stream.tensors(layer).values())).data_ptr()


Clock = dict[str, int]  # how many works of each stream are known to be done


def learn(mine: Clock, told: Clock) -> bool:
    """Add what another clock knows; whether some of it was new."""
    news = {stream: number for stream, number in told.items() if number > mine.get(stream, 0)}
    mine.update(news)
    return bool(news)


class _Touch(NamedTuple):
    """An access to memory: by which work of which stream, and of what content."""

    stream: str
    number: int
    content: object


class _Checker:
    """The state while one goes through what was written."""

    def __init__(self):
        self.clocks: dict[str, Clock] = defaultdict(dict)
        self.marks: dict[object, Clock] = {}
        self.wrote: dict[object, _Touch] = {}
        self.has_read: dict[object, list[_Touch]] = defaultdict(list)
        self.effective: set[int] = set()  # ids of waits that told something

    def do(self, entry: Entry, stream: str, mark: object) -> None:
        if entry.kind == "launch":
            self.launch(entry, stream)
        elif entry.kind == "record":
            self.marks[mark] = dict(self.clocks[stream])
        elif learn(self.clocks[stream], self.marks.get(mark, {})):
            self.effective.add(id(entry))

    def launch(self, entry: Entry, stream: str) -> None:
        clock = self.clocks[stream]
        learn(clock, self.clocks[HOST])  # it is launched behind what the host has waited for
        number = clock.get(stream, 0) + 1
        for memory, content in entry.reads:
            last = self.wrote.get(memory)
            if last is not None:
                self.behind(stream, last, f"reads {memory}")
                if last.content not in (content, ANY):
                    raise RaceError(f"{stream} reads layer {content} from {memory}, which has layer {last.content}")
            self.has_read[memory].append(_Touch(stream, number, content))
        for memory, content in entry.writes:
            for touch in [*self.has_read.pop(memory, []), *filter(None, [self.wrote.get(memory)])]:
                self.behind(stream, touch, f"writes layer {content} into {memory}")
            self.wrote[memory] = _Touch(stream, number, content)
        clock[stream] = number

    def behind(self, stream: str, touch: _Touch, what: str) -> None:
        if self.clocks[stream].get(touch.stream, 0) < touch.number:
            raise RaceError(f"{stream} {what} while {touch.stream} may still use it for layer {touch.content}")

    def replay(self, graph: list[Entry], stream: str, number: int) -> None:
        own = {entry.stream: f"{entry.stream} of replay {number}" for entry in graph}
        learn(self.clocks[stream], self.clocks[HOST])
        for name in own.values():
            learn(self.clocks[name], self.clocks[stream])
        for entry in graph:
            self.do(entry, own[entry.stream], (number, entry.mark))
        for name in own.values():
            learn(self.clocks[stream], self.clocks[name])


class _Capture:
    """What a graph captures, and the rules of CUDA for it: the streams of it have clocks that begin with it."""

    def __init__(self, begin: Entry):
        self.origin, self.thread, self.entries = begin.stream, begin.thread, []
        self.clocks: dict[str, Clock] = {begin.stream: {}}
        self.marks: dict[int, Clock] = {}

    def takes(self, entry: Entry) -> bool:
        """Whether an entry becomes a part of the graph. Raises RaceError for what CUDA refuses."""
        if entry.thread != self.thread or (entry.stream, entry.kind) == (HOST, "launch"):
            return False
        if entry.stream == HOST or entry.kind == "replay":
            raise RaceError(f"{entry.stream} does {entry.kind} within a capture (CUDA error 900)")
        told = self.marks.get(entry.mark)
        clock = self.clocks.get(entry.stream)
        if clock is None and entry.kind == "wait" and told is not None:
            clock = self.clocks[entry.stream] = {}
        if clock is None:
            if entry.kind == "launch":
                raise RaceError(f"{entry.stream} is no part of the capture that it is given work in")
            return False
        if entry.kind == "launch":
            clock[entry.stream] = clock.get(entry.stream, 0) + 1
        elif entry.kind == "record":
            self.marks[entry.mark] = dict(clock)
        elif told is None:
            raise RaceError(f"{entry.stream} waits in a capture for an event of before (CUDA error 905)")
        else:
            learn(clock, told)
        self.entries.append(entry)
        return True

    def end(self) -> None:
        joined = self.clocks[self.origin]
        lost = [stream for stream, clock in self.clocks.items() if clock.get(stream, 0) > joined.get(stream, 0)]
        if lost:
            raise RaceError(f"{', '.join(lost)} is not joined at the end of a capture (CUDA error 904)")


def check(entries: list[Entry]) -> list[int]:
    """Go through what was written; the numbers of the waits that told something. Raises RaceError."""
    checker, graphs, capture = _Checker(), {}, None
    for number, entry in enumerate(entries):
        if entry.kind == "begin":
            capture = graphs[entry.graph] = _Capture(entry)
        elif entry.kind == "end":
            capture.end()
            capture = None
        elif capture is not None and capture.takes(entry):
            continue
        elif entry.kind == "replay":
            checker.replay(graphs[entry.graph].entries, entry.stream, number)
        elif entry.kind == "wait" and any(entry.mark in graph.marks for graph in graphs.values()):
            raise RaceError(f"{entry.stream} waits for an event of a capture (CUDA error 907)")
        else:
            checker.do(entry, entry.stream, entry.mark)
    return [number for number, entry in enumerate(entries) if id(entry) in checker.effective]


def unneeded(entries: list[Entry]) -> list[Entry]:
    """The waits that tell something, and without which nothing would be wrong all the same."""
    found = []
    for number in check(entries):
        try:
            check(entries[:number] + entries[number + 1 :])
            found.append(entries[number])
        except RaceError:
            continue
    return found
