"""For the site: the package under its own name in build/reference, where the tool that reads docstrings finds it.

kernels/ must have no __init__.py (CONTRIBUTING.md says why), and that tool enters no folder without one. So it gets one
of links that has an empty one. The package need not be installed for it.
"""

import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "build" / "reference" / "heavypath"


def on_startup(**_: Any) -> None:
    """Make the links before anything is read."""
    shutil.rmtree(PACKAGE.parent, ignore_errors=True)
    (PACKAGE / "kernels").mkdir(parents=True)
    (PACKAGE / "kernels" / "__init__.py").touch()
    for path in (ROOT / "kernels").iterdir():
        if path.name != "__pycache__":
            (PACKAGE / "kernels" / path.name).symlink_to(path)
    (PACKAGE / "speculative").symlink_to(ROOT / "speculative")
    (PACKAGE / "__init__.py").symlink_to(ROOT / "speculative" / "package" / "__init__.py")
