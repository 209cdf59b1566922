"""Tree speculative decoding for Hugging Face models.

Importing it registers attn_implementation="heavypath" with transformers. The `heavypath` command imports the names only
when one of them is asked for, so that it starts fast.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from heavypath.speculative.costs.threads import is_command, wait_passively

if TYPE_CHECKING:
    from heavypath.speculative.public import *  # noqa: F403

if is_command(sys.argv, sys.orig_argv):
    wait_passively(os.environ)  # before PyTorch is imported, which reads the environment once
else:
    import_module("heavypath.speculative.public")


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":  # what else Python asks packages for; it must not import anything
        raise AttributeError(f"module 'heavypath.speculative' has no attribute {name!r}")
    public = import_module("heavypath.speculative.public")
    return public.__all__ if name == "__all__" else getattr(public, name)


def __dir__() -> list[str]:
    return sorted(import_module("heavypath.speculative.public").__all__)
