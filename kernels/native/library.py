"""The CPU kernels as a shared library: compiled once on each machine, and cached in the user's cache folder.

The library is compiled for the processor that it runs on, or for an older one that HEAVYPATH_MARCH names. This takes
about five seconds. The cache key is a hash of the sources, the compiler, its flags and the processor. A cached file is
loaded only if no other user can have written it, and if it is complete: it ends with the digest of all bytes before.
Threads are OpenMP's, of the same runtime as PyTorch's, so that both share one pool.
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
# When GCC compiles for some Intel processors it prefers vectors of 256 bits, and a pass over many rows is slower.
X86_FLAGS = ("-mprefer-vector-width=512",)
SHARE = 1 << 19  # bytes for each thread: to read them takes longer than to synchronise threads
PATIENCE = 10.0  # seconds to wait for `compiler --version`
DIGEST = hashlib.sha256().digest_size
SWITCH = "HEAVYPATH_NATIVE"  # the environment variable that turns the kernels off with "0"
MARCH = "HEAVYPATH_MARCH"  # the environment variable with the processor to compile for; "native" is this one
CPUINFO = Path("/proc/cpuinfo")
LEVELS = {  # of x86-64: the flags in /proc/cpuinfo that each level adds to those before it
    "x86-64-v2": "cx16 lahf_lm pni popcnt sse4_1 sse4_2 ssse3",
    "x86-64-v3": "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave",
    "x86-64-v4": "avx512bw avx512cd avx512dq avx512f avx512vl",
}


@lru_cache(1)
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels; None, with a log line that says why, if they cannot or should not be compiled.

    Raises ValueError if HEAVYPATH_MARCH is unknown, or if this processor cannot run it.
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
        # Load the open file that was checked; its name may be another file by now. The loader needs it to stay open.
        return ctypes.CDLL(f"/proc/self/fd/{file}")
    except OSError as error:
        logger.warning("the compiled CPU kernels cannot be loaded, so PyTorch's operations stay: %s", error)
        return None


def compiled() -> ctypes.CDLL:
    """Return `library()`, which must not be None."""
    kernels = library()
    assert kernels is not None
    return kernels


def thread_count(bytes_read: int | None = None) -> int:
    """Return a kernel's number of threads: PyTorch's number, or fewer so that each reads SHARE bytes of weights."""
    import torch  # not above: `heavypath info` needs the library's name without importing PyTorch

    threads = torch.get_num_threads()
    if bytes_read is None:
        return threads
    enough = max(1, bytes_read // SHARE)
    return min(threads, enough)


def has_tiles() -> bool:
    """Return whether the compiled kernels multiply bf16 in tiles (AMX), and the system allows it; see tiles.h."""
    return bool(compiled().tiles())


def compiled_for() -> str | None:
    """Return the instruction set and vector width that the compiled kernels report of themselves.

    For example "x86-64-v4, 512-bit vectors", with ", AMX" if bf16 is multiplied in tiles; None if there are no compiled
    kernels.
    """
    kernels = library()
    if kernels is None:
        return None
    kernels.instructions.restype = ctypes.c_char_p
    tiles = ", AMX" if has_tiles() else ""
    return f"{kernels.instructions().decode()}, {kernels.vector_bits()}-bit vectors{tiles}"


def march() -> str:
    """Return the processor to compile for: HEAVYPATH_MARCH if it is set, else "native".

    Raises ValueError if it is unknown, or if this processor cannot run it.
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
    has: list[str] = []
    if platform.machine() == "x86_64":
        found = re.search(r"^flags\s*: (.+)$", CPUINFO.read_text(), re.M)
        if found:
            has = found[1].split()
    lacking = sorted({*needed} - {*has})
    if lacking:
        raise ValueError(
            f"{MARCH}={given}: this processor ({platform.machine()}) lacks {', '.join(lacking)}; name a lesser one of "
            f"{', '.join(LEVELS)}, or leave {MARCH} unset to compile for this one"
        )
    return given


def flags() -> tuple[str, ...]:
    """Return the compiler's flags. Raises ValueError for a HEAVYPATH_MARCH that `march` refuses."""
    more = X86_FLAGS if platform.machine() == "x86_64" else ()
    return (f"-march={march()}", *more, *FLAGS)


def compiler_path() -> str | None:
    """Return the path of the C++ compiler: the one that CXX names, else g++, c++ or clang++; None if not found."""
    given = os.environ.get("CXX")
    for name in [given] if given else ["g++", "c++", "clang++"]:
        found = shutil.which(name)
        if found:
            return found
    return None


def cache_folder() -> Path:
    """Return the folder of compiled kernels. Raises RuntimeError for a user without a home."""
    given = os.environ.get("XDG_CACHE_HOME")
    caches = Path(given) if given else Path.home() / ".cache"
    return caches / "heavypath"


def _run(arguments: list[str], seconds: float | None = None) -> str:
    """Run a program and return its standard output."""
    done = subprocess.run(
        arguments,
        check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=seconds,
    )
    return done.stdout


def library_name(compiler: str) -> str:
    """Return the library's file name, with a hash of the sources, compiler, flags and processor."""
    version = _run([compiler, "--version"], PATIENCE)
    facts = "\n".join([version, *flags(), _processor()])
    key = hashlib.sha256(facts.encode())
    for source in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        key.update(source.read_bytes())
    return f"native-{key.hexdigest()[:20]}.so"


def _file(compiler: str) -> int:
    """Open the library in the user's cache, and compile it first if it is not there; returns a descriptor."""
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
    """Compile the library in a temporary folder and return its bytes."""
    with tempfile.TemporaryDirectory(prefix="heavypath-") as folder:
        commands = []
        objects = []
        for source in SOURCES.glob("*.cpp"):
            made = f"{folder}/{source.stem}.o"
            commands.append([compiler, *flags(), "-c", str(source), "-o", made])
            objects.append(made)
        with ThreadPoolExecutor() as pool:
            list(pool.map(_run, commands))
        whole = Path(folder) / "native.so"
        _run([compiler, *flags(), "-shared", *objects, "-o", str(whole)])
        return whole.read_bytes()


def _processor() -> str:
    """Return a description that differs between processors with different instruction sets."""
    lines = CPUINFO.read_text().splitlines()
    facts = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return "\n".join(sorted(facts))


def _own(path: str | Path, kind: int = 0, folder: int | None = None) -> int:
    """Open a file or folder that only this user may write to; OSError for any other, and for a link.

    So no other user can decide what this process loads.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | kind
    opened = os.open(path, flags, dir_fd=folder)
    facts = os.fstat(opened)
    is_own = facts.st_uid == os.getuid()
    others_may_write = facts.st_mode & 0o022
    if is_own and not others_may_write:
        return opened
    os.close(opened)
    raise PermissionError(
        f"'{path}' is of user {facts.st_uid} with mode {facts.st_mode & 0o7777:o}, expected one of user {os.getuid()} "
        "that nobody else may write to"
    )


def _whole(name: str, folder: int) -> int:
    """Open a cached library and check its digest; OSError if it is not as `_keep` wrote it."""
    file = _own(name, folder=folder)
    try:
        with open(file, "rb", closefd=False) as opened:
            found = opened.read()
        code = found[:-DIGEST]
        digest = found[-DIGEST:]
        if hashlib.sha256(code).digest() != digest:
            raise OSError("it was cut off or changed")
    except OSError:
        os.close(file)
        raise
    return file


def _keep(code: bytes, name: str, folder: int) -> None:
    """Write a library and its digest into the cache, atomically: other processes see the whole file or none."""
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
    """Put the library into a memory file of this process, and return its descriptor."""
    logger.warning(
        "the kernels are compiled for this process alone, which takes some seconds, since they cannot be kept: %s; "
        "set XDG_CACHE_HOME to a folder of yours that nobody else may write to",
        reason,
    )
    file = os.memfd_create("heavypath-native")
    with open(file, "wb", closefd=False) as opened:
        opened.write(code)
    return file
