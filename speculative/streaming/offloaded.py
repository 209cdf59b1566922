"""Models that transformers and accelerate loaded in part: their layers get a stream in the place of accelerate's hooks.

`from_pretrained(folder, device_map=..., offload_folder=...)` leaves weights that the map puts on "disk" where they are,
and accelerate's hooks read each one when its module is called, and drop it behind. Those hooks know where every weight
is: in the files of the model itself, or in `offload_folder` if it was converted. From there the stream reads them,
ahead of time. The weights outside of the layers are read once.
"""

import logging
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heavypath.speculative.streaming.layer_weights import LayerWeights, stream_of
from heavypath.speculative.streaming.layout import Layout
from heavypath.speculative.streaming.memory import bytes_of, resident_layers
from heavypath.speculative.streaming.source import Place, places_in
from heavypath.speculative.streaming.stream import LayerStream

logger = logging.getLogger(__name__)


class _Offloaded(NamedTuple):
    """A tensor that a module does not have: what accelerate calls it, and where it looks for it."""

    module: nn.Module
    name: str
    key: str
    weights: Any  # accelerate's OffloadedWeightsLoader


def is_offloaded(model: nn.Module) -> bool:
    """Whether accelerate's hooks bring weights of the model when they are needed."""
    return any(True for _ in _offloaded(model))


def stream_layers(
    model: PreTrainedModel, memory: int | str | None = None, resident: Collection[int] = ()
) -> LayerStream:
    """Have the layers of a model that transformers loaded in part read ahead of time, by a stream.

    memory:   bytes that all weights may take, such as "8G": layers stay in memory as far as it goes. Default: the
              layers that the model has in memory already, and two more
    resident: layers that are to stay in any case, those of an `EarlyExit` for one

    The model is changed: accelerate's hooks go, and a layer's parameters become views of memory that holds its weights
    while it computes. `model.generate` goes through the same stream. It lasts as long as the model, or until `close`.

    Raises ValueError for a model that is not offloaded, or to another device than the CPU; for weights that have to be
    converted when they are read; for layers or memory that do not fit the model.
    """
    tensors = [*_offloaded(model)]
    if not tensors:
        raise ValueError(
            "no weight of the model is offloaded to disk; load it by load_streamed(folder, memory), or by "
            'from_pretrained(folder, device_map=..., offload_folder=...) with layers on "disk"'
        )
    name, layers = layers_in(model)
    number_of = {id(module): index for index, layer in enumerate(layers) for module in layer.modules()}
    sources: dict[int, dict[str, Place]] = {}
    headers: dict[str, dict[str, Place]] = {}
    for tensor in tensors:
        _check(model, tensor)
        index = number_of.get(id(tensor.module))
        if index is not None:
            sources.setdefault(index, {})[tensor.key] = _place_of(tensor, headers)
    if not sources:
        raise ValueError(f'no layer of {name} is offloaded; put some on "disk", or leave out the device_map')
    missing = {*resident} - {*range(len(layers))}
    if missing:
        raise ValueError(f"resident layers must be within 0 .. {len(layers) - 1}, got {sorted(missing)}")

    _detach_hooks(model)
    of_id: dict[int, nn.Parameter] = {}  # tied parameters stay one
    for tensor in tensors:
        if id(tensor.module) not in number_of:
            _put(tensor, tensor.weights[tensor.key], of_id)
    _read_from_files(model)
    numbers, sizes = sorted(sources), [Layout(sources[index]).nbytes for index in sorted(sources)]
    others = sum({id(one): one.nbytes for one in model.parameters() if one.device.type != "meta"}.values())
    wanted = [numbers.index(index) for index in sorted({*resident}) if index in sources]
    stay = wanted if memory is None else resident_layers(sizes, bytes_of(memory) - others, wanted, others)
    stream = LayerStream([sources[index] for index in numbers], stay)
    for order, index in enumerate(numbers):
        views = stream.tensors(order)
        for tensor in tensors:
            if number_of.get(id(tensor.module)) == index:
                _put(tensor, views[tensor.key], of_id)
        LayerWeights(stream, order).hook(layers[index])
    logger.info(
        "%s: %d of %d layers are streamed, %s MB of weights are in memory",
        type(model).__name__, len(sources) - len(stay), len(layers), f"{(others + stream.nbytes) / 1e6:,.0f}",
    )  # fmt: skip
    return stream


def streamed_if_offloaded(model: PreTrainedModel) -> LayerStream | None:
    """The stream of a model; one is made for a model whose weights are offloaded, and None for any other."""
    return stream_layers(model) if is_offloaded(model) else stream_of(model)


def layers_in(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The list of a model's layers, and its name. Raises ValueError for a model that has none."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise ValueError(f"{type(model).__name__} has no list of {count} layers to be streamed")


def _offloaded(model: nn.Module) -> Iterator[_Offloaded]:
    """The tensors that accelerate's hooks bring."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):
            weights = getattr(each, "weights_map", None)
            if weights is None or not getattr(each, "offload", False):
                continue
            parameters = module.named_parameters(recurse=False, remove_duplicate=False)
            buffers = module.named_buffers(recurse=False, remove_duplicate=False) if each.offload_buffers else ()
            for name, tensor in (*parameters, *buffers):
                if tensor.device.type == "meta":
                    yield _Offloaded(module, name, f"{weights.prefix}{name}", weights.dataset)


def _check(model: PreTrainedModel, tensor: _Offloaded) -> None:
    """Raise ValueError for a tensor that a stream cannot bring."""
    if tensor.key in tensor.weights.state_dict or model.device.type not in ("cpu", "meta"):
        raise ValueError(
            f'{tensor.key} is offloaded for a model on {model.device}; streams are for a CPU with weights on "disk". '
            "Use a smaller model there, or one that is quantised"
        )
    own = getattr(tensor.module, tensor.name)
    if isinstance(own, nn.Parameter) and type(own) is not nn.Parameter:
        raise ValueError(f"{tensor.key} is a {type(own).__name__}, which is no plain tensor and cannot be streamed")


def _place_of(tensor: _Offloaded, headers: dict[str, dict[str, Place]]) -> Place:
    """Where a tensor lies, by accelerate's index. Raises ValueError if it would have to be converted."""
    facts, own = tensor.weights.index[tensor.key], getattr(tensor.module, tensor.name)
    path = facts.get("safetensors_file")
    if path is None:
        path = f"{tensor.weights.save_folder}/{tensor.key}.dat"
        place = Place(path, 0, getattr(torch, facts["dtype"]), (*facts["shape"],))
    else:
        if path not in headers:
            headers[path] = places_in(path)
        place = headers[path][facts.get("weight_name", tensor.key)]
    if (place.dtype, place.shape) != (own.dtype, (*own.shape,)):
        raise ValueError(
            f"{tensor.key} is saved as {place.dtype} {[*place.shape]}, the model has it as {own.dtype} {[*own.shape]}; "
            'weights are streamed as they are: load the model with dtype="auto"'
        )
    return place


def _put(tensor: _Offloaded, value: Tensor, of_id: dict[int, nn.Parameter]) -> None:
    """Give a module a tensor that it lacks."""
    own = getattr(tensor.module, tensor.name)
    if isinstance(own, nn.Parameter):
        made = of_id.setdefault(id(own), nn.Parameter(value, requires_grad=False))
        of_id[id(made)] = made
        setattr(tensor.module, tensor.name, made)
    else:
        setattr(tensor.module, tensor.name, value)


@torch.no_grad()
def _read_from_files(model: nn.Module) -> None:
    """Give the weights that are there memory of their own: transformers maps files, and one cut off kills the process.

    What is mapped is also read only when it is first looked at, and its memory is in no one's count.
    """
    for one in model.parameters():
        if one.device.type == "cpu":
            one.data = one.detach().clone()


def _detach_hooks(model: nn.Module) -> None:
    """Take accelerate's hooks off, and all that they have left in the modules."""
    from accelerate.hooks import remove_hook_from_submodules

    remove_hook_from_submodules(model)
    for module in model.modules():
        left = vars(module).get("forward")
        if getattr(left, "__func__", None) is type(module).forward:
            del module.__dict__["forward"]
