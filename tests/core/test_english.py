"""Docstrings and comments are plain English: what a docstring begins with, and how long a sentence is.

A kernel's own text is left alone: it is a part of the source that Triton compiles.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("kernels/**/*.py", "speculative/*.py", "speculative/[!m-z]*/**/*.py", "speculative/[m-z]*/**/*.py")
# A docstring begins with a verb or a noun, so that it can be read without what stands before it.
NO_FIRST_WORDS = {"What", "Whether", "How", "That", "Which", "Those", "Where", "When", "Who", "Why"}
MOST_WORDS, MOST_WORDS_OF_COMMENTS = 30, 40

DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
ARGUMENT = re.compile(r"^ *(?:[-*]|\*{0,2}`?[\w.\[\]]+`?(?:(?:,| and| or) *\*{0,2}`?[\w.\[\]]+`?)*:|\d+\.) ")
COLUMN = re.compile(r"^[\w.]+ {2,}\S")  # a name in a list of two columns
END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!\beq)(?<!\bcf)(?<!\bvs)(?<!\bSec)(?<!\bFig)[.!?][)*\"'`”]*\s+(?=\S)")


def is_kernel(node: ast.AST) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ()))


def documented(node: ast.AST, name: str = "", *, is_public: bool = True) -> Iterator[tuple[str, str, int, bool]]:
    """All docstrings: the owner's name, the text, its first line, and whether the owner is public."""
    if isinstance(node, ast.Module | DEFINITIONS) and (text := ast.get_docstring(node)):
        yield name or "module", text, node.body[0].lineno, is_public
    inner = is_public and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, DEFINITIONS):
            if not is_kernel(child):
                full = f"{name}.{child.name}".lstrip(".")
                yield from documented(child, full, is_public=inner and not child.name.startswith("_"))
        else:
            yield from documented(child, name, is_public=is_public)


def sentences(text: str) -> list[str]:
    """Sentences of prose. Code, tables and formulas on lines of their own are none; an argument begins a new one."""
    parts, in_code = [[]], False
    for line in text.split("\n"):
        shown = line.startswith("    ") and not ARGUMENT.match(line)  # an example or a formula
        if line.lstrip().startswith("```"):
            in_code = not in_code
            parts.append([])
        elif (
            in_code
            or not line.strip()
            or line.lstrip().startswith(("|", ">>>"))
            or (shown and (not parts[-1] or parts[-1][-1].endswith(":")))
        ):
            parts.append([])
        elif ARGUMENT.match(line) or COLUMN.match(line):
            parts.append([line.strip()])
        else:
            parts[-1].append(line.strip())
    return [one for part in parts if part for one in END.split(" ".join(part)) if one]


def words(sentence: str) -> int:
    """The number of words; what is in backticks is one."""
    return sum(any(letter.isalnum() for letter in word) for word in re.sub(r"`[^`]*`", "code", sentence).split())


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments and their first lines; lines that follow each other are one."""
    kernels = [
        range(node.lineno, node.end_lineno + 1)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, DEFINITIONS) and is_kernel(node)
    ]
    first, last, column, lines = 0, 0, 0, []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or any(token.start[0] in inside for inside in kernels):
            continue
        text = token.string.lstrip("#!:").removeprefix(" ")
        alone = not token.line[: token.start[1]].strip()
        if lines and token.start == (last + 1, column) and alone:
            lines.append(text)
        else:
            if lines:
                yield first, "\n".join(lines)
            first, column, lines = token.start[0], token.start[1], [text]
        last = token.start[0]
    if lines:
        yield first, "\n".join(lines)


def violations(path: Path) -> list[str]:
    source, found = path.read_text(encoding="utf-8"), []
    for name, text, line, is_public in documented(ast.parse(source)):
        if re.split(r"\W", text, maxsplit=1)[0] in NO_FIRST_WORDS:
            found.append(f"  {line} {name} begins with: {text.splitlines()[0][:60]}")
        for one in sentences(text) if is_public else ():
            if words(one) > MOST_WORDS:
                found.append(f"  {line} {name} has {words(one)} words: {one}")
    for line, text in comments(source):
        found += [
            f"  {line} comment of {words(one)} words: {one}"
            for one in sentences(text)
            if words(one) > MOST_WORDS_OF_COMMENTS
        ]
    return found


@pytest.mark.parametrize("files", FILES)
def test_docstrings_and_comments_are_plain(files):
    found = {path: wrong for path in sorted(ROOT.glob(files)) if (wrong := violations(path))}
    lines = [line for path, wrong in found.items() for line in (str(path.relative_to(ROOT)), *wrong)]
    assert not found, f"{sum(map(len, found.values()))} in {len(found)} files\n" + "\n".join(lines)
