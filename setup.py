"""All metadata is in pyproject.toml, but for four things that it cannot say.

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

The README as a package index shows it, where its links lead to the repository.

And that equal sources make equal archives, to the byte: all files have the date of SOURCE_DATE_EPOCH, by default the
first that an archive can have, and no owner.
"""

import gzip
import io
import os
import re
import tarfile
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel
from setuptools.command.sdist import sdist

DATE = int(os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800"))  # 1980-01-01; wheels take it from there
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


class SourceDistribution(sdist):
    """An archive of the sources that depends on nothing else."""

    def make_archive(self, base_name: str, format: str, **options: object) -> str:
        """Pack the folder of this name."""
        packed, folder = io.BytesIO(), Path(options.get("base_dir") or base_name)
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for path in sorted([folder, *folder.rglob("*")]):
                archive.add(path, recursive=False, filter=anonymous)
        file = Path(f"{base_name}.tar.gz")
        file.write_bytes(gzip.compress(packed.getvalue(), mtime=DATE))
        return str(file)


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """The member of an archive without a date and an owner of its own."""
    member.mtime, member.uid, member.gid, member.uname, member.gname = DATE, 0, 0, "", ""
    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    return member


def readme() -> str:
    """README.md with whole addresses in the place of relative ones."""
    home = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\1{home}/raw/main/", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?:|#)", rf"\1{home}/blob/main/", text)


setup(
    cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel, "sdist": SourceDistribution},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
