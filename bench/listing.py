"""Source files of the package as pages show them. For cog, as tables.py."""

import cog
from tables import BENCH


def python(name: str) -> None:
    """A whole file, by its path below the repository, as a block of Python."""
    source = (BENCH.parent / name).read_text(encoding="utf-8")
    cog.outl(f"```python\n{source.rstrip()}\n```")
