"""Define a function as an operator of PyTorch, which torch.compile and torch.export see as one node.

An operator takes tensors, numbers and names, in one flat list. So arguments are taken apart by their annotations, and
results are put together again:

    a NamedTuple                    its fields, one after the other
    A | B                           an A and a B, of which one is None
    Tensor, int, float, bool, str   itself

Compilers assume that results share memory neither with arguments nor with each other, and have the layout of the fake
results, here a contiguous one. The operator copies results for which that does not hold. Nor may anything be kept but
results: torch.compile runs operators in the memory of a CUDA graph that it is about to capture. So launches count their
tickets in separate memory.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from operator import itemgetter
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from heavypath.kernels.tickets import counters_for

LIBRARY = torch.library.Library("heavypath", "FRAGMENT")
_SCHEMAS = {
    Tensor: "Tensor",
    Sequence[Tensor]: "Tensor[]",
    int: "SymInt",
    float: "float",
    bool: "bool",
    str: "str",
}


class Leaf(NamedTuple):
    """A value that an operator takes as it is."""

    name: str
    kind: Any
    optional: bool

    def schema(self, mutated: str) -> str:
        """As an operator's schema has it; mutated: the mark of memory that is changed, or nothing."""
        text = _SCHEMAS[self.kind]
        if mutated:
            text = f"Tensor({mutated}!){text.removeprefix('Tensor')}"
        return f"{text}{'?' * self.optional} {self.name}"


class Record(NamedTuple):
    """A NamedTuple, or several results."""

    kind: Any
    optional: bool
    parts: tuple[Any, ...]


class Either(NamedTuple):
    """One of several kinds of values."""

    parts: tuple[Any, ...]


def parted(name: str, hint: Any, optional: bool = False) -> Leaf | Record | Either:
    """The parts of a value with this annotation; names of fields follow that of the value."""
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        optional = optional or len(kinds) < len(get_args(hint))
        if len(kinds) > 1:
            return Either(tuple(parted(f"{name}_{kind.__name__.lower()}", kind, True) for kind in kinds))
        hint = kinds[0]
    if get_origin(hint) is tuple:
        return Record(_together, optional, tuple(parted(f"{name}_{i}", kind) for i, kind in enumerate(get_args(hint))))
    if get_origin(hint) is None and issubclass(hint, tuple):
        hints: Any = get_type_hints(hint)
        fields: Any = hint
        return Record(hint, optional, tuple(parted(f"{name}_{each}", hints[each], optional) for each in fields._fields))
    return Leaf(name, hint, optional)


def _together(*fields: Any) -> tuple[Any, ...]:
    return fields


def leaves_of(part: Leaf | Record | Either) -> list[Leaf]:
    """The leaves of a part, in the order of `flat`."""
    return [part] if isinstance(part, Leaf) else [leaf for each in part.parts for leaf in leaves_of(each)]


def flat(part: Leaf | Record | Either, value: Any) -> list[Any]:
    """The values of the leaves."""
    if isinstance(part, Leaf):
        return [value]
    if isinstance(part, Either):
        return [leaf for each in part.parts for leaf in flat(each, value if isinstance(value, each.kind) else None)]
    fields = [None] * len(part.parts) if value is None else value
    return [leaf for each, field in zip(part.parts, fields, strict=True) for leaf in flat(each, field)]


def maker(part: Leaf | Record | Either, places: Iterator[int]) -> Callable[[Sequence[Any]], Any]:
    """A function that makes a part's value of all leaves of an operator; places: where this part's own are."""
    if isinstance(part, Leaf):
        return itemgetter(next(places))
    makers = [maker(each, places) for each in part.parts]

    def first(leaves: Sequence[Any]) -> Any:
        return next((value for make in makers if (value := make(leaves)) is not None), None)

    if isinstance(part, Either):
        return first
    kind = part.kind
    optional = part.optional

    def record(leaves: Sequence[Any]) -> Any:
        return None if optional and first(leaves) is None else kind(*[make(leaves) for make in makers])

    return record


class Operator:
    """A function as an operator.

    function: takes anything that `parted` can take apart; returns nothing, a tensor or a tuple of tensors
    results:  the same with empty tensors, from the shapes of the arguments; None for a function without results
    mutates:  names of leaves that it changes in place, such as "state_numbers"
    is_fresh: whether its results are contiguous, and share memory with nothing
    name:     of the operator; default: the function's
    """

    def __init__(
        self,
        function: Callable[..., Any],
        results: Callable[..., Any] | None = None,
        mutates: Sequence[str] = (),
        *,
        is_fresh: bool = False,
        name: str = "",
    ) -> None:
        direct = inspect.unwrap(function)
        name = name or direct.__name__
        hints = get_type_hints(direct)
        given = inspect.signature(direct).parameters
        self._names = [*given]
        self._defaults = {name: each.default for name, each in given.items() if each.default is not each.empty}
        self._given = [parted(name, hints[name]) for name in given]
        self._returns = hints["return"]
        leaves = [leaf for part in self._given for leaf in leaves_of(part)]
        if unknown := {*mutates} - {leaf.name for leaf in leaves}:
            raise ValueError(f"{name} has no {', '.join(sorted(unknown))}, which it mutates")

        places = count()
        makers = [(name, maker(part, places)) for name, part in zip(self._names, self._given, strict=True)]

        @counters_for(())
        def run(*values: Any) -> Any:
            made = direct(**{name: make(values) for name, make in makers})
            return made if is_fresh else _owned(made, values)

        def pretend(*values: Any) -> Any:
            return results(**{name: make(values) for name, make in makers}) if results else None

        marks = {name: f"a{i}" for i, name in enumerate(mutates)}
        taken = ", ".join(leaf.schema(marks.get(leaf.name, "")) for leaf in leaves)
        made = ", ".join("Tensor" for _ in range(_count(self._returns)))
        LIBRARY.define(f"{name}({taken}) -> ({made})", tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{LIBRARY.ns}::{name}", pretend, lib=LIBRARY)
        self.overload: Any = getattr(getattr(torch.ops, LIBRARY.ns), name).default

    def leaves(self, args: Sequence[Any], named: dict[str, Any]) -> list[Any]:
        """The function's arguments as those of the operator."""
        given = self._defaults | dict(zip(self._names, args, strict=False)) | named
        return [leaf for name, part in zip(self._names, self._given, strict=True) for leaf in flat(part, given[name])]

    def __call__(self, args: Sequence[Any], named: dict[str, Any]) -> Any:
        """The function's result, by the operator."""
        made = self.overload(*self.leaves(args, named))
        return self._returns._make(made) if hasattr(self._returns, "_fields") else made


def _count(hint: Any) -> int:
    """The number of tensors that a function with this annotation returns."""
    if hint is NoneType:
        return 0
    return 1 if hint is Tensor else len(get_args(hint) or hint._fields)


def _owned(made: Any, leaves: Sequence[Any]) -> Any:
    """The results, or copies of those that are not contiguous or share memory with a leaf or with one before."""
    if made is None:
        return None
    tensors = [each for leaf in leaves for each in (leaf if isinstance(leaf, list) else [leaf])]
    taken = {each.untyped_storage().data_ptr() for each in tensors if isinstance(each, Tensor)}
    own = []
    for result in [made] if isinstance(made, Tensor) else made:
        if not result.is_contiguous() or result.untyped_storage().data_ptr() in taken:
            result = result.clone(memory_format=torch.contiguous_format)
        taken.add(result.untyped_storage().data_ptr())
        own.append(result)
    return own[0] if isinstance(made, Tensor) else tuple(own)
