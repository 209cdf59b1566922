"""An adversary for kernels: Triton's interpreter with programs that run interleaved at random, and are watched.

Triton's interpreter runs one program of a launch after the other, and all threads of a program at once. So it shows no
race. Here the programs take turns at random, at every access to memory, and `shadow_memory` says which accesses nothing
puts in order, whatever their turn was. A launch fails with `HazardError` where

    * programs touch one address in no order (no release and acquire between them),
    * threads of one program do so without tl.debug_barrier,
    * a program touches what is in none of the launch's tensors, though it may be in the allocation of one,
    * one store writes different values to one address,
    * no program gets on, because all wait: some for programs that have not started, since only a few, 1 to all, run
      at a time, as on a GPU, and they start in any order.

In a test, which then runs under three seeds:

    def test_a_kernel_is_right_in_any_schedule(adversary):
        got = function(..., impl="triton")
        assert torch.equal(got, function(..., impl="torch"))
        adversary.met("_name_of_kernel")

Each kernel of the package has such a test, which test_adversary.py looks for. Memory that a kernel reaches by addresses
in a table must be named first: `adversary.knows(*tensors)`. The tests of a whole file run under one seed with

    pytest tests/kernels/test_ordering.py --adversary 1

Such tests name no memory, so there kernels of `BY_ADDRESS` may touch any, and large tensors are not watched. A test's
own adversary takes the place of that one.

Tensors should be small: each of their elements takes some 100 bytes here. `tl.atomic_load`, `atomic_store` and
`atomic_poll`, which Triton has since 3.9, count as plain accesses, which order nothing.
"""

import inspect
import math
import random
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import greenlet
import numpy as np
import pytest
import triton
from shadow_memory import Access, ShadowMemory, Touch
from torch import Tensor

_HERE, _TRITON = __file__, str(Path(triton.__file__).parent)
_WARPS = 4  # Triton's own default
BY_ADDRESS = {"_compact_kernel"}  # kernels that find memory by addresses in a table
LARGE = 1 << 26  # bytes of a tensor
PATIENCE = 200_000  # accesses after the last one that wrote, or the last start or end of a program
_entered: list["Adversary"] = []


class HazardError(AssertionError):
    """A launch may go wrong on a GPU."""


class Adversary:
    """A context in which kernels meet the adversary; what it does depends on the seed alone.

    Within the context of another adversary it takes that one's place.

    launched: how often each kernel was
    everywhere: whether the tests are not written for it, see the top of this file
    """

    def __init__(self, seed: int, everywhere: bool = False):
        self.seed, self.launched, self.everywhere = seed, Counter[str](), everywhere
        self.random = random.Random(seed)
        self.known: list[tuple[str, Tensor]] = []
        self.launch: _Launch | None = None

    def knows(self, *tensors: Tensor) -> None:
        """Launches may touch these tensors, too."""
        self.known += [("a known tensor", tensor) for tensor in tensors]

    def met(self, *kernels: str) -> None:
        """Assert that these kernels were launched here."""
        assert {*kernels} <= {*self.launched}

    def __enter__(self) -> "Adversary":
        if _entered:
            _entered[-1].patch.undo()
        _entered.append(self)
        self._change()
        return self

    def __exit__(self, *_) -> None:
        self.patch.undo()
        _entered.remove(self)
        if _entered:
            _entered[-1]._change()

    def _change(self) -> None:
        """Have the interpreter's launches and accesses go through this adversary."""
        from triton.runtime import interpreter

        self.builder, self.patch = interpreter.interpreter_builder, pytest.MonkeyPatch()
        executor = interpreter.GridExecutor
        self.patch.setattr(executor, "__call__", self._launching(executor.__call__))
        for name in ("masked_load", "masked_store", "atomic_rmw", "atomic_cas", "barrier"):
            original = getattr(self.builder, f"create_{name}")
            watched = getattr(self, f"_{name}")(original)
            self.patch.setattr(self.builder, f"create_{name}", partial(self._in_a_launch, watched, original))

    def _in_a_launch(self, watched, original, *given):
        """Watch what a launch does. A played graph repeats launches by itself: these are not watched."""
        return (original if self.launch is None else watched)(*given)

    def _launching(self, call):
        def launch(executor, *args, **options):
            kernel, name = executor.fn, executor.fn.__name__
            given = {**dict(zip(executor.arg_names, args, strict=False)), **options}
            tensors = [*self.known, *(found for item in given.items() for found in _tensors(*item))]
            watched = tensors
            if self.everywhere:
                watched = [(named, each) for named, each in tensors if each.untyped_storage().nbytes() < LARGE]
            any_memory = self.everywhere and (name in BY_ADDRESS or len(watched) < len(tensors))
            threads = 32 * options.get("num_warps", _WARPS)
            executor.fn = self.launch = _Launch(self, kernel, watched, threads, any_memory)
            try:
                call(executor, *args, **options)
                findings = self.launch.findings()
            finally:
                executor.fn, self.launch = kernel, None
            self.launched[name] += 1
            if findings:
                raise HazardError("\n".join((f"{name}:", *findings)))

        return launch

    def _masked_load(self, original):
        def load(pointers, mask, *options):
            access = Access.POLL if options[-1] else Access.READ  # the last option is whether it is volatile
            _, mask = self.launch.touch(access, pointers, mask)
            return original(pointers, mask, *options)

        return load

    def _masked_store(self, original):
        def store(pointers, value, mask, *options):
            touch, mask = self.launch.touch(Access.WRITE, pointers, mask)
            values = np.broadcast_to(value.data, pointers.data.shape).reshape(-1)[touch.places]
            self.launch.memory.store(touch, values)
            self.launch.idle = 0
            return original(pointers, value, mask, *options)

        return store

    def _atomic_rmw(self, original):
        def rmw(operation, pointer, value, mask, order, scope):
            mask = self.launch.touch_atomically(pointer, mask, order, scope)
            return original(operation, pointer, value, mask, order, scope)

        return rmw

    def _atomic_cas(self, original):
        def cas(pointer, expected, value, order, scope):
            mask = self.launch.touch_atomically(pointer, None, order, scope)
            return original(pointer, expected, value, order, scope) if mask.data.all() else expected

        return cas

    def _barrier(self, original):
        def barrier():
            self.launch.take_turns()
            self.launch.memory.clocks[self.launch.running].pass_barrier()
            return original()

        return barrier


def _tensors(name: str, value: object) -> list[tuple[str, Tensor]]:
    """The tensors in an argument of a launch, with the argument's name."""
    if isinstance(value, tuple):
        return [found for item in value for found in _tensors(name, item)]
    value = getattr(value, "base", value)  # of a descriptor, or of a tensor that is read as another type
    return [(name, value)] if isinstance(value, Tensor) else []


class _Launch:
    """Stands in for a kernel in the interpreter's loop over the grid: at the last program it runs all of them."""

    def __init__(self, adversary: Adversary, kernel, tensors: list[tuple[str, Tensor]], threads: int, any_memory: bool):
        self.__name__, self.__globals__ = kernel.__name__, kernel.__globals__
        self.__signature__ = inspect.signature(kernel)
        self.kernel, self.tensors, self.threads = kernel, tensors, threads
        self.builder, self.random, self.any_memory = adversary.builder, adversary.random, any_memory
        self.cells: list[tuple[int, int, int]] = []
        self.lines: dict[tuple, int] = {}
        self.shapes: dict[tuple, int] = {}
        self.memory: ShadowMemory | None = None
        self.stuck: dict[int, int] | None = None

    def __call__(self, **arguments) -> None:
        self.cells.append(self.builder.grid_idx)
        if len(self.cells) == math.prod(self.builder.grid_dim):
            self.memory = ShadowMemory(self.tensors, len(self.cells), self.threads)
            self._run(arguments)

    def _run(self, arguments: dict) -> None:
        waiting = self.random.sample(range(len(self.cells)), len(self.cells))
        at_a_time = self.random.choice((1, 2, 4, 16, len(self.cells)))
        self.rate = self.random.choice((0.1, 0.5, 1.0))
        self.idle, self.at = 0, {}
        turns: dict[int, greenlet.greenlet] = {}
        while turns or waiting:
            while waiting and len(turns) < at_a_time:
                turns[waiting.pop()] = greenlet.greenlet(lambda: self.kernel(**arguments))
                self.idle = 0
            self.running = self.random.choice([*turns])
            self.builder.set_grid_idx(*self.cells[self.running])
            turns[self.running].switch()
            if turns[self.running].dead:
                del turns[self.running]
                self.idle = 0
            elif self.idle > PATIENCE:
                self.stuck = {program: self.at[program] for program in turns}
                return

    def take_turns(self) -> None:
        self.idle += 1
        if self.idle > PATIENCE or self.random.random() < self.rate:
            greenlet.getcurrent().parent.switch()

    def touch(self, access: Access, pointers, mask) -> tuple[Touch, object]:
        """Let others have their turn, then note an access; returns it, and the mask without what is outside."""
        self.take_turns()
        wanted = np.broadcast_to(mask.data, pointers.data.shape)
        places = wanted.reshape(-1).nonzero()[0]
        touch = Touch(
            access, pointers.data.reshape(-1)[places].astype(np.int64), places, wanted.size,
            self.shapes.setdefault(wanted.shape, len(self.shapes) + 1),
            max(1, pointers.get_element_ty().primitive_bitwidth // 8), self._line(),
        )  # fmt: skip
        self.at[self.running] = touch.line
        inside = self.memory.inside(touch)
        if not inside.all():
            if not self.any_memory:
                self.memory.find_outside(touch, inside)
                kept = np.zeros(wanted.size, bool)
                kept[places[inside]] = True
                mask = type(mask)(kept.reshape(wanted.shape), mask.dtype)
            touch = touch._replace(addresses=touch.addresses[inside], places=places[inside])
        self.memory.note(self.running, touch)
        return touch, mask

    def touch_atomically(self, pointer, mask, order, scope):
        """`touch` of an atomic, with what it acquires and releases; returns the mask without what is outside."""
        if mask is None:
            mask = type(pointer)(np.ones(pointer.data.shape, bool), triton.language.int1)
        touch, mask = self.touch(Access.LOCAL if scope.name == "CTA" else Access.ATOMIC, pointer, mask)
        acquires, releases = order.name in ("ACQUIRE", "ACQUIRE_RELEASE"), order.name in ("RELEASE", "ACQUIRE_RELEASE")
        if touch.access is Access.ATOMIC:
            self.memory.order(self.running, touch, acquires, releases)
        return mask

    def _line(self) -> int:
        """A number for the lines that the running program is in, innermost first."""
        frame, lines = sys._getframe(2), []
        while frame is not None:
            name = frame.f_code.co_filename
            if name != _HERE and not name.startswith(_TRITON):
                lines.append((name, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        return self.lines.setdefault(tuple(lines), len(self.lines))

    def findings(self) -> list[str]:
        """Sentences, each with the lines of source in question."""
        if self.memory is None:
            return []
        found, sources = [], []
        for lines in self.lines:
            sources.append(" < ".join(f"{Path(file).name}:{line} {function}" for file, line, function in lines))
        for what, line, other in self.memory.findings:
            found.append(f"  {sources[line]}\n    {what}" + (f":\n  {sources[other]}" if other >= 0 else ""))
        if self.stuck is not None:
            found.append(
                "\n    ".join(("  no program gets on; they wait at", *{sources[at] for at in self.stuck.values()}))
            )
        return found
