"""The names that a function's code uses: where it may keep state between calls, and whether this state can be read."""

import builtins
import dis
import functools
import importlib.util
import types
from typing import Any, NamedTuple

# Names of functions and attributes: of files, of the program's environment, of what a cache counts, and those by which
# code sets names that are not written in it.
_FILES = {
    "open",
    "fdopen",
    "exists",
    "isfile",
    "is_file",
    "isdir",
    "is_dir",
    "listdir",
    "scandir",
    "iterdir",
    "touch",
    "mkdir",
    "makedirs",
    "unlink",
    "getmtime",
    "getsize",
    "read_text",
    "write_text",
    "read_bytes",
    "write_bytes",
    "fromfile",
    "tofile",
    "memmap",
}
_ELSEWHERE = _FILES | {
    "putenv",
    "unsetenv",
    "cache_info",
    "exec",
    "eval",
    "globals",
    "vars",
    "setattr",
    "delattr",
    "__setattr__",
    "__dict__",
    "__import__",
    "import_module",
    "_getframe",
    "currentframe",
}
_ELSEWHERE_MODULES = (
    "subprocess",
    "socket",
    "_socket",
    "posix",
    "nt",
    "mmap",
    "ctypes",
    "multiprocessing",
    "tempfile",
    "shutil",
    "sqlite3",
    "shelve",
    "dbm",
    "urllib.request",
    "http.client",
    "urllib3",
    "requests",
    "httpx",
    "aiohttp",
    "redis",
)


class NamesInCode(NamedTuple):
    """The names in a function's code, and in the functions in it.

    every:     names of global variables, attributes and modules, and constant names given to `getattr`
    of_global: names of global variables and of built-in functions that it reads
    stored:    names of attributes that it sets or deletes
    modules:   full names of the modules that it imports
    """

    every: frozenset[str]
    of_global: frozenset[str]
    stored: frozenset[str]
    modules: frozenset[str]


@functools.lru_cache(4096)
def names_in(code: types.CodeType, package: str) -> NamesInCode:
    """The names in some code of a module of a package."""
    of_global, stored, modules = set[str](), set[str](), set[str]()
    instructions = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    for index, each in enumerate(instructions):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            of_global.add(each.argval)
        elif each.opname in ("STORE_ATTR", "DELETE_ATTR"):
            stored.add(each.argval)
        elif each.opname == "IMPORT_NAME":
            dots = "." * instructions[index - 2].argval  # the level of a relative import
            modules.add(importlib.util.resolve_name(dots + each.argval, package) if dots and package else each.argval)
    every = {*code.co_names, *of_global}
    if "getattr" in every:
        every |= {const for const in code.co_consts if isinstance(const, str) and const.isidentifier()}
    found = NamesInCode(*map(frozenset, (every, of_global, stored, modules)))
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found = NamesInCode(*map(frozenset.union, found, names_in(const, package)))
    return found


def kept_elsewhere(names: NamesInCode, variables: dict[str, Any]) -> str:
    """A name by which code reads or writes what cannot be seen, such as a file; "" if there is none.

    variables: the global variables of the code's module. A function of this name in them is a user's, and so is an
    attribute that the code sets.
    """
    own = {name for name in names.of_global if variables.get(name, _built_in(name)) is not _built_in(name)}
    attributes = names.every - names.of_global - names.stored
    return min((attributes | (names.of_global - own)) & _ELSEWHERE, default="")


@functools.lru_cache(1024)
def is_elsewhere(module: str) -> bool:
    """Whether what a module does can neither be read nor undone, such as requests to other programs."""
    return any(module == each or module.startswith(f"{each}.") for each in _ELSEWHERE_MODULES)


def _built_in(name: str) -> object:
    return getattr(builtins, name, None)
