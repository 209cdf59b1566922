"""Copy the state that a user's callable keeps between its calls; detect changes, and restore it.

A callable keeps state in its attributes, in containers, tensors and objects below them, in closure cells, in default
arguments, in attributes of its classes, and in global variables that its code names. `KeptState` copies all of these
at one moment.

Library code is not searched. A library's modules and classes, models and tokenizers are assumed not to change, except
for attributes that the callable's code sets, and for containers in attributes that it names. These are copied, too.

Some state cannot be read: iterators and generators, objects of compiled code, the clock, global random number
generators, files, other programs, and variables that code sets without writing their names (see `names_in_code`).
`KeptState.unseen` names one such thing, if there is any.
"""

import datetime
import decimal
import enum
import functools
import inspect
import logging
import random
import re
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping, MutableSequence, MutableSet, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heavypath.speculative.processors.contents import (
    CONTAINERS,
    PLAIN,
    attributes,
    class_attributes,
    contents_of,
    same,
    set_attributes,
    set_class_attributes,
    set_contents,
    set_tensor,
    slots_of,
)
from heavypath.speculative.processors.names_in_code import is_elsewhere, kept_elsewhere, names_in

MOST_PLACES = 20_000  # objects and variables that are copied
MOST_NUMBERS = 1 << 24  # elements of all tensors and arrays that are copied

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
_WITH_ATTRIBUTES = (PreTrainedModel, PreTrainedTokenizerBase, logging.Logger, enum.Enum)  # of `_FIXED`
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
_CONTAINER = MutableMapping | MutableSequence | MutableSet | deque
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


class _Outside(NamedTuple):
    """An object of a library, or a module, of which only what the code names is copied.

    looked: names whose values have been looked at; copied: names that have been copied
    """

    thing: Any
    looked: set[str]
    copied: set[str]


class KeptState:
    """A copy of the state that callables had when this object was made.

    kept:       the callables
    unseen:     the reason why a part of the state cannot be read; "" if all of it can
    may_differ: whether this part may depend on the sequence; the clock and random numbers do not
    """

    def __init__(self, kept: Sequence[object]):
        self.unseen = ""
        self.may_differ = False
        self._copies: list[_Copy] = []
        self._numbers = 0
        self._known: dict[int, object] = {}
        self._names: set[str] = set()
        self._stored: set[str] = set()  # names of attributes that some code sets
        self._outside: dict[int, _Outside] = {}
        self._waiting: dict[str, list[object]] = {}  # name -> methods; visited when some code uses the name
        self._left: list[object] = [*kept]
        self._packages = {_package_of(each) for each in kept}
        while not self.may_differ:
            if self._left:
                self._visit(self._left.pop())
            elif not self._looks_outside():
                break

    def has_changed(self) -> bool:
        """Whether the callables' state now differs from the copy, in the parts that can be read."""
        return not all(same(copy.saved, copy.read(copy.thing)) for copy in self._copies)

    def has_some_of(self, other: "KeptState") -> bool:
        """Whether both have copies of one object; functions, classes and objects of libraries are not counted."""
        theirs = {id(copy.thing) for copy in other._copies} - self._outside.keys()
        return any(
            id(copy.thing) in theirs and not isinstance(copy.thing, types.FunctionType | type) for copy in self._copies
        )

    def put_back(self) -> None:
        """Restore the callables' state from the copy."""
        for copy in self._copies:
            if not same(copy.saved, copy.read(copy.thing)):
                copy.write(copy.thing, copy.saved)

    def _is_library(self, module: str | None) -> bool:
        """Whether a module's code is not searched: it is installed, and not of a callable's own package."""
        package = (module or "").partition(".")[0]
        return package in _LIBRARIES or (package not in self._packages and _is_installed(package))

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
        self._left += [thing for thing in things if type(thing) not in PLAIN]

    def _visit(self, thing: Any) -> None:
        if type(thing) in PLAIN or id(thing) in self._known or isinstance(thing, _FIXED):
            if isinstance(thing, _WITH_ATTRIBUTES):
                self._note_outside(thing)
            return
        self._known[id(thing)] = thing
        if isinstance(thing, types.ModuleType):
            self._look_at(thing.__name__)
            self._note_outside(thing)
        elif isinstance(thing, type):
            self._visit_class(thing)
        elif isinstance(thing, types.FunctionType):
            self._visit_function(thing)
        elif isinstance(thing, types.BuiltinFunctionType):
            self._look_at(getattr(thing, "__module__", None) or "")
            self._push([] if isinstance(thing.__self__, types.ModuleType) else [thing.__self__])
        elif isinstance(thing, types.CellType):
            self._push(self._note(thing, contents_of, set_contents))
        elif isinstance(thing, Tensor | np.ndarray):
            self._visit_numbers(thing)
        elif isinstance(thing, torch.Generator):
            self._note(thing, lambda own: own.get_state(), lambda own, saved: own.set_state(saved))
        elif isinstance(thing, np.random.Generator | np.random.BitGenerator | np.random.RandomState):
            self._stop(f"it has a {type(thing).__name__} of NumPy")
        elif type(thing) is random.Random:
            self._note(thing, lambda own: own.getstate(), lambda own, saved: own.setstate(saved))
        elif isinstance(thing, _CACHE):
            self._visit_cache(thing)
        elif (inner := _inner(thing)) is not None:
            self._push(inner)
        elif hasattr(thing, "__next__"):
            self._stop(f"it has an iterator, a {type(thing).__name__}")
        else:
            self._visit_object(thing)

    def _look_at(self, module: str) -> None:
        if module.partition(".")[0] in _CLOCKS:
            self._stop(f"it reads the {module} module", may_differ=False)
        elif is_elsewhere(module):
            self._stop(f"it uses the {module} module")

    def _note_outside(self, thing: Any) -> None:
        self._outside.setdefault(id(thing), _Outside(thing, set(), set()))

    def _looks_outside(self) -> bool:
        """Look at what the code names in objects of libraries and in modules. Returns whether more is to visit."""
        for thing, looked, copied in [*self._outside.values()]:
            is_own = isinstance(thing, types.ModuleType) and not self._is_library(thing.__name__)
            written = (self._names if is_own else self._stored) - copied
            copied |= written
            values = self._copy_names(thing, sorted(written)) if written else []
            inner = vars(thing)
            names = self._names - looked
            looked |= names
            values += [inner[name] for name in names if name in inner]
            if isinstance(thing, torch.nn.Module):
                every = isinstance(thing, torch.nn.ModuleList | torch.nn.ModuleDict | torch.nn.Sequential)
                values += [each for name, each in thing.named_children() if every or name in names]
            for value in values:
                self._visit_within(thing, value, is_own)
        return bool(self._left) or any(self._names - each.looked for each in self._outside.values())

    def _visit_within(self, thing: Any, value: Any, is_own: bool) -> None:
        """Visit a value found in an object of a library, or in a module. is_own: whether this is a user's module."""
        if isinstance(value, types.ModuleType) and not is_own:
            if value.__name__.partition(".")[0] == (getattr(thing, "__name__", "")).partition(".")[0]:
                self._push([value])
        elif (
            is_own
            or isinstance(value, _CONTAINER)
            or (isinstance(value, type | types.FunctionType) and not self._is_library(value.__module__))
        ):
            self._push([value])
        elif isinstance(value, types.FunctionType):
            return
        elif isinstance(value, type) or isinstance(getattr(value, "__dict__", None), dict):
            is_fixed = isinstance(value, type | torch.nn.Module) or self._is_library(type(value).__module__)
            if is_fixed:
                self._note_outside(value)
            else:
                self._push([value])

    def _visit_cache(self, cache: Any) -> None:
        """Visit a function with a `functools.lru_cache`. Without arguments, its one result may be a store of state."""
        inner = cache.__wrapped__
        self._push([inner])
        takes_none = isinstance(inner, types.FunctionType) and not inspect.signature(inner).parameters
        if takes_none and self._note(cache, lambda own: own.cache_info().currsize, lambda own, _: own.cache_clear()):
            self._push([cache()])

    def _visit_function(self, function: types.FunctionType) -> None:
        self._push([*(function.__closure__ or ()), *(function.__defaults__ or ())])
        self._push((function.__kwdefaults__ or {}).values())
        self._look_at(function.__module__ or "")
        is_library = self._is_library(function.__module__)
        if function.__dict__ or not is_library:
            self._push(self._note(function, attributes, set_attributes).values())
        if is_library:
            return
        every = function.__globals__
        found = names_in(function.__code__, every.get("__package__") or "")
        names = found.every
        if names & _RANDOM and "manual_seed" not in names:
            self._stop("it draws random numbers", may_differ=False)
        if name := kept_elsewhere(found, every):
            self._stop(f"its code names {name}")
        for name in names - self._names:
            self._push(self._waiting.pop(name, ()))
        self._names |= names
        self._stored |= found.stored
        self._push(self._copy_names(function, sorted(name for name in names if name in every)))
        for module in found.modules:
            if module in sys.modules:
                self._push([sys.modules[module], sys.modules[module.partition(".")[0]]])
            elif not self._is_library(module):
                self._stop(f"it imports {module} when it is called")

    def _copy_names(self, thing: Any, names: list[str]) -> list[Any]:
        """Copy some attributes of an object, whether it has them or not; those of a function are global variables.

        Returns the values that it has.
        """
        variables = thing.__globals__ if isinstance(thing, types.FunctionType) else vars(thing)

        def read(own: Any) -> dict[str, Any]:
            return {name: variables[name] for name in names if name in variables}

        def write(own: Any, saved: dict[str, Any]) -> None:
            for name in names:
                value = saved.get(name, _NOTHING)
                if value is variables.get(name, _NOTHING):
                    continue
                is_gone = value is _NOTHING
                if isinstance(own, type) and is_gone:
                    delattr(own, name)
                elif isinstance(own, type):
                    setattr(own, name, value)
                elif is_gone:
                    del variables[name]
                else:
                    variables[name] = value

        return [*self._note(thing, read, write).values()]

    def _visit_class(self, kind: type) -> None:
        self._look_at(kind.__module__ or "")
        if self._is_library(kind.__module__):
            self._note_outside(kind)
        for base in kind.__mro__:
            if self._is_library(base.__module__) or (base is not kind and id(base) in self._known):
                continue
            self._known[id(base)] = base
            self._push(self._note(base, class_attributes, set_class_attributes).values())
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
            self._note(thing, lambda own: own.detach().clone(), set_tensor)
        else:
            self._note(thing, lambda own: own.copy(), lambda own, saved: np.copyto(own, saved))

    def _visit_object(self, thing: Any) -> None:
        kind = type(thing)
        package = (kind.__module__ or "").partition(".")[0]
        if package in _FIXED_OF and not isinstance(thing, torch.nn.Module):
            if isinstance(getattr(thing, "__dict__", None), dict):
                self._note_outside(thing)
            return
        container = next((each for each in CONTAINERS if isinstance(thing, each)), None)
        if container is None and _has_hidden_memory(kind):
            self._stop(f"it has a {kind.__name__}, whose state cannot be read")
            return
        if container is not None:
            content = self._note(thing, *CONTAINERS[container])
            self._push(content.values() if isinstance(content, dict) else content)
        if container is None or kind is not container:
            self._push(self._note(thing, attributes, set_attributes).values())
            self._push([kind])


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
    return None


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
    pointers = len(slots_of(kind)) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__basicsize__ - object.__basicsize__ > 8 * pointers or kind.__itemsize__ > 0
