"""How long a user of the command line waits for ten tokens: seconds of a whole process, and of which compilation.

    python bench/first_tokens.py [--rounds 5]

compiled    the kernels for CPUs were compiled before
compiling   the first use on a machine: they are compiled now
PyTorch     without them (HEAVYPATH_NATIVE=0)

A process first loads Python, PyTorch, transformers and the shipped pair; "nothing" does that alone.
"""

import os
import subprocess
import sys
import tempfile
import time
from statistics import median

from common import argument_parser, until_stopped
from rich.console import Console
from rich.table import Table

GENERATE = ["-m", "heavypath.speculative", "generate", "def read_lines(path):", "--max-new-tokens", "10"]
NOTHING = ["-c", "from heavypath.speculative import load_demo_pair; load_demo_pair()"]


def seconds(arguments: list[str], **environment: str) -> float:
    """Of one process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=os.environ | environment)
    return time.perf_counter() - start


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    taken: dict[str, list[float]] = {}
    with until_stopped(), tempfile.TemporaryDirectory() as kept:
        seconds(GENERATE, XDG_CACHE_HOME=kept)
        for _ in range(1 if arguments.miniature else arguments.rounds):
            with tempfile.TemporaryDirectory() as empty:
                ways = {
                    "nothing": lambda: seconds(NOTHING),
                    "compiled": lambda: seconds(GENERATE, XDG_CACHE_HOME=kept),
                    "compiling": lambda empty=empty: seconds(GENERATE, XDG_CACHE_HOME=empty),
                    "PyTorch": lambda: seconds(GENERATE, HEAVYPATH_NATIVE="0"),
                }
                for name, way in ways.items():
                    taken.setdefault(name, []).append(way())
    table = Table("", "seconds, median", "least", "most")
    for name, each in taken.items():
        table.add_row(name, f"{median(each):.1f}", f"{min(each):.1f}", f"{max(each):.1f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
