"""CUDA graphs that are only played: what torch and CUDA do with captures, replays and their memory, on a CPU.

As on a GPU:

- A capture runs nothing. Behind it, memory that was there before holds what it held, and tensors that were made within
  hold garbage until a replay writes them.
- A replay does the noted work without any of our Python, on the same memory, with what that holds by then; pinned
  memory of the host, too. Memory that the capture made and freed is garbage at each beginning. Memory that it did not
  make must still be there, which a GPU would not notice.
- What asks for a value breaks a capture, which then ends with an error.
- A pool is done with once all graphs captured into it are gone, and takes no other one (`create_or_incref_pool` in
  torch's c10/cuda/CUDACachingAllocator.cpp).
- A capture that is broken stays underway for torch's allocator, as before torch 2.13: until that is told, it empties no
  caches and takes no other capture into that pool.
- So it does for torch's allocator of pinned memory, which nobody can tell.
- A thread's first product makes cuBLAS's handle, which a capture cannot do.
- Nor does torch's generator give anybody random numbers behind it, until another capture comes to its end.
- cuBLAS works in memory that torch knows by thread and stream. A capture takes it from its own pool if there is none.
  A graph that goes has torch let go all of it on its stream, as from torch 2.12 on; other graphs still work there.
- A stream that waits for the capturing one becomes a branch of the capture, whose end must wait for it.
- torch has 32 streams of a device and gives them out in turn.
"""

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
STREAMS = 32  # that torch has of a device
ASKING = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten._unique2.default, aten.repeat_interleave.Tensor,
    aten.item.default, aten.is_nonzero.default,  # in inference mode, which does not take them apart
}  # fmt: skip
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.linear.default, aten.matmul.default}


@dataclass(eq=False)
class Scratch:
    """Memory that cuBLAS works in, out of a pool."""

    pool: object


class Pools:
    """What torch's allocator knows of captures: how many graphs share each pool, and what is underway."""

    def __init__(self):
        self.made, self.uses, self.underway = 0, {}, []
        self.underway_on_host = []  # of captures, for the allocator of pinned memory
        self.handles: set[int] = set()  # threads with a handle of cuBLAS
        self.scratches: dict[tuple[int, int], Scratch] = {}  # by thread and stream
        self.random_is_captured = False

    def scratch(self, stream, pool) -> Scratch:
        """What cuBLAS works in for a capture into a pool."""
        return self.scratches.setdefault((threading.get_ident(), stream.cuda_stream), Scratch(pool))

    def forget_scratches(self, stream):
        """What torch does where a graph goes that was captured on a stream."""
        self.scratches = {key: each for key, each in self.scratches.items() if key[1] != stream.cuda_stream}

    def is_there(self, scratch: Scratch) -> bool:
        return self.uses.get(scratch.pool, 0) > 0 or scratch in self.scratches.values()

    def draw(self):
        """A random number of the GPU's generator."""
        if self.random_is_captured:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    def handle(self):
        self.made += 1
        return 0, self.made

    def begin(self, pool):
        if self.uses.get(pool) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp")
        self.uses[pool] = self.uses.get(pool, 0) + 1
        if pool in self.underway:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.underway.append(pool)
        if pool in self.underway_on_host:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id (CachingHostAllocator.h)")
        self.underway_on_host.append(pool)

    def end(self, device, pool):
        """`torch._C._cuda_endAllocateToPool`'s part."""
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, pool):
        self.uses[pool] -= 1

    def empty_cache(self):
        if self.underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp")


class Event:
    """A CUDA event, of a device that has always done what it was given."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.at = 0.0

    def record(self, stream=None):
        self.at = time.perf_counter()

    def synchronize(self):
        refuse_while_capturing()

    def query(self):
        return True

    def wait(self, stream=None):
        pass

    def elapsed_time(self, end):
        return 1e3 * max(end.at - self.at, 1e-9)


class Stream:
    """A CUDA stream that does what it is given at once."""

    made = 0

    def __init__(self, device=None, priority=0, number=None):
        if number is None:
            number, Stream.made = 1 + Stream.made % STREAMS, Stream.made + 1
        self.device, self.cuda_stream = torch.device("cuda", 0), number

    def __eq__(self, other):
        return isinstance(other, Stream) and self.cuda_stream == other.cuda_stream

    def __hash__(self):
        return self.cuda_stream

    def wait_stream(self, stream):
        graph = capturing()
        if graph is not None:
            graph.wait(self, stream)

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        refuse_while_capturing()

    def query(self):
        return True


_of_thread = threading.local()


def current_stream(device=None):
    return getattr(_of_thread, "stream", None) or Stream(number=0)


@contextmanager
def on_stream(stream):
    """`torch.cuda.stream`'s part."""
    before, _of_thread.stream = current_stream(), stream or current_stream()
    try:
        yield
    finally:
        _of_thread.stream = before


@dataclass(frozen=True)
class Place:
    """Where a tensor that a graph uses lies: in which memory, and how."""

    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Place":
        memory = tensor.untyped_storage()._cdata
        return cls(memory, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def within(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor that lies so in a memory."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


class Note(NamedTuple):
    """Work of a graph: a function, its arguments and what it gave, with Places for the tensors of the GPU."""

    function: object
    args: tuple
    kwargs: dict
    out: object

    def places(self) -> list[Place]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs, self.out)) if isinstance(leaf, Place)]


def spoil(storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
    """Overwrite memory by what nobody means."""
    if dtype == torch.bool:
        garbage = True
    else:
        garbage = torch.nan if dtype.is_floating_point or dtype.is_complex else max(-(10**9), torch.iinfo(dtype).min)
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        torch.empty(0, dtype=dtype).set_(storage).fill_(garbage)


class PlayedGraph(TorchDispatchMode):
    """`torch.cuda.CUDAGraph`'s part: notes operations on tensors and kernel launches, and does them in each replay."""

    pools = Pools()
    underway: "PlayedGraph | None" = None
    captures = replays = 0

    def __init__(self, keep_graph=False):
        super().__init__()
        self.pools = PlayedGraph.pools  # of this test; a graph may go in a later one
        self.notes: list[Note] = []
        self.is_captured = self.broken = self.within = False
        self.thread = 0
        self._held: dict[int, torch.UntypedStorage] = {}  # while capturing; so their addresses are theirs alone
        self._made: dict[int, torch.dtype] = {}  # memory that the capture made, and of which type
        self._on_gpu: set[int] = set()
        self._memory: dict[int, StorageWeakRef] = {}  # once captured
        self._scratches: set[Scratch] = set()

    # What a kind of graph knows better: `run`, which launches a kernel, `is_there`, whether a tensor is on the GPU (an
    # operation's own intermediate ones need not be known), and these two.

    def check_copy(self, into: Tensor | None, source: Tensor) -> None:
        """Raise what torch raises for copies between the host and the GPU; None: into a new tensor."""

    def bring(self, tensor: Tensor) -> None:
        """Have a tensor's memory be on the GPU."""

    # torch's interface

    def capture_begin(self, pool=None, capture_error_mode="global"):
        assert PlayedGraph.underway is None, "one capture may be underway in a process"
        self.pool = self.pools.handle() if pool is None else pool
        self.pools.begin(self.pool)
        self.pools.random_is_captured = True
        self.stream, self.thread, self.broken = current_stream(), threading.get_ident(), False
        self.branches: set[Stream] = set()
        PlayedGraph.underway = self
        PlayedGraph.captures += 1
        self.__enter__()

    def capture_end(self):
        self.__exit__(None, None, None)
        PlayedGraph.underway = None
        self._undo()
        if self.branches:
            raise RuntimeError("CUDA error: capturing stream has unjoined work")
        if self.broken:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.pools.end(0, self.pool)
        self.pools.underway_on_host.remove(self.pool)
        self.pools.random_is_captured = False
        self.is_captured = True

    def replay(self):
        assert self.is_captured, "Called CUDAGraph::replay without a preceding successful capture."
        refuse_while_capturing()
        assert all(map(self.pools.is_there, self._scratches)), "a graph's products work in memory that is gone"
        PlayedGraph.replays += 1
        memory: dict[int, torch.UntypedStorage] = {}  # that the graph makes
        with torch.inference_mode():
            for note in self.notes:
                args, kwargs = tree_map_only(Place, lambda place: self._tensor(place, memory), (note.args, note.kwargs))
                out = note.function(*args, **kwargs)
                for place, tensor in zip(tree_leaves(note.out), tree_leaves(out), strict=True):
                    if isinstance(place, Place):
                        self._keep(note, place, tensor, memory)
            for number, storage in memory.items():
                alive = self._storage(number)
                if alive is not None:
                    alive.copy_(storage)

    def reset(self):
        if self.is_captured:
            self.is_captured = False
            self.pools.forget_scratches(self.stream)
            self.pools.release(self.pool)
        self.notes.clear()

    def __del__(self):
        self.reset()

    # Capturing

    def wait(self, stream: Stream, other: Stream) -> None:
        """Have one stream wait for another, which makes it a branch, or ends the other one's branch."""
        if stream == self.stream:
            self.branches.discard(other)
        elif other == self.stream or other in self.branches:
            self.branches.add(stream)

    def refuse(self):
        self.broken = True
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in given:
            self._hold(tensor)
        there = [tensor for tensor in given if self._is_there(tensor)]
        if there and (function in ASKING or _has_mask(function, args)):
            self.refuse()
        if there and function in PRODUCTS:
            if self.thread not in self.pools.handles:
                self.broken = True
                raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
            self._scratches.add(self.pools.scratch(self.stream, self.pool))
        if function is aten.lift_fresh.default:
            self.check_copy(None, args[0])
        elif function is aten.copy_.default:
            self.check_copy(*args[:2])
        noted = self._noted((args, kwargs))
        written = _written(function, args, kwargs) if there else []
        within, self.within = self.within, True
        try:
            if written:
                out = written[0] if len(written) == 1 else tuple(written)
            else:
                out = _computed(function, args, kwargs) if there else function(*args, **kwargs)
        finally:
            self.within = within
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and self._hold(tensor):
                number = tensor.untyped_storage()._cdata
                self._made[number] = tensor.dtype
                if there:
                    self._on_gpu.add(number)
                if _is_unwritten(function):
                    tensor.zero_()  # so that it may be an index, though nothing is computed
        self.notes.append(Note(function, *noted, self._noted(out)))
        return out

    def launch(self, executor, *args, **kwargs):
        """Note a kernel's launch; one within an operation is noted with that."""
        if not self.within:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor):
                    self._hold(tensor)
            self.notes.append(Note(self.run, (executor, *self._noted(args)), self._noted(kwargs), None))

    def _hold(self, tensor: Tensor) -> bool:
        """Keep a tensor's memory until the capture ends; whether it is new."""
        storage = tensor.untyped_storage()
        is_new = storage._cdata not in self._held
        self._held[storage._cdata] = storage
        return is_new

    def _is_there(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._on_gpu or self.is_there(tensor)

    def _noted(self, values):
        """The values, with Places for tensors; but numbers of the host are taken as they are now."""

        def place(tensor):
            is_number = tensor.dim() == 0 and not self._is_there(tensor)
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                return tensor.clone() if is_number else Place.of(tensor)

        return tree_map_only(Tensor, place, values)

    def _undo(self) -> None:
        """Leave the memory as a real capture leaves it, and hold no more of it."""
        places = {place.memory: place for note in self.notes for place in note.places()}
        for number, place in places.items():
            if self._is_there(place.within(self._held[number])):
                self._on_gpu.add(number)
        for number in self._on_gpu & self._made.keys():
            spoil(self._held[number], self._made[number])
        # What only the host does, it has done.
        self.notes = [note for note in self.notes if any(place.memory in self._on_gpu for place in note.places())]
        self._memory = {number: StorageWeakRef(self._held[number]) for number in places}
        self._held.clear()

    # Replaying

    def _storage(self, number: int) -> torch.UntypedStorage | None:
        """The memory that the capture saw under a number; None once it is gone."""
        reference = self._memory[number]
        return None if reference.expired() else torch.UntypedStorage._new_with_weak_ptr(reference.cdata)

    def _tensor(self, place: Place, memory: dict[int, torch.UntypedStorage]) -> Tensor:
        if place.memory in memory:
            return place.within(memory[place.memory])
        storage = self._storage(place.memory)
        assert place.memory not in self._made, "a graph reads memory that it has not written"
        assert storage is not None, f"a graph uses memory that is gone since it was captured: {place}"
        return place.within(storage)

    def _keep(self, note: Note, place: Place, tensor: Tensor, memory: dict[int, torch.UntypedStorage]) -> None:
        """Keep what a work of a replay has made."""
        assert Place.of(tensor).shape == place.shape, f"{note.function} gives another shape"
        if place.memory in self._made and place.memory not in memory:
            assert Place.of(tensor).stride == place.stride, f"{note.function} gives other strides"
            memory[place.memory] = tensor.untyped_storage()
            if place.memory in self._on_gpu:
                self.bring(tensor)
            if _is_empty(note.function):
                spoil(memory[place.memory], place.dtype)


def capturing() -> PlayedGraph | None:
    """The graph that this thread captures."""
    graph = PlayedGraph.underway
    return graph if graph is not None and graph.thread == threading.get_ident() else None


def refuse_while_capturing() -> None:
    graph = capturing()
    if graph is not None:
        graph.refuse()


def _has_mask(function, args) -> bool:
    """Whether an index is a mask, whose number of places the host has to know."""
    if function not in (aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten.index_put_.default):
        return False
    return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1])


def _written(function, args, kwargs) -> list:
    """What an operation changes, if it gives nothing else: in a capture it need not run."""
    schema = function._schema
    if torch.Tag.inplace_view in function.tags or not all(map(_is_changed, schema.returns)):
        return []
    arguments = enumerate(schema.arguments)
    given = [args[at] if at < len(args) else kwargs.get(one.name) for at, one in arguments if _is_changed(one)]
    return given if len(given) == len(schema.returns) else []


def _is_changed(argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _computed(function, args, kwargs):
    """What an operation gives in a capture, where indices and lengths may be anything: what gives them has not run."""
    try:
        return function(*args, **kwargs)
    except (IndexError, RuntimeError, ValueError):
        valid = tree_map_only(Tensor, lambda one: one if one.is_floating_point() else torch.zeros_like(one), args)
        return function(*valid, **kwargs)


def _is_empty(function) -> bool:
    """Whether an operation leaves the memory that it gives as it finds it."""
    return function.name().startswith(("aten::empty", "aten::new_empty"))


def _is_unwritten(function) -> bool:
    """The same in a capture, where the kernels of an operation of ours do not run."""
    return _is_empty(function) or not function.name().startswith("aten::")
