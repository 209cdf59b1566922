"""What the programs of one launch do to memory, and which of it nothing puts in order.

Two accesses of one address conflict if one of them writes and they are not both atomic. The launch is right only if
every such pair is ordered, whatever the schedule was:

    two programs            the first publishes (an atomic with release), and the second takes it up afterwards (an
                            atomic with acquire on the same address): "happens before", kept by vector clocks
    threads of one program  a tl.debug_barrier stands between the two

Triton says which thread of a program has an element of a tensor as late as in the compiler. So this is what is known
of threads here, and where it is not known, two accesses count as those of different threads:

    * A single element is stored by the first thread and loaded by all of them. An atomic of a single element is the
      first thread's, too; its result reaches all threads, and what it acquires, all of them have acquired.
    * The elements of a tensor with as many elements as threads, or more, have one thread each. The same place in
      tensors of the same shape and element size has the same thread. Smaller tensors are loaded several times over.
    * A release publishes what the first thread has stored, and of the other threads only what they did before the last
      barrier. So parts that a tensor stores need a barrier before the ticket that announces them.
    * The threads of a single warp follow each other in a program's order.

Volatile loads may meet other programs' atomics, as polls do, and order nothing. Atomics of scope "cta" are atomic
within a program alone.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_NEVER, _ALWAYS = 0, 2**31 - 1  # times
_MANY = -1  # in the place of a thread: several of them, or one that is not known


class Access(Enum):
    """How a program touches memory. The value is what a finding says of it."""

    READ = "reads"
    WRITE = "writes"
    POLL = "polls"
    ATOMIC = "changes atomically"
    LOCAL = "changes atomically within a program"


_WRITES = {Access.WRITE, Access.ATOMIC, Access.LOCAL}


def _conflicts(access: Access, atomic: set[Access]) -> list[Access]:
    """Earlier accesses that need an order before this one, where those in `atomic` need none among themselves."""
    return [
        earlier for earlier in Access
        if (access in _WRITES or earlier in _WRITES) and not (access in atomic and earlier in atomic)
    ]  # fmt: skip


_BETWEEN_PROGRAMS = {access: _conflicts(access, {Access.POLL, Access.ATOMIC}) for access in Access}
_WITHIN_A_PROGRAM = {access: _conflicts(access, {Access.ATOMIC, Access.LOCAL}) for access in Access}


class Touch(NamedTuple):
    """One operation of one program on memory.

    addresses: int64 [n], without those that are masked out
    places:    int64 [n], which elements of the tensor of pointers these are
    size:      elements of that tensor, masked out ones included
    shape:     a number for its shape
    width:     bytes of an element
    line:      a number for the lines of source that the program is in
    """

    access: Access
    addresses: np.ndarray
    places: np.ndarray
    size: int
    shape: int
    width: int
    line: int


class Clock:
    """What a program knows to have happened before, in all programs of a launch.

    Row p is what the threads of program p have done up to some time, row `programs` + p what its first thread stored.
    """

    def __init__(self, program: int, programs: int):
        self.crew, self.lead = program, programs + program  # rows
        self.now, self.barrier = 1, 1  # the program's own time, and that of its last barrier
        self.seen = np.zeros(2 * programs, np.int32)
        self.seen[[self.crew, self.lead]] = _ALWAYS
        self.pending: list[np.ndarray] = []  # what single threads have acquired, which others know from a barrier on

    def pass_barrier(self) -> None:
        self.now += 1
        self.barrier = self.now
        for published in self.pending:
            self.take_up(published)
        self.pending.clear()

    def publish(self, by_lead: bool) -> np.ndarray:
        published = self.seen.copy()
        published[self.crew] = self.barrier - 1
        published[self.lead] = self.now if by_lead else self.barrier - 1
        self.now += 1
        return published

    def take_up(self, published: np.ndarray) -> None:
        own = self.seen[[self.crew, self.lead]]
        np.maximum(self.seen, published, out=self.seen)
        self.seen[[self.crew, self.lead]] = own


class _Log:
    """The last access of a kind of each row of the clocks to each cell: when, by which thread, from which lines."""

    def __init__(self, rows: int, cells: int):
        self.time = np.zeros((rows, cells), np.int32)  # memory that is never touched costs nothing
        self.thread = np.zeros((rows, cells), np.int64)
        self.line = np.zeros((rows, cells), np.int32)


class _Region:
    """The tensors of one allocation, in cells as large as their smallest element."""

    def __init__(self, tensors: Sequence[tuple[str, Tensor]]):
        storage = tensors[0][1].untyped_storage()
        self.begin, self.end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        self.names = " and ".join(dict.fromkeys(name for name, _ in tensors))
        self.cell = min(tensor.element_size() for _, tensor in tensors)
        given = torch.zeros(storage.nbytes() // self.cell, dtype=torch.bool)
        for _, tensor in tensors:
            cells = tensor.element_size() // self.cell
            strides = (*(stride * cells for stride in tensor.stride()), 1)
            given.as_strided((*tensor.shape, cells), strides, tensor.storage_offset() * cells).fill_(True)
        self.given = given.numpy()
        self.logs: dict[Access, _Log] = {}

    def cells(self, addresses: np.ndarray, width: int) -> np.ndarray:
        """[n, c]: the cells of each address's element; those outside the allocation are -1."""
        first = (addresses - self.begin) // self.cell
        cells = first[:, None] + np.arange(max(1, width // self.cell))
        return np.where((cells >= 0) & (cells < len(self.given)), cells, -1)


class ShadowMemory:
    """Watches one launch. `findings` are pairs: what is wrong, and the numbers of the lines in question."""

    def __init__(self, tensors: Sequence[tuple[str, Tensor]], programs: int, threads: int):
        """tensors: all that the launch was given, with their names; threads: of a program."""
        by_storage: dict[int, list[tuple[str, Tensor]]] = {}
        for name, tensor in tensors:
            if tensor.numel():
                by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
        self.regions = [_Region(by_storage[address]) for address in sorted(by_storage)]
        self.begins = np.array([region.begin for region in self.regions], np.int64)
        self.clocks = [Clock(program, programs) for program in range(programs)]
        self.threads = threads
        self.published: dict[int, np.ndarray] = {}  # by address
        self.findings: dict[tuple[str, int, int], None] = {}

    def inside(self, touch: Touch) -> np.ndarray:
        """bool [n]: which addresses belong to a tensor of the launch."""
        inside = np.zeros(len(touch.addresses), bool)
        for region, here in self._by_region(touch.addresses):
            cells = region.cells(touch.addresses[here], touch.width)
            inside[here] = (region.given[cells] & (cells >= 0)).all(-1)
        return inside

    def find_outside(self, touch: Touch, inside: np.ndarray) -> None:
        """Note that some of a touch's addresses are outside, by `inside`."""
        outside = int(touch.addresses[~inside][0])
        before = [region for region in self.regions if region.begin <= outside]
        near = "nowhere"
        if before:
            near = f"{outside - before[-1].begin} bytes behind the beginning of {before[-1].names}"
        self._find(f"{touch.access.value} outside the tensors of the launch, {near}", touch.line)

    def note(self, program: int, touch: Touch) -> None:
        """Compare an access with all before it, and remember it. Its addresses are inside."""
        clock = self.clocks[program]
        single = touch.size == 1
        thread = (touch.shape << 40) + (touch.width << 32) + touch.places
        if single:
            thread = np.zeros_like(touch.places)
        if touch.access in (Access.READ, Access.POLL) and touch.size < self.threads:
            thread = np.full_like(touch.places, _MANY)
        row = clock.lead if single and touch.access in _WRITES else clock.crew
        for region, here in self._by_region(touch.addresses):
            cells = region.cells(touch.addresses[here], touch.width)
            threads = np.broadcast_to(thread[here, None], cells.shape).reshape(-1)
            cells = cells.reshape(-1)
            self._compare(clock, region, cells, threads, touch)
            log = region.logs.get(touch.access)
            if log is None:
                log = region.logs[touch.access] = _Log(2 * len(self.clocks), len(region.given))
            recent = log.time[row, cells] >= clock.barrier
            others = recent & (log.thread[row, cells] != threads)
            log.thread[row, cells] = np.where(others, _MANY, threads)
            log.time[row, cells] = clock.now
            log.line[row, cells] = touch.line

    def _compare(self, clock: Clock, region: _Region, cells: np.ndarray, threads: np.ndarray, touch: Touch) -> None:
        for earlier in _BETWEEN_PROGRAMS[touch.access]:
            if (log := region.logs.get(earlier)) is not None:
                unseen = log.time[:, cells] > clock.seen[:, None]
                if unseen.any():
                    row, place = np.argwhere(unseen)[0]
                    what = f"{touch.access.value} {region.names}, which another program {earlier.value} in no order"
                    self._find(what, touch.line, log.line[row, cells[place]])
        if self.threads <= 32:
            return
        for earlier in _WITHIN_A_PROGRAM[touch.access]:
            if (log := region.logs.get(earlier)) is not None:
                for row in (clock.crew, clock.lead):
                    others = (log.thread[row, cells] != threads) | (threads == _MANY)
                    close = (log.time[row, cells] >= clock.barrier) & others
                    if close.any():
                        how = f"which another thread {earlier.value} with no barrier"
                        self._find(
                            f"{touch.access.value} {region.names}, {how}",
                            touch.line,
                            log.line[row, cells[close.argmax()]],
                        )

    def order(self, program: int, touch: Touch, acquires: bool, releases: bool) -> None:
        """What an atomic acquires and releases; any atomic hands on what was released at its address before."""
        clock, single = self.clocks[program], touch.size == 1
        for address in touch.addresses.tolist() if acquires else ():
            if address in self.published:
                if single:
                    clock.take_up(self.published[address])
                else:
                    clock.pending.append(self.published[address])
        if releases:
            published = clock.publish(single)
            for address in touch.addresses.tolist():
                before = self.published.get(address, published)
                self.published[address] = np.maximum(before, published)

    def store(self, touch: Touch, values: np.ndarray) -> None:
        """What a plain store means beyond its access: it ends what was released at an address before."""
        for address in self.published.keys() & touch.addresses.tolist() if self.published else ():
            del self.published[address]
        order = touch.addresses.argsort(kind="stable")
        again = np.diff(touch.addresses[order]) == 0
        if again.any():
            values = values[order]
            differ = again & (values[1:] != values[:-1]) & ~((values[1:] != values[1:]) & (values[:-1] != values[:-1]))
            if differ.any():
                self._find("writes different values to one address", touch.line)

    def _by_region(self, addresses: np.ndarray):
        """Each region in question, with the addresses at or behind its beginning and before the next one's."""
        which = self.begins.searchsorted(addresses, side="right") - 1
        for index in np.unique(which):
            if index >= 0:
                yield self.regions[index], which == index

    def _find(self, what: str, line: int, other: int | np.integer = -1) -> None:
        self.findings[what, int(line), int(other)] = None
