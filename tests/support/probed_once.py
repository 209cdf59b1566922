"""A model that many tests decode is tried out once, as long as nothing of it changes.

A decoder first compares its forward pass with the model's own (`models/forward_of.py`), which takes longer than a short
text. The distances that were found are kept with a model's weights, and with all else that a test could change of it.
"""

from functools import wraps

import torch
from torch.utils.weak import WeakIdKeyDictionary

from heavypath.kernels import implementation
from heavypath.speculative.models import probe, window_probe
from heavypath.speculative.models.recurrent import probe as recurrent_probe


def remember_probes() -> None:
    """Change this process."""
    for module, name in ((probe, "gap"), (recurrent_probe, "gap"), (window_probe, "_gap")):
        setattr(module, name, _remembered(getattr(module, name)))


def _remembered(gap):
    found = WeakIdKeyDictionary()  # of a model's first weight

    @wraps(gap)
    def remembered(forward, *others):
        models = [forward.model, *(other for other in others if isinstance(other, torch.nn.Module))]
        weights = [*forward.model.parameters()]
        if forward.ranks is not None or any(type(weight) is not torch.nn.Parameter for weight in weights):
            return gap(forward, *others)
        window = [other for other in others if isinstance(other, int)]
        way = type(forward), implementation.library() is None, torch.cuda.is_available()
        state = str([way, window, *map(_state, models)])
        known = found.setdefault(weights[0], {})
        if state not in known:
            known[state] = gap(forward, *others)
        return known[state]

    return remembered


def _state(model):
    """All that a test could change of a model, weights by where they lie and how often they were written."""
    plain = (int, float, str, tuple, type(None), torch.dtype)
    tensors = [(each.data_ptr(), each._version, each.dtype) for each in (*model.parameters(), *model.buffers())]
    modules = [
        (name, type(module), type(module).forward, {
            key: value for key, value in vars(module).items()
            if isinstance(value, plain) or key == "forward" or key.endswith("hooks")
        })
        for name, module in model.named_modules()
    ]  # fmt: skip
    return vars(model.config), tensors, modules
