"""Tree speculative decoding for Hugging Face models.

Importing it registers attn_implementation="heavypath" with transformers, but not in the `heavypath` command. A public
name is imported at its first use, so that a program loads only the modules that it needs. For type checkers and editors
the names are in `__init__.pyi`.
"""

import os
import sys
from importlib import import_module
from typing import Any

from heavypath.speculative.names import PUBLIC, load
from heavypath.speculative.waiting import is_command, wait_passively

if is_command(sys.argv, sys.orig_argv):
    wait_passively(os.environ)  # before PyTorch is imported, which reads the environment once
else:
    import_module("heavypath.speculative.models.attn_implementation")  # which registers itself


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return [*PUBLIC]
    if name not in PUBLIC:
        raise AttributeError(f"module 'heavypath.speculative' has no attribute {name!r}")
    found = load(name)
    globals()[name] = found  # the next time Python finds it without asking here
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
