"""Looks at the models of a service between steps: other threads may change weights and modules while it decodes.

`Forward.is_current` and `state` say all that is known of a change, and take milliseconds. A look compares the values of
the modules' dictionaries, and the versions of their tensors, by identity, which takes some ten microseconds. Only where
these differ, or nothing is under way, are the others asked. Some models set attributes of their own in each pass, which
are no change.

What neither sees is told by `Service.paused`: weights that are written through `.data` on a GPU while a request runs,
or sparsely, and tensors that are attributes of a module and no parameters or buffers of it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn

from heavypath.speculative.models.forward import host_can_read
from heavypath.speculative.models.structure import version_of

SAMPLE = 16  # elements of each weight that are compared, since a change through `.data` leaves its version as it is
_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (dict, list, tuple, set)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_TENSORS = ("_parameters", "_buffers")


class Look:
    """The state of some models at the time when this was made.

    models: `Forward`s and heads at work
    """

    def __init__(self, models: Sequence[Any]):
        self._models = models
        self._states = [model.state() for model in models]
        self._settings = [*_settings_of(self._modules())]
        self._take()
        self._sampled = [*_samples(models)]
        self._samples = [torch.cat(views) for views in self._sampled]

    def is_current(self, *, thorough: bool) -> bool:
        """True if the models are as they were.

        thorough: also look for what takes milliseconds to find
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
        """Hold no memory of weights, which may go: `_sampled` are views of it, so that no step reads what was freed."""
        self._sampled, self._samples = [], []

    def _modules(self) -> Iterator[nn.Module]:
        return (module for model in self._models for module in model.model.modules())

    def _take(self) -> None:
        """Take down what `_is_alike` compares."""
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
        """True if nothing differs that can be told by identity, by value where that is a number or a word."""
        tensors = self._tensors_now()
        if len(tensors) != len(self._tensors) or [*map(id, tensors)] != [*map(id, self._tensors)]:
            return False
        if [*map(_mark_of, tensors)] != self._marks:
            return False
        try:
            return [tuple(each.values()) for each in self._dicts] == self._values
        except (RuntimeError, ValueError, TypeError):  # of objects that are not compared by identity, such as tensors
            return False

    def _is_the_same(self) -> bool:
        """True if the models compute the same, as far as that can be known."""
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
    """The numbers that change with a tensor's memory, and with its values if they are not changed through `.data`."""
    if type(tensor) not in (nn.Parameter, Tensor):
        return id(tensor), version_of(tensor)
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _settings_of(modules: Iterator[nn.Module]) -> Iterator[tuple[Any, ...]]:
    """The attributes of modules that are numbers, words, functions, or lists and dictionaries of these."""
    for module in modules:
        own = module.__dict__
        if "rope_type" not in own:  # which exchanges its factors by itself; `structure_of` knows of it
            yield tuple(
                (name, _frozen(value))
                for name, value in own.items()
                if not name.startswith("_")  # PyTorch's and transformers' own; `structure_of` has those that count
            )


def _frozen(value: Any) -> Any:
    """A value as it is now, if it is of the kinds that settings are of; else its type."""
    if isinstance(value, _PLAIN) or callable(value):
        return value
    if isinstance(value, _CONTAINERS):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return tuple((str(key), _frozen(each)) for key, each in pairs)
    return type(value)


def _samples(models: Sequence[Any]) -> Iterator[list[Tensor]]:
    """Views of some elements of each weight, in lists of one type; not of those that a stream brings and takes away."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    weights = {id(one): one for model in models if getattr(model, "stream", None) is None for _, one in model.weights()}
    for weight in weights.values():
        if type(weight) in (nn.Parameter, Tensor) and weight.is_contiguous() and weight.numel():
            flat = weight.detach().view(-1)
            view = flat[:: max(1, len(flat) // SAMPLE)][:SAMPLE]
            found.setdefault((weight.dtype, weight.device), []).append(view)
    yield from found.values()
