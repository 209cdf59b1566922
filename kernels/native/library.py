"""The CPU kernels as a shared library: compiled once for a machine, by its own compiler, and kept in the user's cache.

A kernel is compiled for the processor that it runs on, which takes some five seconds, and found again by its sources,
the compiler and the processor. Threads are OpenMP's, of the same runtime as PyTorch's, so that both share one pool.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC")
SHARE = 1 << 19  # bytes that take longer to read than threads take to wait for each other
SWITCH = "HEAVYPATH_NATIVE"  # the environment variable that turns the kernels off with "0"


@lru_cache(1)
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None, which a log line explains, where they cannot be or are not to be compiled."""
    if os.environ.get(SWITCH) == "0":
        logger.info("%s=0: no compiled kernels, PyTorch's operations instead", SWITCH)
        return None
    compiler = _compiler()
    if compiler is None:
        logger.warning(
            "no C++ compiler: decoding on this CPU takes PyTorch's operations, which are several times slower; "
            "install g++ (apt install g++), or set CXX to a compiler with OpenMP"
        )
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler)))
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip().partition("\n")[0]
    except OSError as error:
        reason = str(error)
    logger.warning("%s cannot compile the CPU kernels, so PyTorch's operations stay: %s", compiler, reason)
    return None


def compiled() -> ctypes.CDLL:
    """`library`, where it is known to be there."""
    kernels = library()
    assert kernels is not None
    return kernels


def thread_count(bytes_read: int | None = None) -> int:
    """How many threads a kernel takes: as many as PyTorch, but each must have SHARE bytes of weights to read."""
    threads = torch.get_num_threads()
    return threads if bytes_read is None else max(1, min(threads, bytes_read // SHARE))


def _compiler() -> str | None:
    given = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [given] if given else ["g++", "c++", "clang++"])), None)


def _compiled(compiler: str) -> Path:
    """The library's file, compiled now if it is not there yet."""
    sources = sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")))
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    key = hashlib.sha256("\n".join([version, *FLAGS, _processor()]).encode())
    for source in sources:
        key.update(source.read_bytes())
    name = f"native-{key.hexdigest()[:20]}.so"
    path = _cache() / name
    if not path.exists():
        logger.info("compiling kernels for this CPU, once: %s", path)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            objects = {source: f"{folder}/{source.stem}.o" for source in sources if source.suffix == ".cpp"}

            def run(arguments: list[str]) -> None:
                subprocess.run([compiler, *FLAGS, *arguments], check=True, capture_output=True, text=True)

            with ThreadPoolExecutor() as pool:
                list(pool.map(run, [["-c", str(source), "-o", made] for source, made in objects.items()]))
            whole = Path(folder) / name
            run(["-shared", *objects.values(), "-o", str(whole)])
            whole.replace(path)  # whole or not at all, for other processes that look for it
    return path


def _processor() -> str:
    """What tells a processor from one that may not know its instructions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _cache() -> Path:
    """A folder of the user for what is compiled; one for this process if that cannot be written."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "heavypath"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        is_own = folder.stat().st_uid == os.getuid()  # nobody else says what this process loads
        if is_own and os.access(folder, os.W_OK):
            return folder
    except OSError:
        is_own = False
    logger.warning(
        "%s %s: the kernels are compiled for this process alone, which takes some seconds; set XDG_CACHE_HOME to a "
        "folder of yours", folder, "cannot be written" if is_own else "is not a folder of this user",
    )  # fmt: skip
    return Path(_of_process().name)


@lru_cache(1)
def _of_process() -> tempfile.TemporaryDirectory[str]:
    """A folder that goes when the process ends."""
    return tempfile.TemporaryDirectory(prefix="heavypath-")
