"""The kernels as a repository of Hugging Face's Kernel Hub, generated from kernels/.

    python bench/hub/generate.py build/hub

The folder has the sources in the form that kernel-builder takes (`build.toml`, `torch-ext/`), and beside them what it
would build of them: kernels of Triton need no compiler, so `build/torch-cuda` and `build/torch-cpu` are copies with
`metadata.json`. `kernels.get_local_kernel` loads it from there.

Each file of kernels/ is taken over but for what the Hub does not allow:

    imports of heavypath.kernels   are relative
    numpy                          functions that compute with it raise, and those that check values on a CPU with it
                                   return; so there is no reference of what is drawn or verified
    C++                            native/ stays away; `native.py` says that there is none
    annotations                    are not evaluated, so that older Pythons read them
    operators                      have the namespace that the Hub gives to this build

files/ has what is in no other place: the card, the layers, tests and benchmarks.
"""

import ast
import base64
import hashlib
import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE, FILES = ROOT / "kernels", Path(__file__).parent / "files"
BACKENDS = ("cuda", "cpu")
NUMPY = "import numpy as np\n"
FUTURE = "from __future__ import annotations\n"
NAMESPACE = 'Library("heavypath", "FRAGMENT")'
NATIVE = '''"""What stands for the C++ of the package heavypath: functions that have it there ask `library` first."""


def library():
    return None


def refuse(function):
    """Say nothing: nothing is recorded here."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return None
'''
OPS = """import torch

ops = torch.ops.{id}


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{id}::{{op_name}}"
"""
COMPATIBLE = '''"""The kernel by its name, where versions of `kernels` before 0.10 look for it."""

import importlib.util
import sys
from pathlib import Path

_file = Path(__file__).parents[1] / "__init__.py"
_spec = importlib.util.spec_from_file_location("{id}", _file)
_module = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
globals().update({{name: value for name, value in vars(_module).items() if not name.startswith("__")}})
'''


def converted(text: str, depth: int) -> str:
    """A module of kernels/ so many folders down, as the Hub takes it."""
    text = without_numpy(text) if NUMPY in text or ".numpy()" in text else text
    dots = "." * (depth + 1)
    text = re.sub(r"from heavypath\.kernels\.native(?:\.\w+)? import", f"from {dots}native import", text)
    text = re.sub(r"from heavypath\.kernels\.", f"from {dots}", text)
    if NAMESPACE in text:
        text = text.replace(NAMESPACE, 'Library(ops.name, "FRAGMENT")')
        text = text.replace("import torch\n", f"import torch\n\nfrom {dots}_ops import ops\n", 1)
    return with_future(text)


def with_future(text: str) -> str:
    """The module with annotations that are not evaluated."""
    docstring = ast.parse(text).body[0]
    lines = text.splitlines(keepends=True)
    end = docstring.end_lineno or 0
    return "".join(lines[:end]) + "\n" + FUTURE + "".join(lines[end:])


def without_numpy(text: str) -> str:
    """The module without what computes with numpy."""
    lines = text.splitlines(keepends=True)
    cuts: list[tuple[int, int, str]] = []  # lines from, to, and what takes their place
    tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and computes(node):
            cuts.append((node.lineno, node.end_lineno or 0, ""))
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not any(map(computes, (*node.body, *node.decorator_list))):
            continue
        cuts += [(each.lineno, each.end_lineno or 0, "") for each in node.decorator_list if computes(each)]
        first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
        indent = " " * first.col_offset
        if "check" in node.name:
            stub = f"{indent}return None  # values are looked at in the package alone\n"
        else:
            why = f"{node.name}: this repository has kernels for GPUs; for a CPU take the package heavypath"
            stub = f'{indent}raise NotImplementedError("{why}")\n'
        cuts.append((first.lineno, node.end_lineno or 0, stub))
    outer = [cut for cut in cuts if not any(a <= cut[0] and cut[1] <= b and (a, b) != cut[:2] for a, b, _ in cuts)]
    for begin, end, stub in sorted(outer, reverse=True):
        lines[begin - 1 : end] = [stub]
    return "".join(lines).replace(NUMPY, "")


def computes(node: ast.AST) -> bool:
    """Whether code has numpy's name in it, but for annotations."""
    if isinstance(node, ast.AnnAssign):
        return node.value is not None and computes(node.value)
    if isinstance(node, ast.FunctionDef):
        return any(map(computes, (*node.body, *node.decorator_list)))
    names = isinstance(node, ast.Name) and node.id == "np", isinstance(node, ast.Attribute) and node.attr == "numpy"
    return any(names) or any(map(computes, ast.iter_child_nodes(node)))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def generate(folder: Path) -> None:
    """Write the repository into a folder, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(FILES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "LICENSE", folder)
    package = folder / "torch-ext" / "heavypath"
    for path in sorted(SOURCE.rglob("*.py")):
        inner = path.relative_to(SOURCE)
        if inner.parts[0] != "native" and not (package / inner).exists():  # the layers are from files/
            write(package / inner, converted(path.read_text(encoding="utf-8"), len(inner.parts) - 1))
    write(package / "native.py", NATIVE)
    for backend in BACKENDS:
        build(folder, package, backend)


def build(folder: Path, package: Path, backend: str) -> None:
    """What kernel-builder makes of the sources for a backend."""
    general = tomllib.loads((folder / "build.toml").read_text(encoding="utf-8"))["general"]
    sources = sorted(path for path in package.rglob("*.py") if "__pycache__" not in path.parts)
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:7]
    identity = f"_{general['name']}_{backend}_{digest}"
    variant = folder / "build" / f"torch-{backend}"
    shutil.copytree(package, variant)
    write(variant / "_ops.py", OPS.format(id=identity))
    write(variant / general["name"] / "__init__.py", COMPATIBLE.format(id=f"{identity}_by_name"))
    files = sorted(path for path in variant.rglob("*") if path.is_file())
    sums = {
        path.relative_to(variant).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in files
    }
    metadata = {key: general[key] for key in ("name", "version", "license", "upstream")}
    metadata |= {"id": identity, "python-depends": [], "backend": {"type": backend}}
    metadata["digest"] = {"algorithm": "sha256", "files": sums}
    write(variant / "metadata.json", json.dumps(metadata, indent=2) + "\n")


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
