"""How much of the package a user loads and a reader enters: `python bench/loaded.py`, no arguments.

loaded   modules of heavypath, and their lines, in `sys.modules` after `from heavypath import SpeculativeDecoder`
decoded  the same after a decoder was made and has generated 64 tokens, on a CPU
entered  files of heavypath of which a function runs meanwhile
density  tokens of Python on a line of code in the files entered; imports, comments and docstrings are not counted

tests/integration/test_loaded.py holds the figures. They may only fall, except for lines of dense code that is spread
out, and for those that make a step faster.
"""

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MODULES = """
print(*{m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "heavypath"}, sep="\\n")
"""
LOAD = """
import sys
from heavypath import SpeculativeDecoder, load_demo_pair
"""
PAIR = """
target, draft, tokenizer = load_demo_pair()
prompt = tokenizer("def read_lines(path):", return_tensors="pt").input_ids
"""
DECODE = """
SpeculativeDecoder(target, draft).generate(prompt, 64, temperature=0.6)
"""
RECORD = """
entered = set()
sys.setprofile(lambda frame, event, argument: entered.add(frame.f_code.co_filename))
"""
RECORDED = """
sys.setprofile(None)
print(*entered, sep="\\n")
"""
PROGRAMS = {
    "loaded": LOAD + MODULES,
    "decoded": LOAD + PAIR + DECODE + MODULES,
    "entered": LOAD + PAIR + RECORD + DECODE + RECORDED,
}
COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING, tokenize.FSTRING_START) if (
    sys.version_info >= (3, 12)
) else (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)  # fmt: skip


class Size(NamedTuple):
    """Figures of some files: how many, their lines, and the mean number of tokens on a line of code."""

    files: int
    lines: int
    density: float


def files_of(program: str) -> set[Path]:
    """Files of the package that a program, run in a process of its own, prints."""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    folders = (ROOT / "kernels", ROOT / "speculative")
    resolved = {Path(line).resolve() for line in shown.splitlines() if line.endswith(".py")}
    return {path for path in resolved if any(path.is_relative_to(folder) for folder in folders)}


def tokens_and_lines(path: Path) -> tuple[int, int]:
    """Tokens in the code of a file, and the lines that have any."""
    source = path.read_text(encoding="utf-8")
    left_out = set()
    for node in ast.walk(ast.parse(source)):
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_import or is_text:
            left_out.update(range(node.lineno, node.end_lineno + 1))
    read = tokenize.generate_tokens(io.StringIO(source).readline)
    places = [token.start[0] for token in read if token.type in COUNTED and token.start[0] not in left_out]
    return len(places), len(set(places))


def size_of(paths: set[Path]) -> Size:
    """The figures of these files."""
    counts = [tokens_and_lines(path) for path in paths]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
    tokens, code = sum(count for count, _ in counts), sum(count for _, count in counts)
    return Size(len(paths), lines, tokens / code)


def main() -> None:
    """Print all."""
    for name, program in PROGRAMS.items():
        size = size_of(files_of(program))
        print(f"{name}: {size.files} files, {size.lines:,} lines, {size.density:.1f} tokens on a line of code")


if __name__ == "__main__":
    main()
