"""All metadata is in pyproject.toml. Here is what it cannot say: how an editable install finds the package's folders.

`kernels/` is heavypath.kernels and `speculative/` is heavypath.speculative. For folders with other names than their
packages setuptools installs an import hook, which Python follows but no editor or type checker does. So an editable
install makes a folder in which the names agree,

    .editable/heavypath/kernels      ->  kernels/
    .editable/heavypath/speculative  ->  speculative/

and puts its path into the environment, as for any project with a source folder of its own. Wheels are built from the
folders themselves.
"""

import os
from pathlib import Path

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel

FOLDERS = ("kernels", "speculative")


class EditableWheel(editable_wheel):
    """An editable install through links that have the names of the packages."""

    def finalize_options(self) -> None:
        """Make the links, and say that the packages are there."""
        package = Path(".editable", "heavypath")
        package.mkdir(parents=True, exist_ok=True)
        for name in FOLDERS:
            link = package / name
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(name, package), target_is_directory=True)
        self.distribution.package_dir = {"": ".editable"}
        self.distribution.packages = ["heavypath", *self.distribution.packages]  # a path serves packages below one name
        super().finalize_options()


setup(cmdclass={"editable_wheel": EditableWheel})
