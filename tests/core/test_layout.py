"""The house's rules: which folder imports which, and what keeps a file readable.

`ORDER` is the layout. A folder imports those before it and never those after it; within a folder modules may import
each other, but in no circle.
"""

import ast
import importlib
import re
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import torch

import heavypath
import heavypath.speculative
from heavypath.kernels.step_kernels import FUNCTIONS, StepKernels
from heavypath.speculative import SpeculativeDecoder, names

ROOT = Path(__file__).parents[2]
ORDER = (
    "kernels", "reference", "names", "waiting", "files", "losslessness", "trees", "ranks", "models", "streaming",
    "drafts", "costs", "training", "demo", "options", "decoding", "processors", "output", "serving", "root", "suite",
    "http", "cli", "package",
)  # fmt: skip
APART = [{"trees", "models"}]  # neither of the two imports the other
MOST_LINES = 500
FREE_OF_NAMES = (  # take any arguments alike
    "zip", "zip_longest", "gcd", "print", "ctx.save_for_backward", "func", "field_validator",
)  # fmt: skip


@cache
def modules() -> dict[str, Path]:
    """Every module of the package, by its dotted name."""
    found = {}
    for folder in ("kernels", "speculative"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(("heavypath", *parts))] = path
    return found


def with_bench() -> list[Path]:
    return [*modules().values(), *(ROOT / "bench").rglob("*.py")]


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


@cache
def run_nodes(path: Path) -> list[ast.AST]:
    """Without what type checkers alone read."""
    unread = set()
    for node in nodes(path):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            unread.update(map(id, (inner for each in node.body for inner in ast.walk(each))))
    return [node for node in nodes(path) if id(node) not in unread]


def folder_of(name: str) -> str:
    """One of ORDER. What starts the command belongs to the command, and two files have a place of their own."""
    parts = name.split(".")
    if parts[1] == "kernels":
        return "kernels"
    if parts[2:] == ["__main__"]:
        return "cli"
    if parts[2:] in (["names"], ["options"], ["waiting"]):
        return parts[2]
    return parts[2] if len(parts) > 3 else "root"


@cache
def imports() -> dict[str, set[str]]:
    """The modules of the package that each one imports, wherever in the file; types alone are not counted."""
    found = {}
    for name, path in modules().items():
        taken = set()
        for node in run_nodes(path):
            if isinstance(node, ast.Import):
                taken |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name} imports by a relative path"
                taken |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        taken |= {f"{one}.__init__" for one in taken}
        found[name] = taken & modules().keys() - {name}
    return found


def test_folders_import_only_those_before_them():
    assert {folder_of(name) for name in modules()} == {*ORDER}
    wrong = []
    for name, taken in imports().items():
        for other in taken:
            one, another = folder_of(name), folder_of(other)
            if ORDER.index(another) > ORDER.index(one) or {one, another} in APART:
                wrong.append(f"{name} ({one}) imports {other} ({another})")
    assert not wrong, "\n".join(wrong)


OPTIONS = re.compile(
    r"drafts\.(?!draft$|kinds$|changes$|model$|own$|__init__$)|ranks\.(?!peers$|__init__$)|models\.recurrent\.|"
    r"models\.prompt_inputs$|output\.(?!generation$|__init__$)|decoding\.(graphs|growing|processing|typical|verifiers)$|"
    r"(processors|streaming|serving|suite|http|cli|training|demo|losslessness|files|reference)\.|costs\.streamed$|"
    r"(adapting|tree_by_profile|profile|calibration|visits|gains|drawing_temperatures|walking|ways|comparison|"
    r"custom_generate|distillation|layer_choice|loading|__main__)$"
)


def is_option(name: str) -> bool:
    return bool(OPTIONS.match(name.removeprefix("heavypath.speculative.")))


def test_the_core_imports_no_option_also_not_in_a_function():
    """It asks `names.load` for one, where a call asks for it. The table of names is right."""
    core = [name for name in modules() if name.startswith("heavypath.speculative.") and not is_option(name)]
    wrong = {name: {one for one in imports()[name] if is_option(one)} for name in core}
    assert {name: taken for name, taken in wrong.items() if taken} == {}
    assert {f"heavypath.speculative.{name}" for name in ("decoder", "decoding.step", "tree_policy")} < {*core}
    for name, module in names.FEATURES.items():
        assert hasattr(importlib.import_module(module), name), name


def test_each_function_of_a_step_is_where_the_table_says():
    assert StepKernels.__annotations__.keys() == FUNCTIONS.keys()
    for name, places in FUNCTIONS.items():
        assert places.keys() == {"triton", "native", "torch"}
        for impl, place in places.items():
            found = getattr(StepKernels(impl), name)
            assert (found.__module__, found.__name__) == tuple(f"heavypath.kernels.{place}".rsplit(".", 1))


def test_a_class_has_one_name_in_the_whole_package():
    found = {}
    for name, path in modules().items():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(name)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def test_the_core_asks_nothing_what_kind_it_is():
    """Drafts, trees and models say of themselves what decoding has to know."""
    kinds, wrong = (
        re.compile(r"Draft$|Drafts$|Forward$|Stream$|Head$|Heads$|^Growth$|^TokenTree$|Replan|FollowBatch"),
        [],
    )
    for name, path in modules().items():
        if name != "heavypath.speculative.decoder" and not name.startswith("heavypath.speculative.decoding."):
            continue
        for node in nodes(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                asked = [one.id for one in ast.walk(node.args[1]) if isinstance(one, ast.Name)]
                wrong += [f"{name}: {ast.unparse(node)}" for one in asked if kinds.search(one)]
    assert not wrong, wrong


def test_no_modules_import_each_other_in_a_circle():
    list(TopologicalSorter(imports()).static_order())  # raises CycleError with the circle


def test_the_package_itself_is_imported_by_nothing_below_it():
    """`heavypath.speculative` imports everything: who imports it from within hides what it needs."""
    inner = {name for name in modules() if folder_of(name) not in ("cli", "package")}
    wrong = [name for name in inner if "heavypath.speculative.__init__" in imports()[name]]
    assert not wrong


def test_modules_are_short():
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules().items()}
    assert not {name: length for name, length in lengths.items() if length > MOST_LINES}


def test_every_module_says_what_it_is():
    for name, path in modules().items():
        text = ast.get_docstring(nodes(path)[0]) or ""
        assert text.split("\n\n")[0].rstrip().endswith((".", ":")), f"{name}: its first paragraph is a sentence"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_private_name_is_used_in_another_file():
    own = {path: definitions(path) for path in with_bench()}
    defined, wrong = set().union(*own.values()), []
    for path in own:
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("heavypath"):
                wrong += [f"{path.name}: {alias.name}" for alias in node.names if is_private(alias.name)]
            elif isinstance(node, ast.Attribute) and node.attr in defined and node.attr not in own[path]:
                wrong.append(f"{path.name}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def definitions(path: Path) -> set[str]:
    """Private names that a file defines: functions, classes, variables and attributes of self."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    # NamedTuple's own methods begin with an underscore.
    return {name for name in found if is_private(name)} - {"_replace", "_asdict", "_fields"}


def test_no_call_hides_its_arguments_in_a_tuple():
    """`f(*given, seed)` does not say what f is given. To unpack a shape or what a comprehension makes is no secret."""
    wrong = []
    for path in modules().values():
        for node in nodes(path):
            for argument in node.args if isinstance(node, ast.Call) else ():
                if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Name | ast.Attribute):
                    text, called = ast.unparse(argument.value), ast.unparse(node.func)
                    known = called in FREE_OF_NAMES or called.endswith("add_row")
                    if not known and not text.endswith(("shape", "lead", "stride")):
                        wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {called}(*{text})")
    assert not wrong, "\n".join(wrong)


def test_new_tensors_have_a_device_and_the_memory_of_kernels_has_a_type():
    """Else torch gives them its defaults, which users set. Modules are made where users want them."""
    with_numbers = {f"torch.{name}" for name in ("empty", "zeros", "ones")}
    makers = with_numbers | {
        f"torch.{name}" for name in ("full", "tensor", "arange", "eye", "rand", "randint", "randperm")
    }
    found = []
    for name, path in modules().items():
        text = path.read_text(encoding="utf-8")
        for node in nodes(path):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            maker, given = ast.unparse(node.func), {keyword.arg for keyword in node.keywords}
            if maker not in makers or None in given:
                continue
            is_free = "nn.Module" in text or "nn.Parameter" in text
            untyped = maker in with_numbers and name.startswith("heavypath.kernels.") and "dtype" not in given
            if untyped or ("device" not in given and not is_free):
                found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert not found


def test_a_step_enters_what_the_page_of_a_step_says_that_it_enters(demo_pair):
    """And that is few files; those of a step whose forward pass is in PyTorch."""
    block = (ROOT / "docs" / "step.md").read_text(encoding="utf-8").split("```\ngenerate(prompt)")[1].split("```")[0]
    listed, folder = [], ""
    for name in re.findall(r"[\w/]+(?:\.py|/)(?=[\s,])", block):
        folder = name[: name.rstrip("/").rindex("/") + 1] if "/" in name.rstrip("/") else folder
        listed.append(folder + name.removeprefix(folder))
    assert 12 < len(listed) <= 26
    entered, here = set(), str(ROOT) + "/.editable/heavypath/"

    def note(frame, event, given):
        if event == "call" and frame.f_code.co_filename.startswith(here):
            entered.add(frame.f_code.co_filename.removeprefix(here))

    decoders = [SpeculativeDecoder(*demo_pair[:2], method) for method in ("sequoia", "dyspec", "typical-lossy")]
    for decoder in decoders:
        decoder._target._native = None
    sys.setprofile(note)
    try:
        for decoder in decoders:
            decoder.generate(torch.tensor([[14, 438, 199]]), 6, 0.8, top_k=20)
    finally:
        sys.setprofile(None)
    assert [name for name in listed if not any(file.startswith(name) for file in entered)] == []


def test_every_test_that_the_makefile_names_is_there():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = re.findall(r"\b(\w+/test_\w+\.py)(?:::(test_\w+))?", text)
    assert len(named) > 15
    for path, test in named:
        assert f"def {test}" in (ROOT / "tests" / path).read_text(encoding="utf-8"), f"{path}::{test}"


def test_type_checkers_see_the_public_names_that_there_are_at_run_time():
    stub = nodes(ROOT / "speculative" / "__init__.pyi")
    seen = {alias.asname: node.module for node in stub if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == names.PUBLIC
    for name in seen:
        assert getattr(heavypath.speculative, name) is getattr(heavypath, name)
