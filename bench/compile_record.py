"""Figures of kernels that were compiled before, and what they depend on: where nothing of that changed, they hold.

A case is known by a key, a hash of all that decides its machine code:

    the version of triton, the architecture, and what is assumed about its GPUs
    the code of the case and its arguments
    the modules of kernels/ that the case imports, and those that they import, and so on
    fake_gpu.py and machine_code.py, which launch it and read it

Of code only what runs is hashed: comments, docstrings and line numbers change no key. Figures are kept in two files of
the same form. RECORD is in the repository, so that a fresh clone need not compile everything; CACHE is this machine's.
"""

import ast
import hashlib
import inspect
import json
import textwrap
from collections.abc import Iterable, Mapping
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import fake_gpu
import machine_code
import triton
from machine_code import Figures

PACKAGE = "heavypath.kernels"
RECORD = Path(__file__).parent / "results" / "compile_report.json"
CACHE = Path(__file__).parent.parent / "build" / "compile_report.json"

Kernels = dict[str, Figures]  # of the kernels that a case launches, by an identity that equal kernels of one run share


def key_of(arch: int, name: str, case: partial) -> str:
    """The key of a case on an architecture. case: a function of compile_cases.py with its arguments."""
    source = inspect.getsource(case.func)
    parts = [triton.__version__, arch, fake_gpu.GPUS[arch], code(source), case.args, case.keywords]
    parts += [code(inspect.getsource(module)) for module in (fake_gpu, machine_code)]
    parts += [(used, module_code(used)) for used in modules_used(source)]
    return f"sm_{arch} {name}: {hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"


def modules_used(source: str) -> list[str]:
    """Names of the modules of kernels/ that this code imports, and those that they import, and so on."""
    used: set[str] = set()
    new = imported(source)
    while new:
        used |= new
        new = {name for user in new for name in imported(module_source(user))} - used
    return sorted(used)


@cache
def imported(source: str) -> set[str]:
    """Names of the modules of kernels/ that this code imports itself, inside functions too."""
    names: list[str] = []
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            names += [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        elif isinstance(node, ast.Import):
            names += [each.name for each in node.names]
    prefix = f"{PACKAGE}."
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


@cache
def module_source(name: str) -> str:
    found = find_spec(f"{PACKAGE}.{name}")
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"no module {PACKAGE}.{name}")
    return Path(found.origin).read_text(encoding="utf-8")


def module_code(name: str) -> str:
    return code(module_source(name))


@cache
def code(source: str) -> str:
    """The code without comments and docstrings."""
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def read(path: Path) -> dict[str, Kernels]:
    """The kernels of each case by its key; none if there is no such file, or one of another form."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["fields"] != list(Figures._fields):
            return {}
        return {key: {name: Figures(*row) for name, row in rows.items()} for key, rows in kept["kernels"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write(path: Path, kept: Mapping[str, Kernels]) -> None:
    """A file that `read` reads, with one line for each case."""
    head = f'"triton": "{triton.__version__}",\n"fields": {json.dumps(Figures._fields)},\n'
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(kernels)}" for key, kernels in kept.items())
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'{{\n{head}"kernels": {{\n{lines}\n}}\n}}\n', encoding="utf-8")


def differences(kept: Kernels, compiled: Kernels) -> list[str]:
    """What is otherwise in the second, but for seconds; kernels are compared in the order of their launches."""
    if [row.kernel for row in kept.values()] != [row.kernel for row in compiled.values()]:
        return [f"{names(kept.values())} became {names(compiled.values())}"]
    return [
        f"{before.kernel}: {field} {getattr(before, field)} became {getattr(after, field)}"
        for before, after in zip(kept.values(), compiled.values(), strict=True)
        for field in Figures._fields
        if field != "seconds" and getattr(before, field) != getattr(after, field)
    ]


def names(rows: Iterable[Figures]) -> str:
    return ", ".join(row.kernel for row in rows)
