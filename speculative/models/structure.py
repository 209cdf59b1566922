"""The structure of a model, to notice between two calls of `generate` that it has changed.

A forward pass is chosen, and tried, for the model as it is when a decoder is made. Later somebody may change it. They
may replace a module, register a hook, add or switch an adapter, or quantise a layer. They may move it to another
device, ask for another attention, or set a number in its config or in a module. They may replace a method of a class,
or a function that it looks up by name (`functions`). Each of these shows in the structure, which takes a few
microseconds a module to look up. Values of weights are no part of it: forward passes read them when they are called.

Rows of a cache are of values, too: `WeightValues` tells them apart.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn
from transformers import PreTrainedConfig

from heavypath.speculative.models.functions import FUNCTIONS, functions_of
from heavypath.speculative.models.layer_weights import is_own, streamed
from heavypath.speculative.ranks.parts import local_of

_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters")  # of an adapter's layer in PEFT
_PLAIN = (bool, int, float, str, *FUNCTIONS)
_CONTAINERS = {dict, OrderedDict, set, type(None)}  # most attributes of a module
SAMPLE = 64  # numbers of a weight that are compared, to see changes through `.data`
_CAPTURES = "_output_capturing_hooks_installed"  # by which transformers marks a model that has the hooks of `_captures`
_GLOBAL_HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)


class Structure(NamedTuple):
    """Equal to an earlier one as long as the model computes the same function of its weights' values, where they were.

    function: modules, settings and hooks, and which parameters with what types on what devices. It holds the modules,
              so that none of them can be confused with a later one at the same address
    places:   where the weights' memory is, which a CUDA graph depends on, and the model's function does not
    """

    function: list[tuple[Any, ...]]
    places: list[int]


def structure_of(model: nn.Module) -> Structure:
    """The structure of a model as it is now."""
    modules = [*_modules(model)]
    configs = _configs_of(model, modules)
    found: list[tuple[Any, ...]] = [tuple(hooks) for hooks in _GLOBAL_HOOKS]
    found += functions_of({type(module) for module in modules}, _names_of_attention(configs))
    found += [tuple(f"{name}={value}" for name, value in vars(config).items()) for config in configs]
    places: list[int] = []
    for module in modules:
        own = module.__dict__
        weights = [weight for weight in own["_parameters"].values() if weight is not None]
        places += [_place_of(weight) for weight in weights]
        hooks = [key for key, hook in own["_forward_hooks"].items() if not _captures(hook)]
        kinds = [(id(weight), type(weight), weight.dtype, weight.device) for weight in weights]
        buffers = [(_place_of(one), type(one), one.dtype, one.device, version_of(one)) for one in _buffers(own)]
        also = *hooks, *own["_forward_pre_hooks"], *kinds, *buffers
        found.append((module, type(module), id(own.get("config")), *_settings(own), *also))
    return Structure(found, places)


def attentions_of(model: nn.Module, kind: type = PreTrainedConfig) -> set[str]:
    """The names of attention that the configs of a model and of its modules ask for, of one class if it is given."""
    return _names_of_attention([each for each in _configs_of(model, [*_modules(model)]) if isinstance(each, kind)])


class WeightValues:
    """The values of a model's weights, to be told from those that it had before.

    A change in place raises a weight's version. A change through `.data` does not: so `SAMPLE` numbers of each weight
    are compared as well, spread over all of it. Weights that were made in inference mode have no version, and all of
    their numbers are read. Those of layers that a stream brings do not change.
    """

    def __init__(self, model: nn.Module):
        self._owners: list[dict[str, Tensor | None]] = []  # which are looked at anew each time
        self._brought: list[dict[str, Tensor | None]] = []
        for module in _modules(model):
            self._owners.append(module.__dict__["_parameters"])
            if streamed(module):
                self._brought += [each.__dict__["_parameters"] for each in _modules(module)]

    def state(self) -> int:
        """A number that is another one after a change of a weight."""
        brought = {id(own) for own in self._brought}
        every = {id(weight): weight for own in self._owners for weight in own.values() if weight is not None}
        there = {id(weight): weight for own in self._owners if id(own) not in brought for weight in own.values()}
        versions = sum(map(version_of, every.values()))
        return hash((versions, *_contents([weight for weight in there.values() if weight is not None])))


def has_hooks(module: nn.Module) -> bool:
    """True if a call of the module does more, or other, than its class, except that it brings its weights."""
    own = module.__dict__
    hooks = (own["_forward_hooks"], own["_forward_pre_hooks"], *_GLOBAL_HOOKS)
    return "forward" in own or not all(is_own(hook) or _captures(hook) for each in hooks for hook in each.values())


def _captures(hook: object) -> bool:
    """True if a hook is one of those that transformers registers for good when it is first asked for hidden states.

    They do nothing but in a call that asks for these, so that they are no change of a model.
    """
    return getattr(hook, "__globals__", {}).get("__name__") == "transformers.utils.output_capturing"


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """All modules, one that is used twice as often; `modules()` takes several times as long."""
    waiting = [model]
    while waiting:
        module = waiting.pop()
        yield module
        waiting.extend(child for child in module._modules.values() if child is not None)


def _configs_of(model: nn.Module, modules: list[nn.Module]) -> list[PreTrainedConfig]:
    """The configs of a model and of its modules, each once."""
    config = getattr(model, "config", None)
    text = [config.get_text_config(decoder=True)] if isinstance(config, PreTrainedConfig) else []
    every = {id(each): each for each in (config, *text)}
    for module in modules:
        own = module.__dict__.get("config")
        every[id(own)] = own
    return [each for each in every.values() if isinstance(each, PreTrainedConfig)]


def _names_of_attention(configs: list[PreTrainedConfig]) -> set[str]:
    names = (getattr(config, "_attn_implementation", None) for config in configs)
    return {name for name in names if isinstance(name, str)}


def _contents(weights: list[Tensor]) -> list[bytes]:
    """Bytes that tell the values of weights: of a few numbers of each, and of all where these are inference tensors."""
    by_type: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for weight in weights:
        for part in _plain_parts(local_of(weight)):
            numbers = _sums(part) if part.is_inference() else _sample(part)
            by_type.setdefault((part.device, numbers.dtype), []).append(numbers)
    return [torch.cat(numbers).cpu().view(torch.uint8).numpy().tobytes() for numbers in by_type.values()]


def _plain_parts(weight: Any) -> list[Tensor]:
    """The ordinary tensors that a weight consists of, as those of torchao do of several; none if it does not say."""
    if type(weight) in (nn.Parameter, Tensor):
        return [] if weight.is_meta or weight.numel() == 0 else [weight.detach()]
    names, _ = weight.__tensor_flatten__() if hasattr(weight, "__tensor_flatten__") else ((), None)
    return [part for name in names for part in _plain_parts(getattr(weight, name))]


def _sample(weight: Tensor) -> Tensor:
    """Up to `SAMPLE` numbers of a tensor, evenly spread over its memory."""
    if weight.is_contiguous():
        step = -(-weight.numel() // SAMPLE)
        return weight.as_strided((-(-weight.numel() // step),), (step,))
    return weight.flatten()[:: -(-weight.numel() // SAMPLE)]


def _sums(weight: Tensor) -> Tensor:
    """The sums of a tensor's rows and columns as integers, of which each change of a number changes two."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.dtype.itemsize]
    bits = weight.contiguous().view(whole).view(len(weight) if weight.dim() > 1 else 1, -1)
    return torch.cat([bits.sum(0, dtype=torch.int32), bits.sum(1, dtype=torch.int32)])


def _changes_by_itself(own: dict[str, Any]) -> bool:
    """True if a module is a rotary embedding that exchanges its factors by the length of each text."""
    rope_type = own.get("rope_type")  # a word, or one for each kind of layer
    return rope_type is not None and any(kind in str(rope_type) for kind in ("longrope", "dynamic"))


def _settings(own: dict[str, Any]) -> Iterator[Any]:
    """A module's attributes that are numbers, words or adapters' names; `training` is one of them."""
    if not _changes_by_itself(own):
        for name, value in own.items():
            if type(value) not in _CONTAINERS and isinstance(value, _PLAIN) and name != _CAPTURES:
                yield value
    yield from (str(own[name]) for name in _ADAPTERS if name in own)


def _buffers(own: dict[str, Any]) -> Iterator[Tensor]:
    if not _changes_by_itself(own):
        yield from (buffer for buffer in own["_buffers"].values() if buffer is not None)


def _place_of(tensor: Tensor) -> int:
    """The value that tells one tensor from another: its memory if it has one of its own, else the object."""
    tensor = local_of(tensor)
    return tensor.data_ptr() if type(tensor) in (nn.Parameter, Tensor) else id(tensor)


def version_of(tensor: Tensor) -> int:
    """A number that rises when a tensor is changed in place, unless through `.data` or in inference mode."""
    tensor = local_of(tensor)
    return 0 if tensor.is_inference() else tensor._version
