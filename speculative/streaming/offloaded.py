"""Replace accelerate's hooks on a partly offloaded model by a stream.

A stream reads weights ahead of time; accelerate's hooks load them only when they are needed (`accelerate_hooks`).
Weights outside of the layers are read once. This module handles models on a CPU, and calls `gpu` for those on a GPU.
"""

import logging
from collections.abc import Collection

import torch
from torch import nn
from transformers import PreTrainedModel

from heavypath.speculative.models.layer_weights import LayerWeights, WeightStream, stream_of
from heavypath.speculative.streaming.accelerate_hooks import (
    Offloaded,
    check_converted,
    check_plain,
    detach_hooks,
    device_of,
    offloaded,
    place_of,
    put,
)
from heavypath.speculative.streaming.gpu import PlacedModel, stream_to_gpu
from heavypath.speculative.streaming.layout import Layout
from heavypath.speculative.streaming.memory import bytes_of, resident_layers
from heavypath.speculative.streaming.source import Place
from heavypath.speculative.streaming.stream import LayerStream

logger = logging.getLogger(__name__)


def stream_layers(
    model: PreTrainedModel,
    memory: int | str | None = None,
    resident: Collection[int] = (),
    host_memory: int | str | None = 0,
) -> WeightStream | None:
    """Make a stream for the layers of a model that transformers offloaded to disk, or for a GPU to the host's memory.

    memory:   bytes that all weights may take, or a string such as "8G"; of a GPU's memory if the model computes there.
              As many layers stay as fit. Default: the layers that the model has there already, and two more
    resident: layers that must stay, such as those of an `EarlyExit`
    host_memory: with a GPU, how much host memory layers from disk may occupy permanently: bytes, a string, or None for
              all layers. Default: they are read from disk in each pass. Layers in the host's memory are moved to pinned
              memory

    The model is changed: accelerate's hooks are removed, and a layer's parameters become views of memory that holds its
    weights while it computes. `model.generate` uses the same stream. It exists as long as the model, or until `close`.
    Returns None, with an ordinary model, if a GPU has memory for all of it.

    Raises ValueError for a model that is not offloaded, or to several devices; for weights that would have to be
    converted when they are read; and for layers or memory that do not fit the model. (The few weights that transformers
    keeps in float32 stay in memory.) Raises RuntimeError for memory that cannot be pinned.
    """
    tensors = [*offloaded(model)]
    if not tensors:
        raise ValueError(
            "no weight of the model is offloaded to disk; load it by load_streamed(folder, memory), or by "
            'from_pretrained(folder, device_map=..., offload_folder=...) with layers on "disk"'
        )
    device = device_of(tensors)
    if device.type == "cpu" and host_memory != 0:
        raise ValueError(f"host_memory is for a model on a GPU, got {host_memory!r} for one on the CPU; give memory")
    name, layers = layers_in(model)
    layer_of = {id(module): index for index, layer in enumerate(layers) for module in layer.modules()}
    headers: dict[str, dict[str, Place]] = {}
    sources: dict[int, dict[str, Place]] = {}
    numbers: dict[str, int] = {}
    converted: list[Offloaded] = []
    for tensor in tensors:
        check_plain(tensor)
        index = layer_of.get(id(tensor.module))
        if index is None:
            continue
        places = sources.setdefault(index, {})
        if not tensor.is_in_memory:
            place = place_of(tensor, headers)
            if place.dtype != tensor.own.dtype:
                converted.append(tensor)
                continue
            places[tensor.key] = place
        numbers[tensor.key] = index
    check_converted(converted, tensors)
    if not sources:
        raise ValueError(f'no layer of {name} is offloaded; put some on "disk", or leave out the device_map')
    missing = {*resident} - {*range(len(layers))}
    if missing:
        raise ValueError(f"resident layers must be within 0 .. {len(layers) - 1}, got {sorted(missing)}")
    if device.type == "cuda":
        body = model.get_submodule(name.rpartition(".")[0])
        parts = PlacedModel(model, body, layers, tensors, sources, numbers, device)
        return stream_to_gpu(parts, memory, resident, host_memory)

    detach_hooks(model)
    of_id: dict[int, nn.Parameter] = {}  # tied parameters stay one
    for tensor in tensors:
        if tensor.key not in numbers:
            put(tensor, tensor.value(), of_id)
    _read_from_files(model)
    lacking = sorted(sources)
    sizes = [Layout(sources[index]).nbytes for index in lacking]
    others = sum({id(one): one.nbytes for one in model.parameters() if one.device.type != "meta"}.values())
    wanted = [lacking.index(index) for index in sorted({*resident}) if index in sources]
    stay = wanted if memory is None else resident_layers(sizes, bytes_of(memory) - others, wanted, others)
    stream = LayerStream([sources[index] for index in lacking], stay)
    for order, index in enumerate(lacking):
        views = stream.tensors(order)
        for tensor in tensors:
            if numbers.get(tensor.key) == index:
                put(tensor, views[tensor.key], of_id)
        LayerWeights(stream, order).hook(layers[index])
    logger.info(
        "%s: %d of %d layers are streamed, %s MB of weights are in memory",
        type(model).__name__,
        len(sources) - len(stay),
        len(layers),
        f"{(others + stream.nbytes) / 1e6:,.0f}",
    )
    return stream


def streamed_if_offloaded(model: PreTrainedModel) -> WeightStream | None:
    """The stream of a model: the one that it has, or a new one if accelerate's hooks load its weights; else None."""
    if any(offloaded(model)):
        return stream_layers(model)
    return stream_of(model)


def layers_in(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The name of the list of a model's layers, and the list. Raises ValueError for a model without such a list."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise ValueError(f"{type(model).__name__} has no list of {count} layers to be streamed")


@torch.no_grad()
def _read_from_files(model: nn.Module) -> None:
    """Copy all weights on the CPU to new memory, because safetensors maps them from files.

    If a mapped file were truncated, the process would be killed. A mapped weight is also only read when it is first
    used, and is not counted as used memory.
    """
    for one in model.parameters():
        if one.device.type == "cpu":
            one.data = one.detach().clone()
