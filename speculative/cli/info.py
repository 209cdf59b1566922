"""`heavypath info`: what is installed, what the machine is like, and what would make decoding faster here."""

import logging
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import typer

from heavypath.kernels.native.library import cache_folder, compiler_path, library
from heavypath.speculative.cli.support import AsJson, current_load, installation, print_json
from heavypath.speculative.threads import Load, waiting

MAPS = Path("/proc/self/maps")  # the files that this process has in its memory
DRIVER = Path("/proc/driver/nvidia/version")
PROCESSOR = Path("/proc/cpuinfo")
# What changes how decoding runs, of the environment. Only these are shown, since a user may post what is shown.
VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY",
    "LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "HEAVYPATH_NATIVE", "CXX", "XDG_CACHE_HOME",
)  # fmt: skip
OPENMP = {"libgomp": "GNU", "libiomp5": "Intel", "libomp": "LLVM"}


def info(as_json: AsJson = False) -> None:
    """Show versions, processor, threads, load, GPUs and kernels, and what would make decoding faster here."""
    load = current_load()
    here = machine(load)  # first, since the first look for compiled kernels logs why there are none
    facts = installation() | here
    advice = advice_of(facts, load)
    if as_json:
        print_json(facts | {"advice": advice})
        return
    kernels = facts.pop("kernels")
    gpus = facts.pop("gpus")
    rows = {name.replace("_", " "): str(value) for name, value in facts.items() if value is not None}
    rows |= {f"gpu {number}": ", ".join(map(str, gpu.values())) for number, gpu in enumerate(gpus)}
    rows |= {f"kernel {name}": implementation for name, implementation in kernels.items()}
    width = max(map(len, rows)) + 2
    for name, value in rows.items():
        typer.echo(f"{name:<{width}}{value}")
    typer.echo("")
    for sentence in advice or ["Nothing was found that would make decoding faster here."]:
        typer.echo(f"* {sentence}")


def machine(load: Load) -> dict[str, Any]:
    """The processor, its load, the libraries that compute on it, and the GPUs."""
    blas = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    native, reason = _native()
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": load.cores,
        "load": round(load.average, 2),
        "waiting": ", ".join(f"{name}={value}" for name, value in waiting(os.environ).items()) or "OpenMP's default",
        "openmp": _openmp(),
        "blas": blas[1] if blas else "unknown",
        "onednn": torch.backends.mkldnn.is_available(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_kernels": native,
        "cpu_kernels_lack": reason,
        "compiler": _compiler(),
        "cache": _cache(),
        "environment": " ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
        or "nothing set",
        "torch_cuda": torch.version.cuda,
        "nvidia_driver": _driver(),
        "gpus": [_gpu(number) for number in range(torch.cuda.device_count())],
    }


def advice_of(facts: Mapping[str, Any], load: Load) -> list[str]:
    """Sentences that say what would make decoding faster here, from the facts that `info` shows."""
    advice = []
    if not facts["gpus"] and facts["nvidia_driver"]:
        found = "built for CUDA " + facts["torch_cuda"] if facts["torch_cuda"] else "without CUDA"
        advice.append(
            f"An NVIDIA driver ({facts['nvidia_driver']}) was found, but torch {facts['torch']}, {found}, sees no GPU: "
            "install a torch built for a CUDA that this driver has, and check CUDA_VISIBLE_DEVICES."
        )
    if facts["gpus"] and os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        advice.append("TRITON_INTERPRET is set: the kernels run in an interpreter instead of on the GPU; unset it.")
    if load.threads > load.cores:
        advice.append(
            f"PyTorch uses {load.threads} threads, but this process may use {load.cores} cores: "
            f"set OMP_NUM_THREADS={load.cores}."
        )
    if load.busy:
        free = max(1, round(load.cores - load.average))
        fewer = f" or take fewer threads (OMP_NUM_THREADS={free})" if free < load.threads else ""
        advice.append(f"The machine is busy ({load}): timings are noisy; wait until it is idle{fewer}.")
    if load.threads > 1 and not facts["gpus"]:
        advice.append(
            "In programs of your own, set OMP_WAIT_POLICY=PASSIVE in the environment where the machine is shared: "
            "threads that wait by spinning slow each other down many times. This command does so by itself."
        )
    if facts["blas"] not in ("mkl", "unknown") and not facts["onednn"] and not facts["gpus"]:
        advice.append("torch has neither MKL nor oneDNN, whose products are faster on x86: use a torch of PyPI.")
    if facts["cpu_kernels"] != "compiled" and not facts["gpus"]:
        advice.append("The kernels for CPUs are not compiled, which makes decoding several times slower: install g++.")
    if facts["cpu_capability"] == "DEFAULT" and not facts["gpus"]:
        advice.append("torch uses no vector instructions beyond the basic ones: the processor has none that it knows.")
    return advice


class _Kept(logging.Handler):
    """Keeps log lines."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.lines.append(record.getMessage())


def _native() -> tuple[str, str | None]:
    """The code that computes on a CPU, and if it is not compiled kernels, why not; None where that was said before."""
    logger, kept = logging.getLogger("heavypath.kernels.native.library"), _Kept()
    level, propagates = logger.level, logger.propagate
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        if library() is not None:
            return "compiled", None
    finally:
        logger.removeHandler(kept)
        logger.setLevel(level)
        logger.propagate = propagates
    return "PyTorch's operations", "; ".join(kept.lines) or None


def _compiler() -> str:
    """The path of the C++ compiler, and its version."""
    path = compiler_path()
    if path is None:
        return "none"
    try:
        done = subprocess.run([path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{path} ({error})"
    return f"{path} ({done.stdout.partition(chr(10))[0]})"


def _cache() -> str:
    """The folder of compiled kernels."""
    try:
        return str(cache_folder())
    except RuntimeError as error:
        return f"none ({error})"


def _processor() -> str:
    """Its name."""
    try:
        named = re.search(r"^model name\s*: (.+)$", PROCESSOR.read_text(encoding="utf-8"), re.M)
    except OSError:
        named = None
    return named[1] if named else platform.machine()


def _openmp() -> str:
    """Whose OpenMP was loaded with PyTorch."""
    if not MAPS.exists():
        return "unknown"
    loaded = MAPS.read_text(encoding="utf-8")
    return ", ".join(owner for name, owner in OPENMP.items() if re.search(rf"/{name}[-.]", loaded)) or "none"


def _driver() -> str | None:
    """The version of the NVIDIA driver; None if there is none."""
    if not DRIVER.exists():
        return None
    found = re.search(r"Module\s+(?:for \S+\s+)?(\d[\d.]*)", DRIVER.read_text(encoding="utf-8"))
    return found[1] if found else "unknown"


def _gpu(number: int) -> dict[str, str]:
    found = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    return {
        "name": found.name,
        "capability": f"sm_{found.major}{found.minor}",
        "memory": f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
    }
