"""The CPU kernels as a shared library: compiled once for a machine, by its own compiler, and kept in the user's cache.

A kernel is compiled for the processor that it runs on, or for a lesser one that HEAVYPATH_MARCH names, which takes some
five seconds, and found again by its sources, the compiler, its flags and the processor. A file is loaded only if nobody
else may have written it, and if it is whole: it ends with the digest of all before. Threads are OpenMP's,
of the same runtime as PyTorch's, so that both share one pool.
"""

import ctypes
import hashlib
import logging
import os
import platform
import re
import secrets
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fPIC")
SHARE = 1 << 19  # bytes that take longer to read than threads take to wait for each other
PATIENCE = 10.0  # seconds for a compiler to say which one it is
DIGEST = hashlib.sha256().digest_size
SWITCH = "HEAVYPATH_NATIVE"  # the environment variable that turns the kernels off with "0"
MARCH = "HEAVYPATH_MARCH"  # the environment variable that names a lesser processor to compile for; "native" is this one
CPUINFO = Path("/proc/cpuinfo")
LEVELS = {  # of x86-64: what each needs beside those before it, by the names of /proc/cpuinfo
    "x86-64-v2": "cx16 lahf_lm pni popcnt sse4_1 sse4_2 ssse3",
    "x86-64-v3": "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave",
    "x86-64-v4": "avx512bw avx512cd avx512dq avx512f avx512vl",
}


@lru_cache(1)
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None, with a log line that says why, if they cannot or should not be compiled.

    ValueError for a HEAVYPATH_MARCH that is unknown, or that this processor cannot run.
    """
    if os.environ.get(SWITCH) == "0":
        logger.info("%s=0: no compiled kernels, PyTorch's operations instead", SWITCH)
        return None
    compiler = compiler_path()
    if compiler is None:
        logger.warning(
            "no C++ compiler: decoding on this CPU takes PyTorch's operations, which are several times slower; "
            "install g++ (apt install g++), or set CXX to a compiler with OpenMP"
        )
        return None
    try:
        file = _file(compiler)
    except (subprocess.SubprocessError, OSError) as error:
        reason = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        reason = reason.strip().partition("\n")[0]
        logger.warning("%s cannot compile the CPU kernels, so PyTorch's operations stay: %s", compiler, reason)
        return None
    try:
        # The file that was checked, whatever has that name by now. It stays open, since the loader knows it by this.
        return ctypes.CDLL(f"/proc/self/fd/{file}")
    except OSError as error:
        logger.warning("the compiled CPU kernels cannot be loaded, so PyTorch's operations stay: %s", error)
        return None


def compiled() -> ctypes.CDLL:
    """`library`, where it is known to be there."""
    kernels = library()
    assert kernels is not None
    return kernels


def thread_count(bytes_read: int | None = None) -> int:
    """The number of threads of a kernel: as many as PyTorch, but each must have SHARE bytes of weights to read."""
    import torch  # not above: `heavypath info` asks for the library's name without starting PyTorch

    threads = torch.get_num_threads()
    return threads if bytes_read is None else max(1, min(threads, bytes_read // SHARE))


def compiled_for() -> str | None:
    """The instructions that the compiled kernels were built for, and the width of their vectors, by their own word.

    As "x86-64-v4, 512-bit vectors"; None where there are no compiled kernels.
    """
    kernels = library()
    if kernels is None:
        return None
    kernels.instructions.restype = ctypes.c_char_p
    return f"{kernels.instructions().decode()}, {kernels.vector_bits()}-bit vectors"


def march() -> str:
    """The processor to compile for: HEAVYPATH_MARCH, if it is set, or "native".

    ValueError for one that is unknown, or that this processor cannot run.
    """
    given = os.environ.get(MARCH) or "native"
    if given == "native":
        return given
    if given not in LEVELS:
        raise ValueError(f"{MARCH} must be native, {', '.join(LEVELS)}, or not set, got {given!r}")
    needed: list[str] = []
    for level, names in LEVELS.items():
        needed += names.split()
        if level == given:
            break
    found = re.search(r"^flags\s*: (.+)$", CPUINFO.read_text(), re.M) if platform.machine() == "x86_64" else None
    lacking = sorted({*needed} - {*(found[1].split() if found else ())})
    if lacking:
        raise ValueError(
            f"{MARCH}={given}: this processor ({platform.machine()}) lacks {', '.join(lacking)}; name a lesser one of "
            f"{', '.join(LEVELS)}, or leave {MARCH} unset to compile for this one"
        )
    return given


def flags() -> tuple[str, ...]:
    """The compiler's flags. Raises what `march` does."""
    return (f"-march={march()}", *FLAGS)


def compiler_path() -> str | None:
    """The C++ compiler that kernels are compiled by: that of CXX, or the first that is found; None for none."""
    given = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [given] if given else ["g++", "c++", "clang++"])), None)


def cache_folder() -> Path:
    """The folder of compiled kernels. RuntimeError for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "heavypath"


def _run(arguments: list[str], seconds: float | None = None) -> str:
    """The output of a program."""
    done = subprocess.run(
        arguments, check=True, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace",
        timeout=seconds,
    )  # fmt: skip
    return done.stdout


def library_name(compiler: str) -> str:
    """The library's name in the cache: another one for other sources, flags, compilers and processors."""
    key = hashlib.sha256("\n".join([_run([compiler, "--version"], PATIENCE), *flags(), _processor()]).encode())
    for source in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        key.update(source.read_bytes())
    return f"native-{key.hexdigest()[:20]}.so"


def _file(compiler: str) -> int:
    """A descriptor of the library, from the user's cache, or compiled now and kept there."""
    name = library_name(compiler)
    try:
        place = cache_folder()
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = _own(place, os.O_DIRECTORY)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        return _in_memory(_compiled(compiler), error)
    try:
        try:
            return _whole(name, folder)
        except FileNotFoundError:
            logger.info("compiling kernels for this CPU, once: %s", place / name)
        except OSError as error:
            logger.warning("%s is compiled anew: %s", place / name, error)
        code = _compiled(compiler)
        try:
            _keep(code, name, folder)
            return _whole(name, folder)
        except OSError as error:
            return _in_memory(code, error)
    finally:
        os.close(folder)


def _compiled(compiler: str) -> bytes:
    """The library, compiled in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="heavypath-") as folder:
        objects = {source: f"{folder}/{source.stem}.o" for source in SOURCES.glob("*.cpp")}
        with ThreadPoolExecutor() as pool:
            list(pool.map(_run, [[compiler, *flags(), "-c", str(each), "-o", made] for each, made in objects.items()]))
        whole = Path(folder) / "native.so"
        _run([compiler, *flags(), "-shared", *objects.values(), "-o", str(whole)])
        return whole.read_bytes()


def _processor() -> str:
    """A text that differs between processors that may not know each other's instructions."""
    lines = CPUINFO.read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _own(path: str | Path, kind: int = 0, folder: int | None = None) -> int:
    """A descriptor of a file or folder that nobody but this user may write to; OSError for any other, and for a link.

    Nobody else says what this process loads.
    """
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | kind, dir_fd=folder)
    facts = os.fstat(opened)
    if facts.st_uid == os.getuid() and not facts.st_mode & 0o022:
        return opened
    os.close(opened)
    raise PermissionError(
        f"'{path}' is of user {facts.st_uid} with mode {facts.st_mode & 0o7777:o}, expected one of user {os.getuid()} "
        "that nobody else may write to"
    )


def _whole(name: str, folder: int) -> int:
    """A descriptor of a library of the cache; OSError for one that is not as `_keep` wrote it."""
    file = _own(name, folder=folder)
    try:
        with open(file, "rb", closefd=False) as opened:
            found = opened.read()
        if hashlib.sha256(found[:-DIGEST]).digest() != found[-DIGEST:]:
            raise OSError("it was cut off or changed")
    except OSError:
        os.close(file)
        raise
    return file


def _keep(code: bytes, name: str, folder: int) -> None:
    """Write a library into the cache, and its digest after it: whole or not at all, for anyone who looks for it."""
    written = f"{name}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(written, flags, 0o600, dir_fd=folder), "wb") as file:
        try:
            file.write(code + hashlib.sha256(code).digest())
            file.flush()
            os.fsync(file.fileno())
            os.replace(written, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            os.unlink(written, dir_fd=folder)
            raise


def _in_memory(code: bytes, reason: Exception) -> int:
    """A descriptor of a library that only this process has."""
    logger.warning(
        "the kernels are compiled for this process alone, which takes some seconds, since they cannot be kept: %s; "
        "set XDG_CACHE_HOME to a folder of yours that nobody else may write to", reason,
    )  # fmt: skip
    file = os.memfd_create("heavypath-native")
    with open(file, "wb", closefd=False) as opened:
        opened.write(code)
    return file
