"""Which of the works that a program gives a GPU may run at the same time: found out by vector clocks, without a GPU.

`played()` puts streams, events and graphs that only write down what they are given in the place of torch's. `check`
then goes through what was written, and raises RaceError for the first two that touch the same memory, one of them
writing, with nothing that puts them in order; for a layer that computes with another one's weights; and for what CUDA
refuses in a capture. Each stream has a clock, and knows of the others' what its waits have told it (Fidge 1988, Mattern
1989); the host has one, too, which its synchronisations tell.

What is written: works are launched on a stream, in the order of the program, which is one of the orders that may be. A
graph is a part of the writing that is gone through when it is replayed, on streams of its own, which begin with what
the stream knows that it is launched on.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

import torch

from heavypath.speculative.streaming.file import WeightFile

HOST, ANY = "host", "any"  # content of memory that is not known


class RaceError(AssertionError):
    """Two works may run at the same time, or what CUDA does not allow."""


class Entry(NamedTuple):
    """What was written: `kind` is launch, record, wait, synchronize, write (by the host), begin, end or replay.

    stream: that it was given to, HOST for the host; graph: that is replayed, begun or ended
    mark:   of an event's record: each record of an event is one of its own
    reads, writes: what memory a work touches, with whose content
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
        if event.mark is not None:
            self.order.note("wait", self.name, mark=event.mark)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def synchronize(self):
        self.record_event().synchronize()


class Event:
    """A CUDA event; waits mean its last record."""

    def __init__(self, order: "Order", enable_timing=False):
        self.order, self.mark = order, None

    def record(self, stream=None):
        self.mark = self.order.new_mark()
        self.order.note("record", (stream or self.order.current()).name, mark=self.mark)

    def synchronize(self):
        if self.mark is not None:
            self.order.note("synchronize", HOST, mark=self.mark)

    def query(self):
        return True

    def elapsed_time(self, end):
        return 1.0


@dataclass(eq=False)
class Order:
    """All that was written, and the streams and graphs that were made."""

    entries: list[Entry] = field(default_factory=list)
    made: int = 0
    marks: int = 0
    graphs: int = 0
    pinned: dict[int, int] = field(default_factory=dict)

    def __post_init__(self):
        self._lock = threading.Lock()
        self._of_thread = threading.local()
        self._first = Stream(self, "first")
        self._capturing: int | None = None  # the thread

    def note(self, kind, stream, **facts):
        with self._lock:
            self.entries.append(Entry(kind, stream, thread=threading.get_ident(), **facts))

    def new_mark(self):
        with self._lock:
            self.marks += 1
            return self.marks

    def new_stream(self, device=None):
        self.made += 1
        return Stream(self, f"stream {self.made}")

    def current(self, device=None):
        return getattr(self._of_thread, "stream", self._first)

    @contextmanager
    def on(self, stream):
        before = self.current()
        self._of_thread.stream = stream
        try:
            yield
        finally:
            self._of_thread.stream = before

    def is_capturing(self):
        return self._capturing == threading.get_ident()

    def launch(self, reads=(), writes=()):
        self.note("launch", self.current().name, reads=tuple(reads), writes=tuple(writes))

    def host_writes(self, *memory):
        self.note("write", HOST, writes=tuple((each, ANY) for each in memory))

    @contextmanager
    def capture(self, stream) -> Iterator[int]:
        """Capture what the block gives a stream; the number of the graph."""
        self.graphs += 1
        graph, self._capturing = self.graphs, threading.get_ident()
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
        begins = (max(begin for begin in pinned if begin <= one.data_ptr()) for one in tensors.values())
        return [("pinned", begin) for begin in sorted({*begins})]

    def copied(into, tensors):
        layer = views[id(into)]
        order.launch([(place, layer) for place in places(tensors)], [(slot_of(stream, layer), layer)])
        copy(into, tensors)

    def released(layer):
        order.launch([(slot_of(stream, layer), layer)])  # what was launched since the layer was taken
        release(layer)

    def read(file, into, begin):
        order.host_writes(*places({"piece": torch.frombuffer(into, dtype=torch.uint8)}))
        WeightFile.read(file, into, begin)

    stream.copy, stream.release = copied, released
    if stream.host.passing:
        stream.host.reader.slots.read = read


def slot_of(stream, layer):
    """What a layer's place on the GPU is called."""
    return "slot", next(iter(stream.tensors(layer).values())).data_ptr()


Clock = dict[str, int]  # of a stream, what it knows: how many works of each stream have been done before


@dataclass
class _Touch:
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
        self.effective: set[int] = set()  # marks of records that a wait told something of

    def learn(self, who: str, clock: Clock) -> bool:
        mine, news = self.clocks[who], False
        for stream, number in clock.items():
            if number > mine.get(stream, 0):
                mine[stream], news = number, True
        return news

    def work(self, entry: Entry, stream: str) -> None:
        """A work on a stream, or of the host."""
        if stream != HOST:
            self.learn(stream, self.clocks[HOST])  # it is launched behind what the host has waited for
        number = self.clocks[stream].get(stream, 0) + 1
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
        self.clocks[stream][stream] = number

    def behind(self, stream: str, touch: _Touch, what: str) -> None:
        if self.clocks[stream].get(touch.stream, 0) < touch.number:
            raise RaceError(f"{stream} {what} while {touch.stream} may still use it for layer {touch.content}")

    def wait(self, entry: Entry, who: str, mark: object) -> None:
        if self.learn(who, self.marks.get(mark, {})):
            self.effective.add(id(entry))

    def replay(self, graph: list[Entry], stream: str, number: int) -> None:
        own = {entry.stream: f"{entry.stream} of replay {number}" for entry in graph}
        self.learn(stream, self.clocks[HOST])
        for name in own.values():
            self.learn(name, self.clocks[stream])
        for entry in graph:
            name = own[entry.stream]
            if entry.kind == "launch":
                self.work(entry, name)
            elif entry.kind == "record":
                self.marks[number, entry.mark] = dict(self.clocks[name])
            elif entry.kind == "wait":
                self.wait(entry, name, (number, entry.mark))
        for name in own.values():
            self.learn(stream, self.clocks[name])


def check(entries: list[Entry]) -> list[int]:
    """Go through what was written; the numbers of the waits that told something. Raises RaceError."""
    checker, graphs = _Checker(), _graphs(entries)
    captured = {id(entry) for graph in graphs.values() for entry in graph}
    for number, entry in enumerate(entries):
        if id(entry) in captured or entry.kind in ("begin", "end"):
            continue
        if entry.kind == "replay":
            checker.replay(graphs[entry.graph], entry.stream, number)
        elif entry.kind in ("launch", "write"):
            checker.work(entry, entry.stream)
        elif entry.kind == "record":
            checker.marks[entry.mark] = dict(checker.clocks[entry.stream])
        else:
            checker.wait(entry, entry.stream, entry.mark)
    return [number for number, entry in enumerate(entries) if id(entry) in checker.effective]


def _graphs(entries: list[Entry]) -> dict[int, list[Entry]]:
    """What each graph has captured. Raises RaceError for what CUDA refuses."""
    graphs: dict[int, list[Entry]] = {}
    within: dict[int, int] = {}  # records by the graph that they were captured in
    graph, origin, forked, open_, known = 0, "", {""}, {}, {}
    for entry in entries:
        if entry.kind == "begin":
            graph, origin, thread = entry.graph, entry.stream, entry.thread
            graphs[graph], forked, open_, known = [], {origin}, {}, {}
        elif entry.kind == "end":
            lost = {stream for stream in forked - {origin} if open_.get(stream, 0) > known[origin].get(stream, 0)}
            if lost:
                raise RaceError(f"{', '.join(lost)} is not joined at the end of a capture (CUDA error 904)")
            graph = 0
        elif graph and entry.thread == thread:
            if entry.kind in ("synchronize", "replay"):
                raise RaceError(f"{entry.kind} within a capture (CUDA error 900)")
            if entry.kind == "wait":
                inside = within.get(entry.mark) == graph
                if inside:
                    forked.add(entry.stream)
                elif entry.stream in forked:
                    raise RaceError(f"{entry.stream} waits in a capture for an event of before (CUDA error 905)")
            if entry.stream not in forked and entry.stream != HOST:
                if entry.kind == "launch":
                    raise RaceError(f"{entry.stream} is no part of the capture that it is given work in")
                continue
            clock = known.setdefault(entry.stream, {})
            if entry.kind == "launch":
                clock[entry.stream] = open_[entry.stream] = open_.get(entry.stream, 0) + 1
            elif entry.kind == "record":
                within[entry.mark] = graph
                known[entry.mark] = dict(clock)
            elif entry.kind == "wait":
                for stream, number in known.get(entry.mark, {}).items():
                    clock[stream] = max(number, clock.get(stream, 0))
            graphs[graph].append(entry)
        elif entry.kind in ("wait", "synchronize") and entry.mark in within:
            raise RaceError(f"{entry.stream} waits for an event of a capture (CUDA error 907)")
    return graphs


def unneeded(entries: list[Entry]) -> list[Entry]:
    """The waits that tell something, and without which nothing would be wrong all the same."""
    found = []
    for number in check(entries):
        try:
            check(entries[:number] + entries[number + 1 :])
        except RaceError:
            continue
        found.append(entries[number])
    return found
