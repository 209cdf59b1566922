"""Detect that a model has changed between two calls of `generate`.

A forward pass is chosen, and tried, for the model as it is when a decoder is made. Later the user may change the model:
replace a module, register a hook, add or switch an adapter, quantise a layer, move it to another device, choose another
attention, or set a number in its config or in a module. They may also replace a method of a class, or a function that
it looks up by name (`functions`). All of this is part of the structure, which takes a few microseconds per module to
read. The values of weights are not part of it: forward passes read them when they are called. Those of buffers are.

Cached keys and values depend on the weights' values, too. `WeightValues` detects changes of those.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn
from transformers import PreTrainedConfig

from heavypath.speculative.models.functions import FUNCTIONS, functions_of
from heavypath.speculative.models.layer_weights import is_own, streamed
from heavypath.speculative.ranks.peers import local_of

_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters")  # attributes of PEFT's adapter layers
_PLAIN = (bool, int, float, str, *FUNCTIONS)
_CONTAINERS = {dict, OrderedDict, set, type(None)}  # most attributes of a module
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by itemsize
SAMPLE = 64  # how many numbers of each weight are compared, to notice changes through `.data`
_CAPTURES = "_output_capturing_hooks_installed"  # transformers sets it on a model that has the hooks of `_captures`
_GLOBAL_HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)


class Structure(NamedTuple):
    """What a model consists of. Two of them are equal if it computed the same function, from weights at one address.

    function: modules, settings and hooks; which parameters there are, with their types and devices. It holds the
              modules themselves, so that none can be confused with a later module at the same address
    places:   the addresses of the weights. A CUDA graph depends on them, the model's function does not
    """

    function: list[tuple[Any, ...]]
    places: list[int]


def structure_of(model: nn.Module) -> Structure:
    """The current structure of a model, to be compared with an earlier one."""
    modules = [*_modules(model)]
    configs = _configs_of(model, modules)
    types = {type(module) for module in modules}
    attentions = _names_of_attention(configs)
    function: list[tuple[Any, ...]] = [tuple(hooks) for hooks in _GLOBAL_HOOKS]
    function += functions_of(types, attentions)
    for config in configs:
        settings = [f"{name}={value}" for name, value in vars(config).items()]
        function.append(tuple(settings))
    places: list[int] = []
    for module in modules:
        function.append(_module_structure(module))
        for weight in module.__dict__["_parameters"].values():
            if weight is not None:
                places.append(_place_of(weight))
    buffers: list[Tensor] = []
    for module in modules:
        buffers += _buffers(module.__dict__)
    contents = _contents(buffers)  # a forward pass may have tables made of them
    function.append(tuple(contents))
    return Structure(function, places)


def _module_structure(module: nn.Module) -> tuple[Any, ...]:
    """The structure of one module, without those inside it."""
    own = module.__dict__
    found = [module, type(module), id(own.get("config"))]
    found += _settings(own)
    for key, hook in own["_forward_hooks"].items():
        if not _captures(hook):
            found.append(key)
    found += own["_forward_pre_hooks"]
    for weight in own["_parameters"].values():
        if weight is not None:
            found.append((id(weight), type(weight), weight.dtype, weight.device))
    for buffer in _buffers(own):
        found.append((_place_of(buffer), type(buffer), buffer.dtype, buffer.device))
        found.append(version_of(buffer))
    return tuple(found)


def attentions_of(model: nn.Module, kind: type = PreTrainedConfig) -> set[str]:
    """The attention implementations, by name, that the configs of a model and of its modules ask for.

    kind: only read configs of this class
    """
    modules = [*_modules(model)]
    configs = _configs_of(model, modules)
    return _names_of_attention([config for config in configs if isinstance(config, kind)])


class WeightValues:
    """Detects changes of the values of a model's weights.

    A change in place raises a weight's version. A change through `.data` does not, so `SAMPLE` numbers of each weight,
    spread over all of it, are compared as well. Weights made in inference mode have no version, so all of their numbers
    are read. Weights that a stream loads are taken to be constant.
    """

    def __init__(self, model: nn.Module):
        self._owners: list[dict[str, Tensor | None]] = []  # read again by each call of `state`
        self._brought: list[dict[str, Tensor | None]] = []
        for module in _modules(model):
            self._owners.append(module.__dict__["_parameters"])
            if streamed(module):
                for inner in _modules(module):
                    self._brought.append(inner.__dict__["_parameters"])

    def state(self) -> int:
        """A number that differs after a weight has changed."""
        brought = {id(owner) for owner in self._brought}
        every: dict[int, Tensor] = {}
        resident: dict[int, Tensor] = {}  # those that no stream loads
        for owner in self._owners:
            is_brought = id(owner) in brought
            for weight in owner.values():
                if weight is None:
                    continue
                every[id(weight)] = weight
                if not is_brought:
                    resident[id(weight)] = weight
        versions = sum(map(version_of, every.values()))
        contents = _contents([*resident.values()])
        return hash((versions, *contents))


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks or an instance's own `forward` change a call of the module. Hooks that load weights don't count."""
    own = module.__dict__
    if "forward" in own:
        return True
    for hooks in (own["_forward_hooks"], own["_forward_pre_hooks"], *_GLOBAL_HOOKS):
        for hook in hooks.values():
            if not (is_own(hook) or _captures(hook)):
                return True
    return False


def _captures(hook: object) -> bool:
    """Whether a hook is one that transformers registers at the first call that requests hidden states, and leaves.

    Such hooks do nothing except in calls that request hidden states, so they do not count as a change of the model.
    """
    module = getattr(hook, "__globals__", {})
    return module.get("__name__") == "transformers.utils.output_capturing"


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """A model and all modules in it; a shared one each time it occurs. Model.modules() takes several times as long."""
    waiting = [model]
    while waiting:
        module = waiting.pop()
        yield module
        for child in module._modules.values():
            if child is not None:
                waiting.append(child)


def _configs_of(model: nn.Module, modules: list[nn.Module]) -> list[PreTrainedConfig]:
    """The configs of a model and of its modules, each once."""
    config = getattr(model, "config", None)
    every = [config]
    if isinstance(config, PreTrainedConfig):
        every.append(config.get_text_config(decoder=True))
    every += [module.__dict__.get("config") for module in modules]
    unique: dict[int, PreTrainedConfig] = {}
    for each in every:
        if isinstance(each, PreTrainedConfig):
            unique[id(each)] = each
    return [*unique.values()]


def _names_of_attention(configs: list[PreTrainedConfig]) -> set[str]:
    names = set()
    for config in configs:
        name = getattr(config, "_attn_implementation", None)
        if isinstance(name, str):
            names.add(name)
    return names


def _contents(weights: list[Tensor]) -> list[bytes]:
    """Bytes that differ if weights have changed: samples of each weight, or sums of all numbers of inference ones."""
    by_type: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for weight in weights:
        for part in _plain_parts(local_of(weight)):
            numbers = _sums(part) if part.is_inference() else _sample(part)
            kind = (part.device, numbers.dtype)
            several = by_type.setdefault(kind, [])
            several.append(numbers)
    contents = []
    for several in by_type.values():
        on_host = torch.cat(several).cpu()
        plain = on_host.view(torch.uint8).numpy()
        contents.append(plain.tobytes())
    return contents


def _plain_parts(weight: Any) -> list[Tensor]:
    """The ordinary tensors that a weight consists of (several for torchao's); none if its class does not list them."""
    if type(weight) in (nn.Parameter, Tensor):
        is_usual = weight.layout == torch.strided and not (weight.is_meta or weight.is_quantized)
        if not is_usual or weight.numel() == 0:
            return []
        return [weight.detach()]
    if not hasattr(weight, "__tensor_flatten__"):
        return []
    names, _ = weight.__tensor_flatten__()
    parts = []
    for name in names:
        parts += _plain_parts(getattr(weight, name))
    return parts


def _sample(weight: Tensor) -> Tensor:
    """Up to `SAMPLE` numbers of a tensor, evenly spread over its memory."""
    step = math.ceil(weight.numel() / SAMPLE)
    if not weight.is_contiguous():
        return weight.flatten()[::step]
    count = math.ceil(weight.numel() / step)
    return weight.as_strided((count,), (step,))


def _sums(weight: Tensor) -> Tensor:
    """The sums of a tensor's rows and columns, read as integers. A change of one number changes two of the sums."""
    integers = _INTEGERS[weight.dtype.itemsize]
    rows = len(weight) if weight.dim() > 1 else 1
    bits = weight.contiguous().view(integers)
    bits = bits.view(rows, -1)  # [N, K]
    of_columns = bits.sum(0, dtype=torch.int32)
    of_rows = bits.sum(1, dtype=torch.int32)
    return torch.cat([of_columns, of_rows])


def _changes_by_itself(own: dict[str, Any]) -> bool:
    """Whether a module, by its `__dict__`, is a rotary embedding that changes its factors with a sequence's length."""
    rope_type = own.get("rope_type")  # a string, or a dictionary with one for each kind of layer
    if rope_type is None:
        return False
    words = str(rope_type)
    return "longrope" in words or "dynamic" in words


def _settings(own: dict[str, Any]) -> Iterator[Any]:
    """A module's attributes that are numbers, strings or functions, and the names of its adapters.

    own: the module's `__dict__`
    """
    if not _changes_by_itself(own):
        for name, value in own.items():
            if type(value) in _CONTAINERS or name == _CAPTURES:
                continue
            if isinstance(value, _PLAIN):
                yield value
    for name in _ADAPTERS:
        if name in own:
            yield str(own[name])


def _buffers(own: dict[str, Any]) -> Iterator[Tensor]:
    """A module's buffers, by its `__dict__`, without those that it changes in its own passes."""
    for name, buffer in own["_buffers"].items():
        if buffer is not None and ("original" in name or not _changes_by_itself(own)):
            yield buffer


def _place_of(tensor: Tensor) -> int:
    """An identity of a tensor: the address of its memory, or of the object where it has no plain memory."""
    tensor = local_of(tensor)
    is_plain = type(tensor) in (nn.Parameter, Tensor)
    return tensor.data_ptr() if is_plain else id(tensor)


def version_of(tensor: Tensor) -> int:
    """A number that rises when a tensor is changed in place, except through `.data` or in inference mode."""
    tensor = local_of(tensor)
    return 0 if tensor.is_inference() else tensor._version
