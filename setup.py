"""All metadata is in pyproject.toml, but for three things that it cannot say.

How an editable install finds the package's folders. `kernels/` is heavypath.kernels and `speculative/` is
heavypath.speculative. For folders with other names than their packages setuptools installs an import hook, which Python
follows but no editor or type checker does. So an editable install makes a folder in which the names agree,

    .editable/heavypath/__init__.py  ->  speculative/package/__init__.py
    .editable/heavypath/kernels      ->  kernels/
    .editable/heavypath/speculative  ->  speculative/

and puts its path into the environment, as for any project with a source folder of its own. Wheels are built from the
folders themselves.

Whether the shipped pair belongs to a wheel, of whose 20 MB its weights are nearly all. `HEAVYPATH_DEMO=0 pip wheel .`
leaves them out.

And the README as a package index shows it, where its links lead to the repository.
"""

import os
import re
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

LINKS = {"__init__.py": "speculative/package/__init__.py", "kernels": "kernels", "speculative": "speculative"}


class EditableWheel(editable_wheel):
    """An editable install through links that have the names of the packages."""

    def finalize_options(self) -> None:
        """Make the links, and say that the packages are there."""
        package = Path(".editable", "heavypath")
        package.mkdir(parents=True, exist_ok=True)
        for name, source in LINKS.items():
            link = package / name
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(source, package))
        self.distribution.package_dir = {"": ".editable"}
        super().finalize_options()


class BuildPy(build_py):
    """A build that can do without the weights of the shipped pair."""

    def run(self) -> None:
        """Build, and take the weights away again if they are not wanted: an earlier build may have put them there."""
        super().run()
        if os.environ.get("HEAVYPATH_DEMO") == "0":
            for weights in Path(self.build_lib).glob("heavypath/speculative/demo/*/*.safetensors"):
                weights.unlink()


def readme() -> str:
    """README.md with whole addresses in the place of relative ones."""
    home = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\1{home}/raw/main/", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?:|#)", rf"\1{home}/blob/main/", text)


setup(
    cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
