"""Mutants of a module's functions: each changes one place of the syntax tree, and a test should fail for it.

A change replaces the text of a node alone, so all lines keep their numbers, and Triton, which reads the source of its
kernels from their file, finds the mutant there, which it does not with mutmut's; cosmic-ray's operators drop no
statement and swap no arguments.
"""

import ast
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import NamedTuple

BINARY = {
    "+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "//", "**": "*", "<<": ">>", ">>": "<<", "&": "|", "|": "&",
    "^": "&", "and": "or", "or": "and", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "in": "not in", "not in": "in", "is": "is not", "is not": "is",
}  # fmt: skip
TOKEN = re.compile(r"not\s+in|is\s+not|and|or|in|is|<<|>>|\*\*|//|[<>=!]=|[-+*/%&|^<>]")
NAMES = {"min": "max", "minimum": "maximum", "argmin": "argmax", "any": "all", "floor": "ceil", "DRAFT": "TARGET"}
NAMES |= {other: name for name, other in NAMES.items()}
SYMMETRIC = {"min", "max", "minimum", "maximum", "isinstance", "logaddexp", "equal", "add"}  # in their arguments
SPEED = {"num_warps", "num_stages", "eviction_policy", "cache_modifier", "enable_fp_fusion", "sem", "strict"}
SKIPPED = {"annotation", "returns", "decorator_list"}  # of a node


class Mutant(NamedTuple):
    """A change of a file: `original`, the changed lines in one, becomes `replacement`.

    function:   its name, after its class's
    occurrence: how many equal changes of the function are before
    start, end: where in the file, in bytes, `put` takes the place of what is there
    """

    file: str
    function: str
    operator: str
    original: str
    replacement: str
    occurrence: int
    line: int
    start: int
    end: int
    put: str

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """The mutant's name, which stays when other lines change."""
        return self.file, self.function, self.original, self.replacement, self.occurrence

    def applied(self, source: str) -> str:
        """The file's text with the change."""
        text = source.encode()
        return (text[: self.start] + self.put.encode() + text[self.end :]).decode()


def mutants(file: str, source: str) -> list[Mutant]:
    """All mutants of a file's functions and methods; some may not compile."""
    text, found, equal = source.encode(), [], Counter()
    for function, body in _functions(ast.parse(source)):
        for operator, start, end, put in _Changes(text).of_all(body):
            put += "\n" * (text[start:end].count(b"\n") - put.count("\n"))
            first, last = text.rfind(b"\n", 0, start) + 1, (text.find(b"\n", end) + len(text)) % len(text)
            original = " ".join(text[first:last].decode().split())
            replacement = " ".join((text[first:start].decode() + put + text[end:last].decode()).split())
            key = file, function, operator, original, replacement
            line = text.count(b"\n", 0, start) + 1
            found.append(Mutant(*key, equal[key], line, start, end, put))
            equal[key] += 1
    return found


def chosen(found: list[Mutant], source: str, most: int | None) -> list[Mutant]:
    """At most `most` mutants of each function that compile, by many operators, and the same ones in every run."""
    functions = defaultdict(list)
    for mutant in sorted(found, key=_hash):
        functions[mutant.function].append(mutant)
    kept = []
    for several in functions.values():
        operators = Counter()
        place = {}  # among those by its operator
        for mutant in several:
            place[mutant] = operators[mutant.operator]
            operators[mutant.operator] += 1
        ranked = sorted(several, key=place.get)
        kept += islice((mutant for mutant in ranked if _compiles(mutant.applied(source))), most)
    return sorted(kept, key=lambda mutant: mutant.start)


def _hash(mutant: Mutant) -> str:
    return hashlib.sha256(repr((mutant.operator, *mutant.key)).encode()).hexdigest()


def _compiles(source: str) -> bool:
    try:
        compile(source, "<mutant>", "exec")
    except SyntaxError:
        return False
    return True


def _functions(tree: ast.Module) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Names and statements, without the docstring, of functions and of classes' methods; nested ones belong to them."""
    for node in tree.body:
        several = [(f"{node.name}.", each) for each in node.body] if isinstance(node, ast.ClassDef) else [("", node)]
        for prefix, each in several:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + each.name, each.body[ast.get_docstring(each) is not None :]


class _Changes:
    """The changes of nodes of a file: operator, start, end, and what is put there."""

    def __init__(self, text: bytes):
        self.text, self.starts = text, [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def start(self, node: ast.AST) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.AST) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.AST) -> str:
        return self.text[self.start(node) : self.end(node)].decode()

    def of_all(self, nodes: list) -> Iterator[tuple[str, int, int, str]]:
        """The changes of nodes and of all below them."""
        for node in nodes:
            yield from self.statement(node)
            if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.arguments):
                continue
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and self.of(node).startswith("logger."):
                continue
            yield from self.expression(node)
            fields = [value for name, value in ast.iter_fields(node) if name not in SKIPPED]
            below = [each for field in fields for each in (field if isinstance(field, list) else [field])]
            yield from self.of_all([
                each
                for each in below
                if isinstance(each, ast.AST) and not (isinstance(each, ast.keyword) and each.arg in SPEED)
            ])  # fmt: skip

    def statement(self, node: ast.AST) -> Iterator[tuple[str, int, int, str]]:
        """Without the statement, where the function can run without it."""
        match node:
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Break() | ast.Continue():
                yield "drop", self.start(node), self.end(node), "pass"
            case ast.Assign(targets=[ast.Subscript() | ast.Attribute()]):
                yield "drop", self.start(node), self.end(node), "pass"
            case ast.Assign(targets=[ast.Name(id=name)]):
                if any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node.value)):
                    yield "drop", self.start(node), self.end(node), "pass"

    def expression(self, node: ast.AST) -> Iterator[tuple[str, int, int, str]]:
        match node:
            case ast.Compare():
                yield from self.between("compare", [node.left, *node.comparators])
            case ast.BoolOp():
                yield from self.between("boolean", node.values)
            case ast.BinOp():
                yield from self.between("arithmetic", [node.left, node.right])
            case ast.AugAssign():
                yield from self.between("arithmetic", [node.target, node.value])
            case ast.UnaryOp() if not isinstance(node.operand, ast.Constant):
                yield "sign", self.start(node), self.start(node.operand), ""
            case ast.Constant(value=bool()):
                yield "constant", self.start(node), self.end(node), str(not node.value)
            case ast.Constant(value=int() | float()):
                for value in (node.value + 1, node.value - 1):
                    if value != node.value:  # as with 1e20
                        yield "constant", self.start(node), self.end(node), f"({value})" if value < 0 else str(value)
            case ast.Name(ctx=ast.Load()) if node.id in NAMES:
                yield "name", self.start(node), self.end(node), NAMES[node.id]
            case ast.Attribute() if node.attr in NAMES:
                yield "name", self.end(node) - len(node.attr), self.end(node), NAMES[node.attr]
            case ast.Subscript(ctx=ast.Load()):
                inner = node.slice
                bounds = [inner.lower, inner.upper] if isinstance(inner, ast.Slice) else getattr(inner, "elts", [inner])
                for name in bounds:
                    if isinstance(name, ast.Name):
                        yield "index", self.start(name), self.end(name), f"{name.id} - 1"
            case ast.Call():
                yield from self.call(node)
        if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.UnaryOp):
            yield "condition", self.start(node.test), self.end(node.test), f"not ({self.of(node.test)})"

    def between(self, operator: str, nodes: list[ast.expr]) -> Iterator[tuple[str, int, int, str]]:
        for left, right in pairwise(nodes):
            found = TOKEN.search(self.text[self.end(left) : self.start(right)].decode())
            put = BINARY.get(" ".join(found[0].split())) if found else None
            if put is not None:
                yield operator, self.end(left) + found.start(), self.end(left) + found.end(), put

    def call(self, node: ast.Call) -> Iterator[tuple[str, int, int, str]]:
        """Two arguments in each other's place, or one with a name left out."""
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        for one, other in pairwise(node.args):
            same = self.of(one) == self.of(other) or isinstance(one, ast.Starred) or isinstance(other, ast.Starred)
            if not same and name not in SYMMETRIC:
                between = self.text[self.end(one) : self.start(other)].decode()
                yield "swap", self.start(one), self.end(other), self.of(other) + between + self.of(one)
        launch = isinstance(node.func, ast.Subscript)  # of a kernel, which needs all arguments
        arguments = [] if launch else [*node.args, *node.keywords]
        for place, argument in enumerate(arguments):
            if isinstance(argument, ast.keyword) and argument.arg is not None and argument.arg not in SPEED:
                start = self.end(arguments[place - 1]) if place else self.start(argument)
                first_of_several = not place and len(arguments) > 1
                end = self.start(arguments[1]) if first_of_several else self.end(argument)
                yield "keyword", start, end, ""
