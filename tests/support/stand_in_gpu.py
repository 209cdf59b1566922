"""A machine with a GPU, played on one without: so that no test and no benchmark fails for being on a GPU machine.

    PYTHONPATH=tests/support python -m pytest -p stand_in_gpu       # the tests; subprocesses that they start see no GPU
    PYTHONPATH=tests/support:tests/support/stand_in bash bench/gpu.sh OUT   # every Python that is started

What is played: torch.cuda says that there is one GPU. A tensor is on it if its memory was asked for there, or comes
from what is there; it says so (`device`, `is_cuda`), is copied by `.to`, `.cuda` and `.cpu`, and may neither become a
NumPy array nor meet a CPU tensor in an operation. A kernel that is given a CPU tensor is refused, as Triton does it.
CUDA graphs, and what torch refuses around them, are those of played_graphs.py. TRITON_INTERPRET is not set, for who
looks.

What is not: kernels run in Triton's interpreter, with the constants that it needs (INTERPRETED, UPCAST), or else as PTX
(ptx/plugin.py); nothing is asynchronous, streams and events are empty; what torch.compile makes knows of no GPU; memory
has no limits, and the allocator counts nothing but graphs; gradients forget where they are; the numbers are those of a
CPU. So it says nothing of compilers, races, rounding or speed. A test that launches kernels for longer than LONGEST is
broken off and counts as skipped: decoding with the shipped pair takes minutes here.
"""

import inspect
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import SimpleNamespace

os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton's own functions look when they are imported

import pytest
import torch
import triton
import triton.language
from played_graphs import (
    Event,
    PlayedGraph,
    Stream,
    capturing,
    current_stream,
    on_stream,
    refuse_while_capturing,
    spoil,
)
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

NAME = "a GPU that is only played"
PROCESSORS = 16  # few, because the interpreter runs the programs of a launch one after the other
LONGEST = 20  # seconds of a processor that a test may take
SPOILED = 0  # bytes up to which new memory becomes garbage
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

_there: dict[int, StorageWeakRef] = {}  # memory "on the GPU"; a weak reference keeps the address
_most = 1000  # entries before those of freed memory are looked for
_interpreting = threading.Lock()  # the interpreter takes one launch at a time
_until = math.inf  # when a test that still launches kernels is broken off


def is_there(tensor: Tensor) -> bool:
    """Whether a tensor is on the GPU."""
    try:
        return tensor.untyped_storage()._cdata in _there
    except (NotImplementedError, RuntimeError):  # sparse tensors have no storage
        return False


def bring(tensor: Tensor) -> None:
    """Have a tensor's memory be on the GPU."""
    global _most
    storage = tensor.untyped_storage()
    if tensor.device.type == "cpu" and storage._cdata not in _there:
        _there[storage._cdata] = StorageWeakRef(storage)
        if len(_there) > _most:
            for address in [address for address, memory in _there.items() if memory.expired()]:
                del _there[address]
            _most = max(1000, 2 * len(_there))


def memory() -> list[tuple[int, int]]:
    """The begin and the end of all memory on the GPU."""
    there = [one for one in _there.values() if not one.expired()]
    storages = [torch.UntypedStorage._new_with_weak_ptr(one.cdata) for one in there]
    return [(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages]


def is_cuda(value: object) -> bool:
    """Whether an argument names the GPU."""
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


def tensors_in(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


# What takes tensors of both devices, by name.
MEETING = {
    "copy_", "_to_copy", "__setitem__", "__getitem__", "to", "type_as", "expand_as", "view_as", "reshape_as", "__set__",
    "__get__", "_has_compatible_shallow_copy_type", "is_same_size", "tensor", "as_tensor", "asarray", "__deepcopy__",
    "__repr__", "__format__",
}  # fmt: skip
ASKING = {"item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero", "equal", "unique"}
EMPTY = {"empty", "empty_like", "new_empty", "empty_strided"}  # which leave what they find
MOVING = {"to", "as_tensor", "asarray", "cpu", "cuda"}  # which give the same tensor where it is there already


class Placing(TorchFunctionMode):
    """Knows for each operation where its tensors are and where its results must be."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if fake or function in (torch.device, torch._C._nn._parse_to):  # fake tensors know of devices themselves
            return function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if isinstance(args[0] if args else None, Tensor):
            answer = self.property(getattr(function.__self__, "__name__", "") if name == "__get__" else name, args[0])
            if answer is not None:
                return answer
        kwargs.pop("pin_memory", None)
        where = self.asked_for(name, args, kwargs)
        if where is not None:
            args = tuple(CPU if is_cuda(value) else value for value in args)
            kwargs = {key: CPU if is_cuda(value) else value for key, value in kwargs.items()}
            if name == "cuda":
                function, args, kwargs = Tensor.to, (args[0], CPU), {}
        if not _there and where != CUDA:
            return function(*args, **kwargs)
        given = tensors_in((args, kwargs))
        places = [is_there(tensor) for tensor in given]
        self.check(name, args, given, places)
        out = function(*args, **kwargs)
        if name in MOVING and isinstance(out, Tensor):
            target = where or (CUDA if any(places) else CPU)
            if given and places[0] != (target == CUDA):
                refuse_pageable(given[0])
                out = out.clone() if shares(out, given[0]) else out
            if target == CUDA:
                bring(out)
            return out
        if where == CPU or (where is None and not any(places)) or name in ("copy_", "__setitem__", "__set__"):
            return out
        if name == "tensor" and where is not None:
            refuse_pageable(out)
        if name == "tensor" and where is None and not isinstance(args[0], Tensor):
            return out
        at_home = [tensor for tensor, there in zip(given, places, strict=True) if not there]
        for tensor in tensors_in(out):
            if not any(shares(tensor, other) for other in at_home):
                bring(tensor)
                if name in EMPTY and 0 < tensor.untyped_storage().nbytes() <= SPOILED:
                    spoil(tensor.untyped_storage(), tensor.dtype)
        return out

    def property(self, name: str, tensor: Tensor) -> object:
        """What a tensor on the GPU says of itself; None for what is as on a CPU."""
        answers = {"device": CUDA, "is_cuda": True, "is_cpu": False, "get_device": 0}
        return answers[name] if name in answers and _there and is_there(tensor) else None

    def asked_for(self, name: str, args: tuple, kwargs: dict) -> torch.device | None:
        """The device that a call names."""
        if name in ("cpu", "cuda"):
            return CPU if name == "cpu" else CUDA
        named = [value for value in (*args, *kwargs.values()) if is_cuda(value)]
        if named:
            return CUDA
        if name == "to" and len(args) > 1 and isinstance(args[1], Tensor):
            return CUDA if is_there(args[1]) else CPU
        devices = [kwargs.get("device"), *(args[1:2] if name == "to" else ())]
        return CPU if any(device in ("cpu", CPU) for device in devices) else None

    def check(self, name: str, args: tuple, given: list[Tensor], places: list[bool]) -> None:
        """Raise what CUDA raises."""
        if not any(places):
            return
        name = name.split(".")[0]
        if name in ("numpy", "__array__"):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        if name in ASKING or (name == "__getitem__" and any(t.dtype == torch.bool for t in given[1:])):
            refuse_while_capturing()
        if name == "__getitem__" and not places[0]:
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        large = {there for tensor, there in zip(given, places, strict=True) if tensor.dim() or tensor.numel() != 1}
        if len(large) > 1 and name not in MEETING:
            found = "found at least two devices, cuda:0 and cpu!"
            raise RuntimeError(f"{name}: Expected all tensors to be on the same device, but {found}")


def shares(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same memory."""
    try:
        return one.untyped_storage()._cdata == other.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return False


class Graph(PlayedGraph):
    """A CUDA graph's part, where each tensor knows whether it is on the GPU."""

    def is_there(self, tensor):
        return is_there(tensor)

    def bring(self, tensor):
        bring(tensor)

    def check_copy(self, into, source):
        if into is not None and is_there(into) != is_there(source):
            refuse_pageable(source if is_there(into) else into)

    @staticmethod
    def run(executor, *args, **kwargs):
        _launch(executor, *args, **kwargs)


def refuse_pageable(tensor: Tensor) -> None:
    """What torch does in a capture about copies from and to a host's memory that is not pinned."""
    if capturing() is not None and not RUNTIME.holds(tensor):
        raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless pinned")


@contextmanager
def capture(graph, pool=None, stream=None, capture_error_mode="global"):
    """`torch.cuda.graph`'s part."""
    PlayedGraph.pools.empty_cache()
    with on_stream(stream or Stream()):
        graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        finally:
            graph.capture_end()


class Generator(torch.Generator):
    """A random number generator of any device."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu" if is_cuda(device) else device)


def driver(arch: int) -> SimpleNamespace:
    """Triton's driver: what its benchmarks ask for, and which GPU it compiles for."""
    facts = {"multiprocessor_count": PROCESSORS, "sm_clock_rate": 1_980_000, "max_shared_mem": 232_448}
    return SimpleNamespace(
        utils=SimpleNamespace(get_device_properties=lambda device: facts),
        get_current_target=lambda: triton.backends.compiler.GPUTarget("cuda", arch, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_active_torch_device=lambda: CUDA,
        get_device_interface=lambda: torch.cuda,
        get_empty_cache_for_benchmark=lambda: torch.empty(1, device=CUDA),
        clear_cache=lambda cache: cache.zero_(),
    )


class Runtime:
    """The part of CUDA's runtime that torch hands on: memory of the host that is pinned, by where it begins."""

    def __init__(self):
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, begin, nbytes, flags):  # noqa: N802
        taken = any(begin < one + size and one < begin + nbytes for one, size in self.pinned.items())
        if not taken:
            self.pinned[begin] = nbytes
        return 712 if taken else 0  # cudaErrorHostMemoryAlreadyRegistered

    def cudaHostUnregister(self, begin):  # noqa: N802
        return 0 if self.pinned.pop(begin, None) else 713

    def holds(self, tensor):
        begin = tensor.data_ptr()
        return any(one <= begin < one + size for one, size in self.pinned.items())


RUNTIME = Runtime()


def launch(executor, *args, **kwargs):
    """A kernel's launch: refused for tensors of the host, and noted where a graph is captured."""
    if time.process_time() > _until and threading.current_thread() is threading.main_thread():
        pytest.skip(f"takes longer than {LONGEST} s where a GPU is played")
    named = zip(executor.arg_names, args, strict=False)
    for name, tensor in [*named, *kwargs.items()]:
        if isinstance(tensor, Tensor) and not is_there(tensor) and not tensor.is_meta:
            raise ValueError(f"Pointer argument {name} cannot be accessed from Triton (cpu tensor?)")
    graph = capturing()
    (_launch if graph is None else graph.launch)(executor, *args, **kwargs)


def _launch(executor, *args, **kwargs):
    with _interpreting, torch._C.DisableTorchFunction():
        _run(executor, *args, **kwargs)


def _run(executor, *args, **kwargs):
    raise AssertionError("install() puts here what runs kernels")


def interpret_kernels() -> Callable[..., None]:
    """Have launches come here, and return what runs a kernel: Triton's interpreter."""
    triton.knobs.runtime.interpret = True
    from triton.runtime.interpreter import GridExecutor

    run, GridExecutor.__call__ = GridExecutor.__call__, launch

    def interpret(executor, *args, **kwargs):
        for name in {"INTERPRETED", "UPCAST"}.intersection(executor.arg_names):
            place = executor.arg_names.index(name)
            if place < len(args):
                args = (*args[:place], True, *args[place + 1 :])
            else:
                kwargs[name] = True
        run(executor, *args, **kwargs)

    return interpret


def placed(function):
    """A function that knows where tensors are though its caller does not: in a thread, or within an operation."""

    @wraps(function)
    def wrapped(*args, **kwargs):
        with Placing():
            return function(*args, **kwargs)

    return wrapped


def compiling_without_placing(compile_function):
    """torch.compile, whose tracing must not meet our mode; what it compiles stays on the CPU."""

    def compile_(model=None, **options):
        if model is None:
            return lambda function: compile_(function, **options)
        compiled = compile_function(model, **options)

        @wraps(compiled)
        def call(*args, **kwargs):
            modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
            try:
                with pytest.MonkeyPatch.context() as patch:
                    for name in ("is_available", "is_initialized"):  # or it would ask what only a build with CUDA has
                        patch.setattr(torch.cuda, name, lambda: False)
                    return compiled(*args, **kwargs)
            finally:
                for mode in reversed(modes):
                    torch._C._push_on_torch_function_stack(mode)

        return call

    return compile_


def install(arch: int = 90, running: Callable[[], Callable[..., None]] = interpret_kernels) -> None:
    """From now on this process is on a machine with a GPU. Before any kernel is imported.

    arch: what the GPU is, 90 for sm_90
    running: has kernels' launches come to `launch`, and returns what runs a kernel
    """
    global _run
    triton.knobs.propagate_env = False
    os.environ.pop("TRITON_INTERPRET", None)
    _run = running()

    from heavypath.kernels import implementation

    implementation.knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=False))
    triton.runtime.driver.set_active(driver(arch))
    properties = SimpleNamespace(
        name=NAME, multi_processor_count=PROCESSORS, major=arch // 10, minor=arch % 10, total_memory=80 << 30,
        L2_cache_size=50 << 20,
        clock_rate=1_830_000, memory_clock_rate=2_619_000, memory_bus_width=5120,
        shared_memory_per_block_optin=232_448, warp_size=32, regs_per_multiprocessor=65536, uuid="played",
    )  # fmt: skip
    constant = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0, "get_device_name": NAME,
        "get_device_capability": divmod(arch, 10), "get_device_properties": properties, "is_bf16_supported": True,
        "memory_allocated": 0, "memory_reserved": 0, "max_memory_allocated": 0, "max_memory_reserved": 0,
        "mem_get_info": (79 << 30, 80 << 30), "get_arch_list": [f"sm_{arch}"],
    }  # fmt: skip
    nothing = ("init", "_lazy_init", "manual_seed", "manual_seed_all", "reset_peak_memory_stats")
    nothing += ("set_sync_debug_mode", "set_device", "ipc_collect", "seed_all")
    parts = {name: (lambda *args, value=value, **kwargs: value) for name, value in constant.items()}
    parts |= {name: (lambda *args, **kwargs: None) for name in nothing}
    parts |= {
        "synchronize": lambda device=None: refuse_while_capturing(),
        "is_current_stream_capturing": lambda: capturing() is not None,
        "current_stream": current_stream,
        "default_stream": lambda device=None: Stream(number=0),
        "stream": on_stream,
        "device": lambda device=None: nullcontext(),
        "device_of": lambda tensor: nullcontext(),
        "cudart": lambda: RUNTIME,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph_pool_handle": PlayedGraph.pools.handle,
        "current_blas_handle": lambda: PlayedGraph.pools.handles.add(threading.get_ident()),
        "empty_cache": PlayedGraph.pools.empty_cache,
        "graph": capture,
    }
    for name, part in parts.items():
        assert hasattr(torch.cuda, name), f"torch.cuda has no {name} any more"
        setattr(torch.cuda, name, part)
    torch._C._cuda_endAllocateToPool = PlayedGraph.pools.end
    torch.Tensor.record_stream = lambda tensor, stream: None
    torch.Generator = Generator
    torch.compile = compiling_without_placing(torch.compile)
    threading.Thread.run = placed(threading.Thread.run)
    impl = torch.library.Library.impl
    torch.library.Library.impl = lambda library, name, function, *rest, **options: impl(
        library, name, placed(function) if library.ns == "heavypath" else function, *rest, **options
    )
    Placing().__enter__()


def pytest_load_initial_conftests() -> None:
    """As a plugin of pytest: before tests/conftest.py looks for a GPU."""
    if inspect.getmodule(torch.cuda.is_available) is torch.cuda:
        install()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup():
    """Let a test, or what it is given, launch kernels for LONGEST and no longer."""
    global _until
    _until = time.process_time() + LONGEST
    try:
        return (yield)
    finally:
        _until = math.inf


pytest_runtest_call = pytest_runtest_setup
