"""The scripts of bench/, which import each other by their names."""

import importlib
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def script(name):
    if str(BENCH) not in sys.path:
        sys.path.append(str(BENCH))  # at the end, where it hides no other module
    return importlib.import_module(name)
