"""The structure of a model, to notice between two calls of `generate` that it has changed.

A forward pass is chosen, and tried, for the model as it is when a decoder is made. Later somebody may change it. They
may replace a module, register a hook, add or switch an adapter, or quantise a layer. They may move it to another
device, ask for another attention, or set a number in its config or in a module. Each of these shows in the structure,
which takes a few microseconds a module to look up. Values of weights are no part of it: forward passes read them when
they are called.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.nn.modules.module as torch_module
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from heavypath.speculative.models.layer_weights import is_own
from heavypath.speculative.ranks.parts import local_of

_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters")  # of an adapter's layer in PEFT
_PLAIN = (bool, int, float, str)
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
    config = getattr(model, "config", None)
    attention = getattr(config, "_attn_implementation", None)
    found: list[tuple[Any, ...]] = [(attention, ALL_ATTENTION_FUNCTIONS.get(attention), *map(tuple, _GLOBAL_HOOKS))]
    places: list[int] = []
    if isinstance(config, PreTrainedConfig):
        found.append(tuple(f"{name}={value}" for name, value in vars(config.get_text_config(decoder=True)).items()))
    for module in _modules(model):
        own = module.__dict__
        weights = [weight for weight in own["_parameters"].values() if weight is not None]
        places += [_place_of(weight) for weight in weights]
        hooks = [key for key, hook in own["_forward_hooks"].items() if not _captures(hook)]
        kinds = [(id(weight), type(weight), weight.dtype, weight.device) for weight in weights]
        buffers = [(_place_of(one), type(one), one.dtype, one.device, version_of(one)) for one in _buffers(own)]
        also = *hooks, *own["_forward_pre_hooks"], *kinds, *buffers
        found.append((module, type(module).forward, own.get("forward"), *_settings(own), *also))
    return Structure(found, places)


def weights_of(model: nn.Module) -> list[dict[str, Tensor | None]]:
    """The weights of each module, as they are at any time."""
    return [module.__dict__["_parameters"] for module in _modules(model)]


def weight_versions(weights: list[dict[str, Tensor | None]]) -> int:
    """A number that rises when a weight is changed in place, unless through `.data` or in inference mode."""
    return sum(version_of(weight) for own in weights for weight in own.values() if weight is not None)


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


def _changes_by_itself(own: dict[str, Any]) -> bool:
    """True if a module is a rotary embedding that exchanges its factors by the length of each text."""
    rope_type = own.get("rope_type")  # a word, or one for each kind of layer
    return rope_type is not None and any(kind in str(rope_type) for kind in ("longrope", "dynamic"))


def _settings(own: dict[str, Any]) -> Iterator[Any]:
    """A module's attributes that are numbers, words or adapters' names; `training` is one of them."""
    if not _changes_by_itself(own):
        yield from (value for name, value in own.items() if isinstance(value, _PLAIN) and name != _CAPTURES)
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
