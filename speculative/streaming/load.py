"""`load_streamed`: load a model whose layers are read when they are needed."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from heavypath.speculative.files.hub import find_folder
from heavypath.speculative.streaming.accelerate_hooks import with_index
from heavypath.speculative.streaming.offloaded import layers_in, stream_layers
from heavypath.speculative.streaming.source import places_of_folder


def load_streamed(
    folder: str | Path,
    memory: int | str,
    resident: Collection[int] = (),
    offload_folder: str | Path | None = None,
    device: torch.device | str = "cpu",
    host_memory: int | str | None = None,
    local_files_only: bool = False,
) -> PreTrainedModel:
    """Load a causal language model whose weights take no more than `memory` of a device, however large it is.

    folder:   a model with safetensors files, as `save_pretrained` or `hf download` makes it; its files are read as they
              are. Or a name on the Hugging Face Hub; what the cache lacks is downloaded
    memory:   bytes, or a string such as "8G", for all weights. Layers that fit stay in memory, the others pass through
              two buffers and are read again in each forward pass. Caches and activations are not counted
    resident: layers that must stay in memory, such as those of an `EarlyExit`
    offload_folder: where transformers may write weights that it converts, as those of some mixtures of experts
    device:   where the model computes, the CPU or a CUDA GPU
    host_memory: with a GPU, bytes or a string for the pinned host memory that streamed layers may take. Layers for
              which it has no room are read from disk in each pass. Default: memory for all layers, which are then read
              once, and steps can be CUDA graphs
    local_files_only: download nothing, as with HF_HUB_OFFLINE

    The model is a transformers model: give it to SpeculativeDecoder, or call `generate`. `stream_of(model).close()`
    releases its memory early. Needs accelerate (`pip install '.[offload]'` in a checkout).

    Raises ImportError without accelerate, and ValueError for too little memory, a device that is not available, a model
    without a list of layers, and files that do not fit the model. Raises OSError for files that cannot be read, and
    RuntimeError for memory that cannot be pinned.
    """
    where = with_index(device)
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"a model is streamed to a CPU or a CUDA GPU, got device {str(device)!r}")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r} was given, and torch finds no CUDA GPU; leave it out for the CPU")
    if where.type == "cpu" and host_memory is not None:
        raise ValueError(f"host_memory is for a model on a GPU, got {host_memory!r} for one on the CPU; give memory")
    try:
        import accelerate  # noqa: F401
    except ImportError as error:
        raise ImportError("streamed weights need accelerate: `pip install '.[offload]'` in a checkout") from error
    folder = find_folder("target", str(folder), local_files_only)
    places_of_folder(folder)  # its errors name the file, unlike some of transformers' errors
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        empty: Any = AutoModelForCausalLM.from_config(config)
    name, _ = layers_in(empty)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype="auto",
        device_map=dict(_places(empty, "", name, str(where))),
        offload_folder=None if offload_folder is None else str(offload_folder),
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    model, info = loaded
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ValueError(f"the weights in {str(folder)!r} lack {len(missing)} tensors, first {missing[0]!r}")
    stream_layers(model, memory, resident, host_memory if where.type == "cuda" else 0)
    return model.eval()


def _places(module: nn.Module, path: str, layers: str, device: str) -> Iterator[tuple[str, str]]:
    """The items of a device map that puts the layers on disk, and everything else on the device.

    path: the name of `module` in the model, with a dot; layers: the name of the list of layers
    """
    for name, child in module.named_children():
        own = f"{path}{name}"
        if own == layers:
            yield from ((f"{own}.{number}", "disk") for number in range(len(child)))  # pyright: ignore[reportArgumentType]
        elif layers.startswith(f"{own}."):
            yield from _places(child, f"{own}.", layers, device)
        else:
            yield own, device
