"""The package heavypath, with all public names of `heavypath.speculative`.

    from heavypath import SpeculativeDecoder, __version__

It imports nothing until a name is used, so `heavypath.kernels` works without transformers.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heavypath.speculative import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]

__version__ = version("heavypath")


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":  # Python itself looks these up; nothing may be imported then
        raise AttributeError(f"module 'heavypath' has no attribute {name!r}")
    package = import_module("heavypath.speculative")
    if name == "__all__":
        return ["__version__", *package.__all__]
    if name not in package.__all__:
        raise AttributeError(f"module 'heavypath' has no attribute {name!r}")
    return getattr(package, name)


def __dir__() -> list[str]:
    return sorted({"__version__", "kernels", *import_module("heavypath.speculative").__all__})
