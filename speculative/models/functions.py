"""Find out which functions a model's forward pass calls, and whether someone replaced or patched any of them.

A class's forward method may be replaced, and so may any function that it looks up by name: `apply_rotary_pos_emb` in a
modelling module, an attention in transformers' registry, `scaled_dot_product_attention` in PyTorch. Such a patch may
change only some layers or only long sequences, so a short trial run does not show it. This module looks at the code
instead. A function belongs to a library if its own code, the code of everything it wraps, and the code of everything in
its closure lie in the library's folder. This is true of the decorators that transformers uses. It is never true of a
user's function, even if `functools.wraps` copied the name and module of a library's function to it.
"""

import sys
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers.utils.generic import GeneralInterface

FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, partial)
Owner = dict[str, Any] | type | GeneralInterface  # where a name is looked up


def _folder_with(file: Any) -> str:
    return str(Path(str(file)).parent) + "/"


_OUR_FOLDER = str(Path(__file__).parents[2]) + "/"
_FOLDERS = (_folder_with(torch.__file__), _folder_with(transformers.__file__), _OUR_FOLDER)
_OUR_PACKAGE = __name__.split(".")[0]
_PACKAGES = ("torch", "transformers", "builtins", "typing", "collections", "enum", _OUR_PACKAGE)
_KERNELS = ("fla", "causal_conv1d", "mamba_ssm")
_INSTALLED = ("site-packages", "dist-packages")
_TORCH = (torch.__dict__, nn.functional.__dict__)
# The parts of transformers that compute. The rest of it reads files, writes logs, and calls these parts.
_PARTS = ("models.", "integrations.", "masking_utils", "modeling_", "activations")
_FOLLOWED = ("torch.nn.modules.", *(f"transformers.{part}" for part in _PARTS))


class _Found(NamedTuple):
    """The functions that modules of certain classes call.

    lookups: where each name is looked up
    values:  what was found there
    codes:   the code objects of the functions, which may be exchanged as well
    """

    lookups: list[tuple[Owner, str]]
    values: list[Any]
    codes: list[Any]


_known: dict[tuple[frozenset[type], frozenset[str]], _Found] = {}


def functions_of(types: Iterable[type], attentions: Iterable[str]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The functions that modules of these classes call now, and the functions' code objects, in a fixed order.

    The results of two calls are equal if nothing was replaced in between. An entry without code has None there.

    attentions: the attention implementations that the modules may ask for, by name
    """
    found = _found(frozenset(types), frozenset(attentions))
    values = tuple(map(_comparable, found.values))
    return values, tuple(found.codes)


def strange_functions(types: Iterable[type], attentions: Iterable[str]) -> list[str]:
    """The names of functions that are called and are not a library's own: patches, or methods of a user's class.

    types, attentions: as in `functions_of`
    """
    found = _found(frozenset(types), frozenset(attentions))
    strange: set[str] = set()
    for (owner, name), value in zip(found.lookups, found.values, strict=True):
        if not _is_usual(owner, value):
            strange.add(f"{_name_of(owner)}.{name}")
    return sorted(strange)


def is_as_written(kind: type) -> bool:
    """Whether a class has the forward method that its source file defines, wrapped by libraries' decorators at most."""
    *decorators, innermost = _chain(kind.forward)
    code: Any = getattr(innermost, "__code__", None)
    if code is None:
        return False
    home = _module_with_forward(kind)
    file = getattr(sys.modules.get(home), "__file__", None)
    if file is None:
        if innermost.__module__ != home:
            return False
    elif code.co_filename != file:
        return False
    for decorator in decorators:
        of_decorator: Any = getattr(decorator, "__code__", None)
        if of_decorator is not None and not of_decorator.co_filename.startswith(_FOLDERS):
            return False
    return True


def _module_with_forward(kind: type) -> str:
    """The name of the module of the class from which a class has its forward method."""
    for base in kind.__mro__:
        if "forward" in vars(base):
            return base.__module__
    return kind.__module__


def is_published(kind: type, home: str) -> bool:
    """Whether a class is defined in the module `home` and still has the forward method that is written there."""
    if kind.__module__ != home:
        return False
    innermost = _chain(kind.forward)[-1]
    code = getattr(innermost, "__code__", None)
    name = getattr(code, "co_qualname", None)
    return name == f"{kind.__qualname__}.forward" and is_as_written(kind)


def strange_parts(model: nn.Module, attentions: Iterable[str], hooks: bool = True) -> list[str]:
    """The names of functions that a model calls and that are not its library's own, such as patches.

    attentions: the attention implementations that its modules may ask for, by name
    hooks: whether to include hooks of modules, and forward functions that were set on a module object
    """
    types: set[type] = set()
    of_objects: list[str] = []
    for where, module in model.named_modules():
        types.add(type(module))
        functions = _functions_in(where, module, hooks)
        of_objects += [name for name, value in functions if not is_of_library(value)]
    return strange_functions(types, attentions) + of_objects


def _functions_in(where: str, module: nn.Module, hooks: bool) -> Iterator[tuple[str, Any]]:
    """Names and values of the functions that one module object has: its attributes and, with `hooks`, its hooks.

    where: the module's name. Without `hooks` a `forward` that was set on the object is left out, too.
    """
    for name, value in vars(module).items():
        if not isinstance(value, FUNCTIONS):
            continue
        if name == "forward" and not hooks:
            continue
        function = value.func if isinstance(value, partial) else value
        yield f"{where}.{name}", function
    if not hooks:
        return
    for registered in (module._forward_hooks, module._forward_pre_hooks):
        for hook in registered.values():
            yield f"a hook of {where}", hook


def is_of_library(function: Any) -> bool:
    """Whether a function, all that it wraps and all in its closure belong to PyTorch, transformers or this package.

    False for a functools.partial and for any other callable object that is not a function.
    """
    return _is_own(function, _FOLDERS, set())


def _found(types: frozenset[type], attentions: frozenset[str]) -> _Found:
    known = _known.get((types, attentions))
    if known is not None:
        is_same = known.values == [*map(_look_up, known.lookups)]
        if is_same and known.codes == [*map(_code_of, known.values)]:
            return known
    lookups = [*_all_lookups(types, attentions)]
    values = [*map(_look_up, lookups)]
    codes = [*map(_code_of, values)]
    found = _Found(lookups, values, codes)
    _known[types, attentions] = found
    return found


def _look_up(lookup: tuple[Owner, str]) -> Any:
    owner, name = lookup
    if isinstance(owner, type):
        return getattr(owner, name, None)
    return owner.get(name)


def _code_of(value: Any) -> CodeType | None:
    if type(value) is FunctionType:
        return value.__code__
    return None


def _comparable(value: Any) -> Any:
    if isinstance(value, (type, FunctionType, BuiltinFunctionType, MethodType)):
        return value
    return id(value)


def _all_lookups(types: Iterable[type], attentions: Collection[str]) -> Iterator[tuple[Owner, str]]:
    """All lookups of functions, each an owner and a name, that a call of a module of these classes leads to."""

    def full_name(kind: type) -> tuple[str, str]:
        return kind.__module__, kind.__qualname__

    waiting: list[tuple[Owner, str, type]] = []
    for kind in sorted(types, key=full_name):
        for name in ("__call__", "forward"):
            if hasattr(kind, name):
                waiting.append((kind, name, kind))
    seen: set[tuple[int, str]] = set()
    while waiting:
        owner, name, kind = waiting.pop()
        key = (id(owner), name)
        if key in seen:
            continue
        seen.add(key)
        value = _look_up((owner, name))
        if isinstance(value, GeneralInterface):
            for attention in sorted(attentions):
                waiting.append((value, attention, kind))
        if callable(value) or isinstance(owner, GeneralInterface):  # a registry may lack the name
            yield owner, name
        innermost = _chain(value)[-1]
        if not isinstance(innermost, FunctionType):
            continue
        module = str(innermost.__globals__.get("__name__"))
        if module.startswith(_FOLLOWED):
            for inner_owner, inner_name in _names_in(innermost, kind):
                waiting.append((inner_owner, inner_name, kind))


def _names_in(function: FunctionType, kind: type) -> Iterator[tuple[Owner, str]]:
    """Where a function's code looks up its names: in its module, in PyTorch, and in the class of `self`."""
    for name in _words(function.__code__):
        for owner in (function.__globals__, *_TORCH):
            value = owner.get(name)
            if callable(value) or isinstance(value, GeneralInterface):
                yield owner, name
        of_class = getattr(kind, name, None)
        is_method = isinstance(of_class, FunctionType) and not hasattr(nn.Module, name)
        if is_method or name == "_call_impl":
            yield kind, name


def _words(code: CodeType) -> Iterator[str]:
    """All names in a function's code and in the code of functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _words(constant)


def _chain(function: Any) -> list[Any]:
    """A function and what it wraps (`__wrapped__`), from the outermost to the innermost."""
    chain = [function]
    inner = getattr(function, "__wrapped__", None)
    while inner is not None and inner not in chain:
        chain.append(inner)
        inner = getattr(inner, "__wrapped__", None)
    return chain


def _is_usual(owner: Owner, value: Any) -> bool:
    """Whether this value is the owner's default: the libraries' code, or for a class, code of the class's package."""
    if value is None:
        return True
    if isinstance(owner, type) and isinstance(value, FunctionType):
        folders = _FOLDERS + _folder_of(owner)
        return _is_own(value, folders, set())
    return is_of_library(value)


def _folder_of(kind: type) -> tuple[str, ...]:
    """The folder of the installed package that defines a class; nothing for a class of a user's own program."""
    package = sys.modules.get(_package_in(kind.__module__))
    path = getattr(package, "__file__", None)
    if path is not None and any(each in path for each in _INSTALLED):
        return (_folder_with(path),)
    return ()


def _package_in(module: str) -> str:
    return module.split(".")[0]


def _is_own(value: Any, folders: tuple[str, ...], seen: set[int]) -> bool:
    """Whether a value's code, and that of all it wraps or encloses, is in the folders; True for what has no code.

    seen: ids of values that need no second look
    """
    if id(value) in seen or not callable(value) or _is_kernel(value):
        return True
    seen.add(id(value))
    if isinstance(value, MethodType):
        return _is_own(value.__func__, folders, seen)
    if isinstance(value, type):
        package = _package_in(value.__module__)
        return package in _PACKAGES or package in sys.stdlib_module_names
    if isinstance(value, BuiltinFunctionType):
        return True
    if isinstance(value, FunctionType):
        if not value.__code__.co_filename.startswith(folders):
            return False
        _, *wrapped = _chain(value)
        enclosed = _contents_of(value.__closure__ or ())
        return all(_is_own(each, folders, seen) for each in (*enclosed, *wrapped))
    if isinstance(value, partial):
        return False
    return _package_in(type(value).__module__) == "transformers"


def _is_kernel(value: Any) -> bool:
    """Whether a function comes from a package of kernels, such as `mamba_ssm`, that transformers uses if installed."""
    module = getattr(value, "__module__", "")
    package = _package_in(str(module))
    code = getattr(value, "__code__", None)
    path = getattr(code, "co_filename", package)
    return package in _KERNELS and package in path


def _contents_of(cells: Iterable[Any]) -> Iterator[Any]:
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:  # the cell is empty
            continue


def _name_of(owner: Owner) -> str:
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}"
    if isinstance(owner, dict):
        return owner["__name__"]
    return type(owner).__name__
