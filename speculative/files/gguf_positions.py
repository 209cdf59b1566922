"""How a GGUF file scales the positions of rotary embeddings, as settings of a transformers config.

transformers' loader of GGUF files leaves this out, and the model would then write another text without any error.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from heavypath.speculative.files.gguf_header import GgufHeader

FACTORS = "rope_freqs.weight"  # a Llama 3's divisors of its frequencies
# What Llama 3.1, 3.2 and 3.3 have; a GGUF file has nothing but the divisors that follow from these and from a factor.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_OWN = ("gpt-oss",)  # architectures whose scaling transformers' loader reads
# Keys below "ARCHITECTURE.rope." that change nothing, or that are read here.
_READ = ("scaling.type", "scaling.factor", "scaling.original_context_length", "scaling.finetuned", "scale_linear")


def scaling_of(file: Path, header: GgufHeader, theta: float) -> dict[str, Any]:
    """The settings for `rope_parameters` that scale positions as the file says; empty for none.

    theta: the base of the frequencies

    Raises ValueError for a scaling that is not known here.
    """
    divisors = _divisors_in(file, header)
    if header.architecture in _OWN:
        return {}
    prefix = f"{header.architecture}.rope."
    given = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    unknown = [key for key in given if key.startswith("scaling.") and key not in _READ]
    unknown += [tensor.name for tensor in header.tensors if "rope_" in tensor.name and tensor.name != FACTORS]
    kind = given.get("scaling.type") or ("linear" if given.get("scale_linear", 1.0) != 1.0 else "none")
    if unknown or kind not in ("none", "linear", "yarn") or (divisors is not None and kind != "none"):
        raise ValueError(
            f"it scales positions in a way that is not read here (rope.scaling.type {kind!r}, "
            f"{', '.join(unknown) or FACTORS})"
        )
    if divisors is not None:
        return _llama3(divisors, theta)
    if kind == "none":
        return {}
    settings = {"rope_type": kind, "factor": float(given.get("scaling.factor", given.get("scale_linear", 1.0)))}
    if kind == "yarn":
        original = f"{header.architecture}.context_length"
        settings["original_max_position_embeddings"] = int(
            given.get("scaling.original_context_length", header.metadata.get(original, 0))
        )
    return settings


def _divisors_in(file: Path, header: GgufHeader) -> list[float] | None:
    """The values of the tensor FACTORS [head_dim / 2], which divide frequencies; None if the file has no such tensor.

    Raises ValueError if the tensor is not of float32.
    """
    found = [tensor for tensor in header.tensors if tensor.name == FACTORS]
    if not found:
        return None
    if found[0].kind != 0:
        raise ValueError(f"its tensor {FACTORS} is of ggml's type {found[0].kind}, expected 0, which is float32")
    return np.fromfile(file, "<f4", found[0].elements, offset=header.data_start + found[0].offset).tolist()


def _llama3(divisors: list[float], theta: float) -> dict[str, Any]:
    """The settings for `rope_parameters` of a Llama 3 with these divisors of frequencies.

    theta: the base of the frequencies. Raises ValueError for divisors of another kind of scaling.
    """
    factor = max(divisors)
    expected = [_divisor(index, 2 * len(divisors), theta, factor) for index in range(len(divisors))]
    if not all(math.isclose(own, one, rel_tol=1e-3) for own, one in zip(divisors, expected, strict=True)):
        raise ValueError(f"its {FACTORS} are not those of a Llama 3, and are not read here")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _divisor(index: int, head_dim: int, theta: float, factor: float) -> float:
    """What Llama 3 divides frequency number `index` by: 1 for short waves, `factor` for long ones, else in between."""
    wave = 2 * math.pi * theta ** (2 * index / head_dim)
    low = LLAMA3["low_freq_factor"]
    high = LLAMA3["high_freq_factor"]
    share = (LLAMA3["original_max_position_embeddings"] / wave - low) / (high - low)
    share = min(max(share, 0.0), 1.0)
    return 1 / ((1 - share) / factor + share)
