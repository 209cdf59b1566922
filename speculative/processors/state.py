"""Copy the state that a user's callable keeps between its calls; detect changes, and restore it.

A callable keeps state in its attributes, in containers, tensors and objects below them, in closure cells, in default
arguments, in attributes of its classes, and in global variables that its code names. `KeptState` copies all of these
at one moment. Library code is not searched. Models and tokenizers are assumed not to change.

Some state cannot be read: iterators and generators, objects of compiled code, the clock, and global random number
generators. `KeptState.unseen` names one such thing, if there is any.
"""

import datetime
import decimal
import enum
import functools
import logging
import operator
import random
import re
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

MOST_PLACES = 20_000  # objects and variables that are copied
MOST_NUMBERS = 1 << 24  # elements of all tensors and arrays that are copied

_PLAIN = {int, float, complex, bool, str, bytes, type(None), range, slice, type(...), type(NotImplemented)}
_FIXED = (
    enum.Enum,
    re.Pattern,
    PurePath,
    logging.Logger,
    type(threading.Lock()),
    type(threading.RLock()),
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    decimal.Decimal,
    np.generic,
    np.dtype,
    torch.dtype,
    torch.device,
    torch.layout,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    types.CodeType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GenericAlias,
)
_LIBRARIES = {"torch", "numpy", "transformers", "tokenizers", "heavypath", "safetensors", "huggingface_hub"}
_LIBRARIES |= sys.stdlib_module_names - {"__main__"}
_FIXED_OF = {"torch", "numpy", "tokenizers", "heavypath", "typing"}  # their objects do not change, except nn.Modules
_CLOCKS = {"time", "datetime", "secrets", "uuid"}
_RANDOM = {
    "random",
    "rand",
    "randn",
    "randint",
    "randperm",
    "rand_like",
    "randn_like",
    "randint_like",
    "bernoulli",
    "bernoulli_",
    "multinomial",
    "normal",
    "normal_",
    "uniform_",
    "exponential_",
    "geometric_",
    "cauchy_",
    "log_normal_",
    "random_",
    "poisson",
    "dropout",
    "gumbel_softmax",
}
_CACHE = type(functools.lru_cache(lambda: None))
_NOTHING = object()


class _Copy(NamedTuple):
    """A copy of one object that can change.

    thing: the object
    read:  returns a copy of the object's own content
    write: restores the content from a copy
    saved: the copy
    """

    thing: Any
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]
    saved: Any


class KeptState:
    """A copy of the state that a callable had when this object was made.

    kept:       the callable
    unseen:     the reason why a part of the state cannot be read; "" if all of it can
    may_differ: whether this part may depend on the sequence; the clock and random numbers do not
    """

    def __init__(self, kept: object):
        self.unseen = ""
        self.may_differ = False
        self._copies: list[_Copy] = []
        self._numbers = 0
        self._known: dict[int, object] = {}
        self._names: set[str] = set()
        self._waiting: dict[str, list[object]] = {}  # name -> methods; visited when some code uses the name
        self._left: list[object] = [kept]
        self._package = _package_of(kept)
        while self._left and not self.may_differ:
            self._visit(self._left.pop())

    def has_changed(self) -> bool:
        """Whether the callable's state now differs from the copy, in the parts that can be read."""
        return not all(_same(copy.saved, copy.read(copy.thing)) for copy in self._copies)

    def put_back(self) -> None:
        """Restore the callable's state from the copy."""
        for copy in self._copies:
            if not _same(copy.saved, copy.read(copy.thing)):
                copy.write(copy.thing, copy.saved)

    def _is_library(self, module: str | None) -> bool:
        """Whether a module's code is not searched: it is installed, and not of the callable's own package."""
        package = (module or "").partition(".")[0]
        return package in _LIBRARIES or (package != self._package and _is_installed(package))

    def _note(self, thing: Any, read: Callable[[Any], Any], write: Callable[[Any, Any], object]) -> Any:
        """Copy a thing's content. Returns the copy."""
        saved = read(thing)
        self._copies.append(_Copy(thing, read, write, saved))
        if len(self._copies) > MOST_PLACES or self._numbers > MOST_NUMBERS:
            self._stop("it keeps more than can be compared in each step")
        return saved

    def _stop(self, why: str, *, may_differ: bool = True) -> None:
        if may_differ or not self.unseen:
            self.unseen = why
            self.may_differ = may_differ

    def _push(self, things: Iterable[object]) -> None:
        self._left += [thing for thing in things if type(thing) not in _PLAIN]

    def _visit(self, thing: Any) -> None:
        if type(thing) in _PLAIN or id(thing) in self._known or isinstance(thing, _FIXED):
            return
        self._known[id(thing)] = thing
        if isinstance(thing, types.ModuleType):
            self._look_at_time(thing.__name__)
        elif isinstance(thing, type):
            self._visit_class(thing)
        elif isinstance(thing, types.FunctionType):
            self._visit_function(thing)
        elif isinstance(thing, types.BuiltinFunctionType):
            self._look_at_time(getattr(thing, "__module__", None) or "")
            self._push([] if isinstance(thing.__self__, types.ModuleType) else [thing.__self__])
        elif isinstance(thing, types.CellType):
            self._push(self._note(thing, _contents, _fill))
        elif isinstance(thing, Tensor | np.ndarray):
            self._visit_numbers(thing)
        elif isinstance(thing, torch.Generator):
            self._note(thing, lambda own: own.get_state(), lambda own, saved: own.set_state(saved))
        elif isinstance(thing, np.random.Generator | np.random.BitGenerator | np.random.RandomState):
            self._stop(f"it has a {type(thing).__name__} of NumPy")
        elif type(thing) is random.Random:
            self._note(thing, lambda own: own.getstate(), lambda own, saved: own.setstate(saved))
        elif (inner := _inner(thing)) is not None:
            self._push(inner)
        elif hasattr(thing, "__next__"):
            self._stop(f"it has an iterator, a {type(thing).__name__}")
        else:
            self._visit_object(thing)

    def _look_at_time(self, module: str) -> None:
        if module.partition(".")[0] in _CLOCKS:
            self._stop(f"it reads the {module} module", may_differ=False)

    def _visit_function(self, function: types.FunctionType) -> None:
        self._push([*(function.__closure__ or ()), *(function.__defaults__ or ())])
        self._push((function.__kwdefaults__ or {}).values())
        is_library = self._is_library(function.__module__)
        if function.__dict__ or not is_library:
            self._push(self._note(function, _attributes, _set_attributes).values())
        if is_library:
            return
        names = _names_of(function.__code__)
        if names & _RANDOM and "manual_seed" not in names:
            self._stop("it draws random numbers", may_differ=False)
        for name in names - self._names:
            self._push(self._waiting.pop(name, ()))
        self._names |= names
        every = function.__globals__
        of_globals = sorted(name for name in names if name in every)
        self._visit_names(every, of_globals)
        for value in [every[name] for name in of_globals]:
            if isinstance(value, types.ModuleType) and not self._is_library(value.__name__):
                self._visit_names(vars(value), sorted(name for name in names if name in vars(value)))

    def _visit_names(self, variables: dict[str, Any], names: list[str]) -> None:
        def read(own: dict[str, Any]) -> dict[str, Any]:
            return {name: own[name] for name in names if name in own}

        def write(own: dict[str, Any], saved: dict[str, Any]) -> None:
            for name in names:
                own.pop(name, None)
            own.update(saved)

        self._push(self._note(variables, read, write).values())

    def _visit_class(self, kind: type) -> None:
        self._look_at_time(kind.__module__ or "")
        for base in kind.__mro__:
            if self._is_library(base.__module__) or (base is not kind and id(base) in self._known):
                continue
            self._known[id(base)] = base
            self._push(self._note(base, _class_attributes, _set_class_attributes).values())
            for name, value in vars(base).items():
                if isinstance(value, types.FunctionType | staticmethod | classmethod | property):
                    if name in self._names or (name[:2] == "__" and name != "__init__"):
                        self._push([value])
                    else:
                        self._waiting.setdefault(name, []).append(value)

    def _visit_numbers(self, thing: "Tensor | np.ndarray[Any, Any]") -> None:
        self._numbers += thing.numel() if isinstance(thing, Tensor) else thing.size
        if self._numbers > MOST_NUMBERS or (isinstance(thing, np.ndarray) and thing.dtype.hasobject):
            self._stop("it keeps more than can be compared in each step")
        elif isinstance(thing, Tensor):
            self._note(thing, lambda own: own.detach().clone(), _set_tensor)
        else:
            self._note(thing, lambda own: own.copy(), lambda own, saved: np.copyto(own, saved))

    def _visit_object(self, thing: Any) -> None:
        kind = type(thing)
        package = (kind.__module__ or "").partition(".")[0]
        if package in _FIXED_OF and not isinstance(thing, torch.nn.Module):
            return
        container = next((each for each in _CONTAINERS if isinstance(thing, each)), None)
        if container is None and _has_hidden_memory(kind):
            self._stop(f"it has a {kind.__name__}, whose state cannot be read")
            return
        if container is not None:
            content = self._note(thing, *_CONTAINERS[container])
            self._push(content.values() if isinstance(content, dict) else content)
        if container is None or kind is not container:
            self._push(self._note(thing, _attributes, _set_attributes).values())
            self._push([kind])


def _fill(cell: types.CellType, saved: tuple[Any, ...]) -> None:
    if saved:
        cell.cell_contents = saved[0]
    else:
        del cell.cell_contents


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # the cell is empty
        return ()


def _refill(thing: Any, saved: Any) -> None:
    thing.clear()
    (thing.extend if isinstance(thing, list | deque | bytearray) else thing.update)(saved)


_Ways = tuple[Callable[[Any], Any], Callable[[Any, Any], object]]  # functions that read and write
_CONTAINERS: dict[type, _Ways] = {
    dict: (dict, _refill),
    list: (list, _refill),
    set: (set, _refill),
    deque: (list, _refill),
    bytearray: (bytes, _refill),
}


@functools.lru_cache(1024)
def _slots(kind: type) -> tuple[str, ...]:
    found = []
    for base in kind.__mro__:
        own = vars(base).get("__slots__", ())
        names = [own] if isinstance(own, str) else [*own]
        private = f"_{base.__name__.lstrip('_')}"
        found += [private + name if name.startswith("__") and not name.endswith("__") else name for name in names]
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _attributes(thing: Any) -> dict[str, Any]:
    found = dict(getattr(thing, "__dict__", ()))
    for name in _slots(type(thing)):
        if hasattr(thing, name):
            found[name] = getattr(thing, name)
    return found


def _set_attributes(thing: Any, saved: dict[str, Any]) -> None:
    slots = _slots(type(thing))
    if hasattr(thing, "__dict__"):
        vars(thing).clear()
        vars(thing).update({name: value for name, value in saved.items() if name not in slots})
    for name in slots:
        if name in saved:
            object.__setattr__(thing, name, saved[name])
        elif hasattr(thing, name):
            object.__delattr__(thing, name)


def _class_attributes(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if not name.startswith(("__", "_abc"))}


def _set_class_attributes(kind: type, saved: dict[str, Any]) -> None:
    for name in _class_attributes(kind).keys() - saved.keys():
        delattr(kind, name)
    for name, value in saved.items():
        if vars(kind).get(name, _NOTHING) is not value:
            setattr(kind, name, value)


def _set_tensor(tensor: Tensor, saved: Tensor) -> None:
    with torch.no_grad():
        tensor.resize_(saved.shape).copy_(saved)


def _inner(thing: Any) -> list[object] | None:
    """The objects that an immutable object refers to, such as a tuple or a partial; None for other kinds of objects."""
    match thing:
        case tuple() | frozenset():
            return [*thing]
        case types.MethodType():
            return [thing.__self__, thing.__func__]
        case functools.partial():
            return [thing.func, *thing.args, *thing.keywords.values(), *vars(thing).values()]
        case staticmethod() | classmethod():
            return [thing.__func__]
        case property():
            return [thing.fget, thing.fset]
        case types.MappingProxyType():
            return [*thing.values()]
        case weakref.ReferenceType():
            return [thing()]
    return [thing.__wrapped__] if isinstance(thing, _CACHE) else None


def _names_of(code: types.CodeType) -> set[str]:
    """The names of global variables and attributes in some code, and in the functions in it."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*map(_names_of, inner))


def _package_of(thing: Any) -> str:
    """The top-level package in which a callable's function or class is defined."""
    while isinstance(thing, functools.partial | types.MethodType):
        thing = thing.func if isinstance(thing, functools.partial) else thing.__func__
    kind = thing if isinstance(thing, types.FunctionType) else type(thing)
    return (kind.__module__ or "").partition(".")[0]


@functools.cache
def _is_installed(package: str) -> bool:
    """Whether a package is in the environment's site-packages or dist-packages."""
    module = sys.modules.get(package)
    paths = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
    return any("site-packages" in path or "dist-packages" in path for path in paths)


def _has_hidden_memory(kind: type) -> bool:
    """Whether objects of a class have memory besides their attributes, as those of compiled code do."""
    if kind is types.SimpleNamespace:
        return False
    pointers = len(_slots(kind)) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__basicsize__ - object.__basicsize__ > 8 * pointers or kind.__itemsize__ > 0


def _same(one: Any, other: Any) -> bool:
    """Whether two copies of a thing are equal: the same objects, or equal plain ones, in the same order."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return _all_same(one, other) and _all_same(one.values(), other.values())
    if isinstance(one, list | tuple):
        return _all_same(one, other)
    if isinstance(one, Tensor):
        return one.shape == other.shape and (torch.equal(one, other) or bool((_bytes(one) == _bytes(other)).all()))
    if isinstance(one, np.ndarray):
        return one.shape == other.shape and one.tobytes() == other.tobytes()
    return (type(one) in _PLAIN or isinstance(one, set | frozenset)) and one == other


def _all_same(some: Collection[Any], others: Collection[Any]) -> bool:
    if len(some) != len(others):
        return False
    return all(map(operator.is_, some, others)) or all(map(_same, some, others))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
