"""Docstrings and comments of the package use no word that the glossary of CONTRIBUTING.md excludes."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
HEADING = "| never | write | except |"


class Row(NamedTuple):
    """A row of the table: words or phrases, what to write instead, and the phrases and folders where they are right."""

    words: list[str]
    instead: str
    allowed: list[str]


def rows_of(page: str) -> list[Row]:
    lines = page.splitlines()
    below = lines[lines.index(HEADING) + 2 :]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in takewhile(str.strip, below)]
    return [
        Row(words.split(", "), instead, list(filter(None, allowed.split(", ")))) for words, instead, allowed in cells
    ]


ROWS = rows_of((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))


def texts_of(source: str) -> Iterator[tuple[int, str]]:
    """The docstrings and blocks of comments of a file, each with the number of its first line."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.value
    block, begin = [], 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if begin + len(block) != token.start[0]:
                yield begin, "\n".join(block)
                block, begin = [], token.start[0]
            block.append(token.string.lstrip("#"))
    yield begin, "\n".join(block)


def blanked(pattern: str, text: str) -> str:
    """Put x for each character that the pattern matches, and keep the lines."""
    return re.sub(pattern, lambda found: re.sub(r"[^\n]", "x", found[0]), text, flags=re.MULTILINE | re.IGNORECASE)


def phrase(words: str) -> str:
    """A pattern for words, also over the end of a line."""
    return r"\b" + r"\s+".join(map(re.escape, words.split())) + r"\b"


EVERY = re.compile("|".join(phrase(word) for row in ROWS for word in row.words), re.IGNORECASE)


def uses(source: str, name: str) -> list[str]:
    """Each use of an excluded word in a file, as file:line and what to write instead."""
    found = []
    if not EVERY.search(source):  # which most files end with
        return found
    for begin, text in texts_of(source):
        plain = blanked(r'`[^`]*`|"[^"]*"|^ *\w+(, \w+)*:', text)  # code, values, and names of arguments
        for words, instead, allowed in ROWS if EVERY.search(plain) else ():
            prose = blanked("|".join(map(phrase, allowed)) or r"\Z", plain)
            for word in [] if name.startswith(tuple(allowed)) else words:
                for match in re.finditer(phrase(word), prose, re.IGNORECASE):
                    line = begin + prose[: match.start()].count("\n")
                    found.append(f"{name}:{line}: {word!r}, write {instead}")
    return found


def uses_in(*places: str) -> dict[str, list[str]]:
    paths = sorted({path for place in places for path in (ROOT / place, *(ROOT / place).rglob("*")) if path.is_file()})
    names = [str(path.relative_to(ROOT)) for path in paths if path.suffix == ".py"]
    return {name: uses((ROOT / name).read_text(encoding="utf-8"), name) for name in names}


def test_no_docstring_or_comment_uses_a_word_that_the_glossary_excludes():
    found = uses_in("kernels", "speculative")
    assert len(found) > 300
    wrong = [use for each in found.values() for use in each]
    assert not wrong, "\n".join(wrong)


EXAMPLE = '''"""The law of `law`, or joint_law, is no power
law, and used as `past` of what is made by
itself.

law: the argument
"""
x = "anew"  # as told: "so many" and `behind`
# one word here is elder, and this phrase goes so
# many lines
'''


def test_uses_are_found_in_docstrings_and_comments_and_not_in_code():
    assert uses(EXAMPLE, "kernels/example.py") == [
        "kernels/example.py:1: 'law', write distribution",
        "kernels/example.py:2: 'by itself', write automatically, alone",
        "kernels/example.py:7: 'told', write given, reported, distinguished",
        "kernels/example.py:8: 'so many', write this many, n, the number of",
        "kernels/example.py:8: 'elder', write earlier, first",
    ]
    assert uses('"""A law."""', "speculative/losslessness/law.py") == []
