"""Read and write an object's own content: its attributes, or what a container, a closure cell or a tensor has."""

import functools
import operator
import types
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

PLAIN = {int, float, complex, bool, str, bytes, type(None), range, slice, type(...), type(NotImplemented)}


def set_contents(cell: types.CellType, saved: tuple[Any, ...]) -> None:
    """Restore a closure cell from `contents_of`."""
    if saved:
        cell.cell_contents = saved[0]
    else:
        del cell.cell_contents


def contents_of(cell: types.CellType) -> tuple[Any, ...]:
    """The object in a closure cell; () if the cell is empty."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def refill(thing: Any, saved: Any) -> None:
    """Restore what a container has."""
    thing.clear()
    (thing.extend if isinstance(thing, list | deque | bytearray) else thing.update)(saved)


_Ways = tuple[Callable[[Any], Any], Callable[[Any, Any], object]]  # functions that read and write
CONTAINERS: dict[type, _Ways] = {
    dict: (dict, refill),
    list: (list, refill),
    set: (set, refill),
    deque: (list, refill),
    bytearray: (bytes, refill),
}


@functools.lru_cache(1024)
def slots_of(kind: type) -> tuple[str, ...]:
    """The names of the attributes that a class keeps in slots, those of its bases included."""
    found = []
    for base in kind.__mro__:
        own = vars(base).get("__slots__", ())
        names = [own] if isinstance(own, str) else [*own]
        private = f"_{base.__name__.lstrip('_')}"
        found += [private + name if name.startswith("__") and not name.endswith("__") else name for name in names]
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def attributes(thing: Any) -> dict[str, Any]:
    """An object's own attributes, also those in slots."""
    found = dict(getattr(thing, "__dict__", ()))
    for name in slots_of(type(thing)):
        if hasattr(thing, name):
            found[name] = getattr(thing, name)
    return found


def set_attributes(thing: Any, saved: dict[str, Any]) -> None:
    """Restore an object's own attributes from `attributes`."""
    names = slots_of(type(thing))
    if hasattr(thing, "__dict__"):
        vars(thing).clear()
        vars(thing).update({name: value for name, value in saved.items() if name not in names})
    for name in names:
        if name in saved:
            object.__setattr__(thing, name, saved[name])
        elif hasattr(thing, name):
            object.__delattr__(thing, name)


def class_attributes(kind: type) -> dict[str, Any]:
    """A class's own attributes without those of Python itself."""
    return {name: value for name, value in vars(kind).items() if not name.startswith(("__", "_abc"))}


def set_class_attributes(kind: type, saved: dict[str, Any]) -> None:
    """Restore a class's own attributes from `class_attributes`."""
    for name in class_attributes(kind).keys() - saved.keys():
        delattr(kind, name)
    for name, value in saved.items():
        if name not in vars(kind) or vars(kind)[name] is not value:
            setattr(kind, name, value)


def set_tensor(tensor: Tensor, saved: Tensor) -> None:
    """Restore the shape and the elements of a tensor."""
    with torch.no_grad():
        tensor.resize_(saved.shape).copy_(saved)


def same(one: Any, other: Any) -> bool:
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
    return (type(one) in PLAIN or isinstance(one, set | frozenset)) and one == other


def _all_same(some: Collection[Any], others: Collection[Any]) -> bool:
    if len(some) != len(others):
        return False
    return all(map(operator.is_, some, others)) or all(map(same, some, others))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
