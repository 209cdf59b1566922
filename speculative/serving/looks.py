"""Notice between steps of a service that another thread has changed a model.

`Forward.is_current` and `state` find every change that can be found, but take milliseconds. A `Look` compares the
values of the modules' dictionaries by identity, and the versions of their tensors, which takes some ten microseconds.
Only where these differ, or when nothing is being decoded, it calls the slow functions. (Some models set attributes of
their own in each pass, which are not changes.)

Neither way notices these changes, so they must be made within `Service.paused`: weights written through `.data` on a
GPU while a request runs, or written only sparsely, and tensors that are plain attributes of a module instead of
parameters or buffers.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn

from heavypath.speculative.models.forward import host_can_read
from heavypath.speculative.models.structure import version_of

SAMPLE = 16  # how many elements of each weight are compared, since a change through `.data` keeps the version
_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (dict, list, tuple, set)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_TENSORS = ("_parameters", "_buffers")


class Look:
    """A record of the state of some models, made to find out later whether they have changed.

    models: forward passes (`Forward`) and draft heads
    """

    def __init__(self, models: Sequence[Any]):
        self._models = models
        self._states = [model.state() for model in models]
        self._settings = [*_settings_of(self._modules())]
        self._take()
        self._sampled = [*_samples(models)]
        self._samples = [torch.cat(views) for views in self._sampled]

    def is_current(self, *, thorough: bool) -> bool:
        """Whether the models are unchanged since this object was made.

        thorough: also make the checks that take milliseconds; otherwise only if the quick comparison differs

        False also while another thread is changing a dictionary of a module.
        """
        try:
            if not thorough and self._is_alike():
                return self._has_same_samples(on_gpu=False)
            if not (self._is_the_same() and self._has_same_samples(on_gpu=thorough)):
                return False
            self._take()
        except RuntimeError:  # a dictionary that another thread is changing
            return False
        return True

    def let_go(self) -> None:
        """Release all views of weights, so that memory which is about to be freed is not read."""
        self._sampled = []
        self._samples = []

    def _modules(self) -> Iterator[nn.Module]:
        return (module for model in self._models for module in model.model.modules())

    def _take(self) -> None:
        """Record what `_is_alike` compares: the values of the modules' dictionaries, and their tensors' versions."""
        modules = [module.__dict__ for module in self._modules()]
        self._dicts = [own[name] for own in modules for name in ("_modules", *_HOOKS)]
        self._dicts += [*modules, torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        configs = [getattr(model.model, "config", None) for model in self._models]
        self._dicts += [config.__dict__ for config in configs if config is not None]
        inner = (value for own in modules for name, value in own.items() if not name.startswith("_"))
        self._dicts += [value for value in inner if isinstance(value, dict)]
        self._values = [tuple(each.values()) for each in self._dicts]
        self._of_tensors = [own[name] for own in modules for name in _TENSORS if own[name]]
        self._tensors = self._tensors_now()
        self._marks = [*map(_mark_of, self._tensors)]

    def _tensors_now(self) -> list[Tensor]:
        return [tensor for each in self._of_tensors for tensor in each.values() if tensor is not None]

    def _is_alike(self) -> bool:
        """Whether nothing differs by identity, or by value for numbers and strings."""
        tensors = self._tensors_now()
        if len(tensors) != len(self._tensors) or [*map(id, tensors)] != [*map(id, self._tensors)]:
            return False
        if [*map(_mark_of, tensors)] != self._marks:
            return False
        try:
            return [tuple(each.values()) for each in self._dicts] == self._values
        except (RuntimeError, ValueError, TypeError):  # raised by values without a plain comparison, such as tensors
            return False

    def _is_the_same(self) -> bool:
        """Whether the models compute the same function, as far as the slow functions can tell."""
        if not all(model.is_current() for model in self._models):
            return False
        if [model.state() for model in self._models] != self._states:
            return False
        return [*_settings_of(self._modules())] == self._settings

    def _has_same_samples(self, *, on_gpu: bool) -> bool:
        for views, sample in zip(self._sampled, self._samples, strict=True):
            if (on_gpu or host_can_read(sample.device)) and not torch.equal(torch.cat(views), sample):
                return False
        return True


def _mark_of(tensor: Tensor) -> tuple[int, int]:
    """Numbers that change when a tensor's memory changes, or its values (except through `.data`)."""
    if type(tensor) not in (nn.Parameter, Tensor):
        return id(tensor), version_of(tensor)
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _settings_of(modules: Iterator[nn.Module]) -> Iterator[tuple[Any, ...]]:
    """The attributes of modules that are numbers, strings, functions, or lists and dictionaries of these."""
    for module in modules:
        own = module.__dict__
        if "rope_type" not in own:  # rotary embeddings may change their own factors; `structure_of` handles them
            yield tuple(
                (name, _frozen(value))
                for name, value in own.items()
                if not name.startswith("_")  # internal to PyTorch or transformers; `structure_of` has those that matter
            )


def _frozen(value: Any) -> Any:
    """An immutable copy of a setting; for a value of another kind, its type."""
    if isinstance(value, _PLAIN) or callable(value):
        return value
    if isinstance(value, _CONTAINERS):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return tuple((str(key), _frozen(each)) for key, each in pairs)
    return type(value)


def _samples(models: Sequence[Any]) -> Iterator[list[Tensor]]:
    """Views of some elements of each weight, in one list for each dtype and device; streamed weights are left out."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    weights = {id(one): one for model in models if getattr(model, "stream", None) is None for _, one in model.weights()}
    for weight in weights.values():
        if type(weight) in (nn.Parameter, Tensor) and weight.is_contiguous() and weight.numel():
            flat = weight.detach().view(-1)
            view = flat[:: max(1, len(flat) // SAMPLE)][:SAMPLE]
            found.setdefault((weight.dtype, weight.device), []).append(view)
    yield from found.values()
