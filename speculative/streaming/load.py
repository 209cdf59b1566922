"""Load a model whose layers are read when they are needed."""

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
    """A causal language model whose weights take no more than `memory` of a device, however many there are.

    folder:   a model with safetensors, as `save_pretrained` or `hf download` made it; its files are read as they are.
              Or a name on the Hugging Face Hub, of which what the cache lacks is fetched
    memory:   bytes, or a text such as "8G", for all weights. The layers that fit in stay, the others pass through two
              places and are read anew in each forward pass. Caches and activations are not counted
    resident: layers that are to stay in any case, those of an `EarlyExit` for one
    offload_folder: where transformers may write weights anew that it converts, as those of some mixtures of experts
    device:   where the model computes, the CPU or a CUDA GPU
    host_memory: beside a GPU, bytes or a text for the host's memory, pinned, that layers that pass may take. Those that
              it has no room for are read from disk in each pass. Default: all of them, which are read once, and
              then steps are CUDA graphs
    local_files_only: of a name fetch nothing, as with HF_HUB_OFFLINE

    The model is transformers' own: give it to SpeculativeDecoder, or call `generate`. `stream_of(model).close()` ends
    it before it goes by itself. Needs accelerate (`pip install '.[offload]'` in a checkout).

    Raises ImportError without accelerate, and ValueError for too little memory, or for a device that is not there. It
    raises ValueError, too, for a model that has no list of layers and for files that do not fit it. Raises OSError for
    files that cannot be read, and RuntimeError for memory that cannot be pinned.
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
    places_of_folder(folder)  # whose errors name the file; transformers has KeyErrors and others for some
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
    """A device map: the layers are on disk, all beside them is on the device."""
    for name, child in module.named_children():
        own = f"{path}{name}"
        if own == layers:
            yield from ((f"{own}.{number}", "disk") for number in range(len(child)))  # pyright: ignore[reportArgumentType]
        elif layers.startswith(f"{own}."):
            yield from _places(child, f"{own}.", layers, device)
        else:
            yield own, device
