"""`heavypath info`: show what is installed, the machine, and what would make decoding faster here.

PyTorch takes seconds to import. So it is imported only if there may be a GPU, or if all facts are requested.
"""

import importlib.metadata
import logging
import logging.handlers
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from heavypath.kernels.native.library import (
    MARCH,
    SWITCH,
    cache_folder,
    compiled_for,
    compiler_path,
    library,
    library_name,
)
from heavypath.speculative.cli.options import AsJson, Verbose, print_json
from heavypath.speculative.costs.threads import Load, default_threads, running, usable_cores
from heavypath.speculative.waiting import waiting

if TYPE_CHECKING:
    import torch

MAPS = Path("/proc/self/maps")  # the files that are mapped into this process
DRIVER = Path("/proc/driver/nvidia/version")
DEVICES = tuple(map(Path, ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu")))  # of GPUs, on systems without DRIVER
IN_C = ("gumbel_topk", "verify_tree", "commit")  # in C++ on a CPU, if there is a compiler
KERNELS = ("tree_attention", "heavy_path_order", "gumbel_topk", "verify_tree", "commit", "compact_cache")
COMPILED = "compiled"
COMPILES = "compiled at the first start"
SLOW = "PyTorch's operations"
PROCESSOR = Path("/proc/cpuinfo")
# Environment variables that affect decoding. Only these are shown, since users may publish the output.
VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "LD_PRELOAD",
    "CUDA_VISIBLE_DEVICES",
    "TRITON_INTERPRET",
    SWITCH,
    MARCH,
    "CXX",
    "XDG_CACHE_HOME",
)
OPENMP = {"libgomp": "GNU", "libiomp5": "Intel", "libomp": "LLVM"}


def info(as_json: AsJson = False, verbose: Verbose = False) -> None:
    """Show versions, processor, threads, load, GPUs and kernels, and what would make decoding faster here.

    With --verbose or --json, and always on a machine with a GPU, it also imports PyTorch and shows its facts.
    """
    if whole := as_json or verbose or DRIVER.exists() or any(device.exists() for device in DEVICES):
        facts, load = _of_pytorch()
    else:
        facts = _installed()
        load = Load(running(), usable_cores(), default_threads())
    facts |= machine(load)
    advice = advice_of(facts, load)
    if as_json:
        print_json(facts | {"advice": advice})
        return
    kernels = facts.pop("kernels", {})
    gpus = facts.pop("gpus", [])
    rows = {name.replace("_", " "): str(value) for name, value in facts.items() if value is not None}
    for number, gpu in enumerate(gpus):
        rows[f"gpu {number}"] = ", ".join(map(str, gpu.values()))
    rows |= {f"kernel {name}": implementation for name, implementation in kernels.items()}
    width = max(map(len, rows)) + 2
    for name, value in rows.items():
        typer.echo(f"{name:<{width}}{value}")
    typer.echo("")
    for sentence in advice or ["Nothing was found that would make decoding faster here."]:
        typer.echo(f"* {sentence}")
    if not whole:
        typer.echo("* `heavypath info -v` imports PyTorch and shows more: its libraries, and how each kernel runs.")


def _installed() -> dict[str, Any]:
    """Return the facts that are known without importing PyTorch, by name, for a machine without a GPU."""
    kernels = COMPILED if is_kept() else COMPILES
    if compiler_path() is None or os.environ.get(SWITCH) == "0":
        kernels = SLOW
    return _versions() | {
        "device": "cpu",
        "threads": default_threads(),
        "cpu_kernels": kernels,
        "cpu_kernels_for": compiled_for() if kernels == COMPILED else None,
    }


def is_kept() -> bool:
    """Whether no CPU kernels have to be compiled: they are in the cache, or cannot be compiled, or are turned off."""
    compiler = compiler_path()
    if compiler is None or os.environ.get(SWITCH) == "0":
        return True
    try:
        return (cache_folder() / library_name(compiler)).is_file()
    except (subprocess.SubprocessError, OSError, RuntimeError):
        return False


def _of_pytorch() -> tuple[dict[str, Any], Load]:
    """Return the facts of `_installed`, and those that need PyTorch: its build and the GPUs; and the load."""
    import torch

    load = current_load()
    native, reason = _native()  # first, since the first search for compiled kernels logs why there are none
    blas = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return installation() | {
        "openmp": _openmp(),
        "blas": blas[1] if blas else "unknown",
        "onednn": torch.backends.mkldnn.is_available(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_kernels": native,
        "cpu_kernels_for": compiled_for() if native == COMPILED else None,
        "cpu_kernels_lack": reason,
        "torch_cuda": torch.version.cuda,
        "gpus": [_gpu(number) for number in range(torch.cuda.device_count())],
    }, load


def installation(device: "torch.device | None" = None) -> dict:
    """Return the installed versions, the threads, and the implementation of each kernel on a device.

    device: default a GPU if there is one
    """
    import torch

    on_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    return _versions() | {
        "torch": torch.__version__,  # with the build, which the package's metadata may lack
        "device": f"cuda ({torch.cuda.get_device_name(device)})" if on_gpu else "cpu",
        "threads": torch.get_num_threads(),
        "kernels": {name: "Triton" if on_gpu else _on_cpu(name) for name in KERNELS},
    }


def _on_cpu(kernel: str) -> str:
    return "C++" if kernel in IN_C and library() is not None else "reference"


def current_load() -> Load:
    """Return the current load of the machine."""
    import torch

    return Load(running(), usable_cores(), torch.get_num_threads())


def machine(load: Load) -> dict[str, Any]:
    """Return facts of the machine: processor, load, how threads wait, compiler, cache and environment."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": load.cores,
        "load": round(load.working, 2),
        "waiting": ", ".join(f"{name}={value}" for name, value in waiting(os.environ).items()) or "OpenMP's default",
        "compiler": _compiler(),
        "cache": _cache(),
        "environment": " ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
        or "nothing set",
        "nvidia_driver": _driver(),
    }


def _versions() -> dict[str, Any]:
    versions = {"heavypath": importlib.metadata.version("heavypath"), "python": platform.python_version()}
    for package in ("torch", "triton", "transformers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    return versions


def advice_of(facts: Mapping[str, Any], load: Load) -> list[str]:
    """Return sentences with advice on faster decoding here, from the facts that `info` shows."""
    advice = []
    gpus = facts.get("gpus")
    if not gpus and facts["nvidia_driver"]:
        found = "built for CUDA " + facts["torch_cuda"] if facts["torch_cuda"] else "without CUDA"
        advice.append(
            f"An NVIDIA driver ({facts['nvidia_driver']}) was found, but torch {facts['torch']}, {found}, sees no GPU: "
            "install a torch built for a CUDA version that this driver supports, and check CUDA_VISIBLE_DEVICES."
        )
    if gpus and os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        advice.append("TRITON_INTERPRET is set: the kernels run in an interpreter instead of on the GPU; unset it.")
    needed = ("torch", "triton", "transformers") if gpus else ("torch", "transformers")
    missing = [name for name in needed if facts.get(name) == "missing"]
    if missing:
        advice.append(f"{' and '.join(missing)} must be installed: `pip install .` in a checkout.")
    if load.threads > load.cores:
        advice.append(
            f"PyTorch uses {load.threads} threads, but this process may use {load.cores} cores: "
            f"set OMP_NUM_THREADS={load.cores}."
        )
    if load.busy:
        free = max(1, round(load.cores - load.working))
        fewer = f" or use fewer threads (OMP_NUM_THREADS={free})" if free < load.threads else ""
        advice.append(f"The machine is busy ({load}): timings are noisy; wait until it is idle{fewer}.")
    if load.threads > 1 and not gpus:
        advice.append(
            "In your programs, set OMP_WAIT_POLICY=PASSIVE in the environment if the machine is shared: "
            "threads that wait by spinning slow each other down many times. This command does so automatically."
        )
    if facts.get("blas") not in (None, "mkl", "unknown") and not facts["onednn"] and not gpus:
        advice.append("torch has neither MKL nor oneDNN, which are faster on x86: use the torch from PyPI.")
    if facts["cpu_kernels"] == SLOW and not gpus:
        advice.append("The kernels for CPUs are not compiled, which makes decoding several times slower: install g++.")
    if facts.get("cpu_capability") == "DEFAULT" and not gpus:
        advice.append("torch uses no vector instructions beyond the basic ones: the processor has none that it knows.")
    return advice


def _native() -> tuple[str, str | None]:
    """Return which CPU kernels run, in words, and why they are not compiled; None if they are, or if it is unknown."""
    logger = logging.getLogger("heavypath.kernels.native.library")
    kept = logging.handlers.BufferingHandler(capacity=1000)  # of records
    level = logger.level
    propagates = logger.propagate
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        if library() is not None:
            return COMPILED, None
    finally:
        logger.removeHandler(kept)
        logger.setLevel(level)
        logger.propagate = propagates
    return SLOW, "; ".join(record.getMessage() for record in kept.buffer) or None


def _compiler() -> str:
    path = compiler_path()
    if path is None:
        return "none"
    try:
        command = [path, "--version"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{path} ({error})"
    return f"{path} ({done.stdout.partition(chr(10))[0]})"


def _cache() -> str:
    try:
        return str(cache_folder())
    except RuntimeError as error:
        return f"none ({error})"


def _processor() -> str:
    try:
        named = re.search(r"^model name\s*: (.+)$", PROCESSOR.read_text(encoding="utf-8"), re.M)
    except OSError:
        named = None
    return named[1] if named else platform.machine()


def _openmp() -> str:
    """Return the vendor of the OpenMP that PyTorch has loaded."""
    if not MAPS.exists():
        return "unknown"
    loaded = MAPS.read_text(encoding="utf-8")
    owners = [owner for name, owner in OPENMP.items() if re.search(rf"/{name}[-.]", loaded)]
    return ", ".join(owners) or "none"


def _driver() -> str | None:
    if not DRIVER.exists():
        return None
    found = re.search(r"Module\s+(?:for \S+\s+)?(\d[\d.]*)", DRIVER.read_text(encoding="utf-8"))
    return found[1] if found else "unknown"


def _gpu(number: int) -> dict[str, str]:
    import torch

    found = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    return {
        "name": found.name,
        "capability": f"sm_{found.major}{found.minor}",
        "memory": f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
    }
