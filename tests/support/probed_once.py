"""A model that many tests decode is tried out once, as long as nothing of it changes.

A decoder first compares its forward pass with the model's own (`models/forward_of.py`), which takes longer than a short
text. What was found is kept with a model's weights, and with all else that a test could change of it. A test that
changes what models have in common, such as attention functions, takes the fixture `tried_anew`.
"""

from functools import wraps

import torch
from torch.utils.weak import WeakIdKeyDictionary

from heavypath.kernels import implementation
from heavypath.speculative.models import forward_of, probe, window_probe
from heavypath.speculative.models.recurrent import probe as recurrent_probe

REMEMBERED = True


def remember_probes() -> None:
    """Change this process."""
    trials = ((forward_of, "_is_a_llama"), (probe, "gap"), (recurrent_probe, "gap"), (window_probe, "_gap"))
    for module, name in trials:
        setattr(module, name, _remembered(getattr(module, name)))


def _remembered(trial):
    found = WeakIdKeyDictionary()  # of a model's first weight

    @wraps(trial)
    def remembered(*given):
        models = [each if isinstance(each, torch.nn.Module) else each.model for each in given if hasattr(each, "model")]
        weights = [*models[0].parameters()]
        strange = any(type(weight) is not torch.nn.Parameter or weight.is_inference() for weight in weights)
        if strange or not REMEMBERED:
            return trial(*given)
        way = type(given[0]), implementation.library() is None, torch.cuda.is_available()
        state = str([way, [each for each in given if isinstance(each, int)], *map(_state, models)])
        known = found.setdefault(weights[0], {})
        if state not in known:
            known[state] = trial(*given)
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
