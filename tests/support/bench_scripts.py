"""The scripts of bench/, which import each other by their names."""

import importlib
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def script(name):
    for folder in map(str, (BENCH, BENCH / "research", BENCH / "kernels")):
        if folder not in sys.path:
            sys.path.append(folder)  # at the end, where it hides no other module
    return importlib.import_module(name)
