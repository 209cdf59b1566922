"""How the threads of OpenMP wait for each other. This is read before PyTorch is imported.

PyTorch on a CPU runs an operation on several threads of OpenMP, which wait for each other at its end. By default they
spin, so that the next operation finds them awake. Where another process needs their cores, they spin for a thread that
is not running: small models then take 20 to 180 times as long. With OMP_WAIT_POLICY=PASSIVE they sleep instead. Waking
them costs some 50 microseconds an operation, which only models of a few million parameters notice: they run best on one
thread, which waits for nobody.

OpenMP reads its environment once, when PyTorch is imported. So the `heavypath` command sets it before, unless its user
has; for other programs the package sets nothing.
"""

from collections.abc import Mapping, MutableMapping
from pathlib import Path

WAIT_POLICY = "OMP_WAIT_POLICY"
WAIT_SETTINGS = (WAIT_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")  # of GNU's and of Intel's OpenMP


def is_command(argv: list[str], original: list[str]) -> bool:
    """Whether this process is the `heavypath` command, or `python -m` with the package's name.

    argv, original: sys.argv and sys.orig_argv. While Python looks for the module of -m, the first of argv is "-m".
    """
    if argv[:1] == ["-m"] and "-m" in original:
        return original[original.index("-m") + 1 :][:1] in (["heavypath"], ["heavypath.speculative"])
    return bool(argv) and Path(argv[0]).name == "heavypath"


def wait_passively(environment: MutableMapping[str, str]) -> None:
    """Set OMP_WAIT_POLICY=PASSIVE, unless the environment sets how threads wait. Call before PyTorch is imported."""
    if not waiting(environment):
        environment[WAIT_POLICY] = "PASSIVE"


def waiting(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment's variables that set how threads wait, with their values; empty for OpenMP's default, to spin."""
    return {name: environment[name] for name in WAIT_SETTINGS if name in environment}
