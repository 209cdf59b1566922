"""Describe the machine and the versions of the libraries, for records of measurements."""

import os
import platform
from pathlib import Path

import tokenizers
import torch
import transformers


def machine() -> dict:
    """The processor, its instruction set, numbers of cores and threads, and the GPU if there is one.

    It has no names of hosts or people.
    """
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    } | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def environment() -> dict:
    """The machine, and the versions of Python and the libraries."""
    return {
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }
