"""Make a stream for a model on a GPU, some of whose layers transformers left in the host's memory or on disk.

Layers in the host's memory are moved, one by one, to pinned memory. Layers on disk stay there, or go to pinned memory
as far as that is allowed. All other weights go to the GPU, including the layers that are to stay.
"""

import logging
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heavypath.speculative.models.layer_weights import LayerWeights, WholePass
from heavypath.speculative.models.linear import free_memory
from heavypath.speculative.streaming.accelerate_hooks import Offloaded, detach_hooks, put
from heavypath.speculative.streaming.device import DeviceStream
from heavypath.speculative.streaming.layout import Packing
from heavypath.speculative.streaming.memory import SLOTS, bytes_of, resident_layers
from heavypath.speculative.streaming.source import Place

logger = logging.getLogger(__name__)


class PlacedModel(NamedTuple):
    """A model for a GPU, and where its weights are that are not there yet.

    body:    the module that calls the layers
    layers:  the list of the model's layers
    tensors: all tensors that are not on the GPU
    places:  for each layer with such tensors, by its number: the places of its tensors in files, by key
    numbers: for each tensor that a stream loads, by key: the number of its layer
    device:  the GPU
    """

    model: PreTrainedModel
    body: nn.Module
    layers: nn.ModuleList
    tensors: list[Offloaded]
    places: dict[int, dict[str, Place]]
    numbers: dict[str, int]
    device: torch.device


@torch.no_grad()
def stream_to_gpu(
    parts: PlacedModel, memory: int | str | None, resident: Collection[int], host_memory: int | str | None
) -> DeviceStream | None:
    """Load the weights that stay on the GPU, and make a stream for the other layers; None if all layers stay.

    parts:    the model and where its tensors are
    memory:   bytes that all weights may take on the GPU, or a string such as "8G"; None: as transformers placed them
    resident: numbers of the layers that must stay on the GPU
    host_memory: bytes, or a string, for layers from disk that stay in pinned memory; None for all of them, 0 for none

    Raises ValueError for too little memory, and RuntimeError for memory that cannot be pinned.
    """
    detach_hooks(parts.model)
    lacking: dict[int, list[Offloaded]] = {number: [] for number in sorted(parts.places)}
    of_id: dict[int, nn.Parameter] = {}  # tied parameters stay one
    for tensor in parts.tensors:
        if tensor.key in parts.numbers:
            lacking[parts.numbers[tensor.key]].append(tensor)
        else:
            put(tensor, tensor.value().to(parts.device), of_id)
    sizes = {number: Packing(_facts(parts.places[number], tensors)).nbytes for number, tensors in lacking.items()}
    others = sum({id(one): one.nbytes for one in parts.model.parameters() if one.device == parts.device}.values())
    stay, passing, on_host = _chosen(parts, sizes, others, memory, resident, host_memory)
    for number in stay:
        for tensor in lacking.pop(number):
            put(tensor, tensor.value().to(parts.device), of_id)
    taken = [_taken(parts.places[number], lacking[number]) for number in passing]
    for tensor in parts.tensors:
        tensor.in_memory.clear()  # which would keep what is moved
    if not passing:
        return None
    stream = DeviceStream(taken, parts.device, stay=[passing.index(number) for number in on_host])
    for order, number in enumerate(passing):
        views = stream.tensors(order)
        for tensor in lacking[number]:
            put(tensor, views[tensor.key], of_id)
            stream.parameter(getattr(tensor.module, tensor.name))
        LayerWeights(stream, order).hook(parts.layers[number])
    WholePass(stream).hook(parts.body)
    logger.info(
        "%s: %d of %d layers are streamed, %s MB of weights are in the memory of %s, %s MB in pinned memory",
        type(parts.model).__name__,
        len(passing),
        len(parts.layers),
        f"{(others + stream.nbytes + sum(sizes[number] for number in stay)) / 1e6:,.0f}",
        parts.device,
        f"{stream.host.nbytes / 1e6:,.0f}",
    )
    return stream


def _chosen(
    parts: PlacedModel,
    sizes: dict[int, int],
    others: int,
    memory: int | str | None,
    resident: Collection[int],
    host_memory: int | str | None,
) -> tuple[list[int], list[int], list[int]]:
    """Choose which layers stay on the GPU, which are streamed, and which of these are read from files only once.

    Returns three lists of their numbers. Layers of the third list stay in the host's memory.

    sizes: bytes of each layer that is not on the GPU, by its number; others: bytes of everything else on the GPU

    Raises ValueError if memory is too small or not available.
    """
    chosen = wanted = [order for order, number in enumerate(sizes) if number in {*resident}]
    if memory is not None:
        chosen = resident_layers([*sizes.values()], bytes_of(memory) - others, wanted, others)
    stay = [number for order, number in enumerate(sizes) if order in chosen]
    passing = [number for number in sizes if number not in stay]
    filed = [number for number in passing if parts.places[number]]
    moved = [number for number in passing if number not in filed]
    on_host = filed if host_memory is None else []
    if host_memory not in (None, 0):
        kept = resident_layers([sizes[number] for number in filed], bytes_of(host_memory), (), 0)
        on_host = [filed[order] for order in kept]
    _check_gpu(parts.device, [sizes[number] for number in stay], [sizes[number] for number in passing])
    from_disk = [sizes[number] for number in filed if number not in on_host]
    _check_host([sizes[number] for number in on_host], from_disk, [sizes[number] for number in moved])
    return stay, passing, on_host


def _facts(places: dict[str, Place], tensors: list[Offloaded]) -> dict[str, Tensor | Place]:
    """A layer's tensors by key: the place of a tensor in a file, or the tensor itself if it is in memory."""
    return {one.key: places[one.key] if one.key in places else one.value() for one in tensors}


def _taken(places: dict[str, Place], tensors: list[Offloaded]) -> dict[str, Tensor | Place]:
    """The same as `_facts`, and the model gives up its references to tensors in the host's memory."""
    taken = _facts(places, tensors)
    for one in tensors:
        own = one.own
        if own.device.type == "cpu":
            own.data = own.new_empty(0)
    return taken


def _check_gpu(device: torch.device, stay: list[int], passing: list[int]) -> None:
    """Raise ValueError for layers that need more memory than the GPU has free."""
    free = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own, in no use
    needed = sum(stay) + min(SLOTS, len(passing)) * max(passing, default=0)
    if needed > free:
        raise ValueError(
            f"{free / 1e9:.3f}G of {device}'s memory are free, and {len(stay)} layers that stay there and {SLOTS} that "
            f"pass take {needed / 1e9:.3f}G; give a smaller memory, or fewer resident layers"
        )


def _check_host(kept: list[int], from_disk: list[int], moved: list[int]) -> None:
    """Raise ValueError if the host has too little free memory for the layers that are streamed from there.

    kept:      bytes of each layer that gets host memory
    from_disk: bytes of each layer that is read from disk, through at most SLOTS slots
    moved:     bytes of each layer that is in host memory already; while one is moved, it is there twice
    """
    needed = sum(kept) + max(moved, default=0)
    free = free_memory()
    needed += min(SLOTS, len(from_disk)) * max(from_disk, default=0)
    if needed > free:
        raise ValueError(
            f"{free / 1e9:.3f}G of the host's memory are free, and the layers that are streamed to the GPU from there "
            f"take {needed / 1e9:.3f}G; give host_memory=, which leaves the others on disk, or a larger memory="
        )
