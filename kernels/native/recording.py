"""Record a step's work on a CPU as a list of calls, and replay it, as a CUDA graph does on a GPU.

A step works on the same tensors each time. Between two compiled kernels Python looks up addresses, fills structures and
allocates results. This takes as long as the kernels of a small model. Recorded, it is done once:

    with recorded() as recording:
        result = step()                  # runs, and is recorded
    if recording.obstacle is None:
        recording.replay()               # runs again on the same tensors, and updates `result`

A recording has two kinds of computations: compiled kernels, which are called through `do`, and the operations of
PyTorch in `_WRITES`, `_COPIES` and `_IN_PLACE`. These are replayed into the tensors that they returned. Views and
allocations are not repeated. Everything else is an obstacle: other operations of PyTorch, `item` included; functions
that run their reference in PyTorch (`choose_impl`); and calls of `refuse`, which code must make before it calls a
user's code. For a recording cannot see Python, nor what NumPy computes or `tolist` reads.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import Structure, byref, c_double, c_int64, c_void_p
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heavypath.kernels.native.library import compiled

_ALLOCATIONS = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "detach_", "alias"}
_aten = torch.ops.aten
_WRITES = {  # operation -> its variant that writes into a given tensor
    _aten.add.Tensor: _aten.add.out,
    _aten.cat.default: _aten.cat.out,
    _aten.clamp.default: _aten.clamp.out,
    _aten.gather.default: _aten.gather.out,
    _aten.ge.Scalar: _aten.ge.Scalar_out,
    _aten.index_select.default: _aten.index_select.out,
    _aten.mul.Tensor: _aten.mul.out,
}
_COPIES = {_aten._to_copy.default, _aten.clone.default, _aten.contiguous.default, _aten.to.dtype}
_IN_PLACE = {_aten.copy_.default, _aten.index_copy_.default, _aten.masked_fill_.Scalar, _aten.zero_.default}
_of_thread = threading.local()


class Recording(TorchDispatchMode):
    """The recorded calls, in order. obstacle: why they cannot be replayed; None if they can."""

    def __init__(self) -> None:
        super().__init__()
        self.obstacle: str | None = None
        self.calls: list[Callable[[], object]] = []
        self.kept: list[object] = []  # tensors whose addresses the calls hold
        self._inside = False

    def do(self, call: Callable[[], object], kept: object) -> None:
        """Run a call and record it; operations of PyTorch inside it are not recorded by themselves."""
        self._inside = True
        try:
            call()
        finally:
            self._inside = False
        self.calls.append(call)
        self.kept.append(kept)

    def replay(self) -> bool:
        """Run all calls again. Stops and returns False at a question of `ask` whose answer has changed."""
        return all(call() is not False for call in self.calls)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation of PyTorch. Outside of `do`, record it as a call or as an obstacle."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._inside:
            return result
        name = func._schema.name.removeprefix("aten::")
        if name in _ALLOCATIONS:
            return result
        if func.is_view and _shares(args, result):
            return result
        again = _replayed(func, args, kwargs, result)
        if again is not None:
            self.calls.append(again)
        elif self.obstacle is None:
            self.obstacle = str(func)
        return result


def _replayed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Callable[[], object] | None:
    """The call that computes the result of an operation of PyTorch again, into the same tensor; None without one."""
    if func is _aten.add.Tensor and not result.is_floating_point():
        return _addition(result, args[0], args[1], kwargs.get("alpha", 1))
    if func in _WRITES:
        func = _WRITES[func]
        kwargs = kwargs | {"out": result}
    elif func in _COPIES:
        func = _aten.copy_.default
        args = (result, args[0])
        kwargs = {}
    elif func not in _IN_PLACE:
        return None
    return lambda: func(*args, **kwargs)


def _addition(result: Tensor, one: Tensor, other: Tensor | int, alpha: int = 1) -> Callable[[], object]:
    """The call by which NumPy adds integers, result = one + alpha * other.

    A step adds noise rows right after the target's pass, which leaves no other code in the processor's caches. There
    PyTorch's addition of a few numbers takes several times as long as NumPy's.
    """
    to = result.numpy()
    first = one.numpy()
    second = other.numpy() if isinstance(other, Tensor) else other
    if alpha == 1:
        return partial(np.add, first, second, out=to)

    def add_multiple() -> None:
        multiple = np.multiply(second, alpha)
        np.add(first, multiple, out=to)

    return add_multiple


def _shares(args: tuple[Any, ...], result: Any) -> bool:
    """Whether a result shares the arguments' memory. Some operations that count as views copy if they have to."""
    return _storages(result) <= _storages(args)


def _storages(nested: Any) -> set[int]:
    """The addresses of the memory of all tensors in tuples, lists and dictionaries."""
    found = set()
    for leaf in tree_leaves(nested):
        if isinstance(leaf, Tensor):
            storage = leaf.untyped_storage()
            found.add(storage.data_ptr())
    return found


@contextmanager
def recorded() -> Iterator[Recording]:
    """Record the calls that this thread makes inside the block."""
    recording = _of_thread.recording = Recording()
    try:
        with recording:
            yield recording
    finally:
        _of_thread.recording = None


def do(call: Callable[[], object], kept: object = None) -> None:
    """Run a call now, and in every replay if a recording is on; kept: tensors that must stay alive for it."""
    recording: Recording | None = getattr(_of_thread, "recording", None)
    if recording is None:
        call()
    else:
        recording.do(call, kept)


def refuse(obstacle: str) -> None:
    """Mark the current recording, if there is one, as one that cannot be replayed; the caller goes on."""
    recording: Recording | None = getattr(_of_thread, "recording", None)
    if recording is not None and recording.obstacle is None:
        recording.obstacle = obstacle


def fields(description: str) -> list[tuple[str, type]]:
    """Return ctypes fields by names: *name is a pointer, .name an fp64, any other a 64-bit integer."""
    types = {"*": c_void_p, ".": c_double}
    found = []
    for marked in description.split():
        name = marked.lstrip("*.")
        found.append((name, types.get(marked[0], c_int64)))
    return found


class Arguments(Structure):
    """A compiled kernel's argument structure. Tensors are passed by address, and kept alive."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.kept: list[object] = [given, named]
        by_name = {name: _plain(value) for name, value in named.items()}
        super().__init__(*map(_plain, given), **by_name)


def _plain(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, Tensor) else value


def launch(name: str, *given: Structure) -> None:
    """Call the compiled kernel `name` with pointers to these structures, through `do`."""
    kernel = getattr(compiled(), name)
    do(partial(kernel, *map(byref, given)), given)


def ask(question: Callable[[], Any]) -> Any:
    """Return the answer to a question about computed values, on which the step branches.

    A replay stops here if the answer has changed. Then another recording of the step is replayed, or the step is run
    without one. So whatever a step does before the question must be safe to repeat.
    """
    answers: list[Any] = []

    def answer_or_compare() -> object:
        answer = question()
        if not answers:
            answers.append(answer)
            return None
        return answer == answers[0]  # False stops a replay

    do(answer_or_compare)
    return answers[0]
