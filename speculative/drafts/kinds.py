"""Convert what users pass as a draft into a `Draft`, and describe it.

A new kind of draft is a file with a subclass of `Draftable`, the `Draft` that it becomes, and a registered function:

    @as_draft.register
    def _(given: Mine, target: Forward, model: PreTrainedModel) -> Draft:
        return MyDraft(given, target)

Register functions for `describe` and `draft_parameter_count`, too, if the defaults do not fit. If the functions are
registered in another file than the class, add that file to `names.DRAFTS`.
"""

from functools import singledispatch
from typing import Any, TypeGuard

from torch import nn
from transformers import PreTrainedModel

from heavypath.speculative.drafts.draft import Draft, Draftable
from heavypath.speculative.drafts.model import EarlyExit, ModelDraft
from heavypath.speculative.models.forward import Forward
from heavypath.speculative.models.forward_of import forward_of
from heavypath.speculative.names import load_kind

AnyDraft = PreTrainedModel | Draftable | Draft  # types that users may pass as a draft


@singledispatch
def as_draft(given: Any, target: Forward, model: PreTrainedModel) -> Draft:
    """The `Draft` for a model, module or settings that a user passed. target: `forward_of(model)`

    Raises TypeError or ValueError for something that is neither a model nor a draft, and for a model with another
    vocabulary or on another device.
    """
    if isinstance(given, Draftable) and load_kind(given):
        return as_draft(given, target, model)
    if is_own(given):
        from heavypath.speculative.drafts.own import OwnDraft

        return OwnDraft(given, target.vocab_size, target.device)
    forward = forward_of(given, "draft")
    if forward.device != target.device:
        raise ValueError(f"target and draft must be on one device, got {target.device} and {forward.device}")
    return ModelDraft(forward, target.vocab_size)


def is_own(given: object) -> TypeGuard[Draft]:
    """Whether an object is treated as a user's draft: no `Draftable`, and no nn.Module without a draft's methods."""
    if isinstance(given, Draftable):
        return False
    if isinstance(given, nn.Module):
        return has_methods(given)
    return True


def has_methods(draft: object) -> bool:
    """Whether an object is a `Draft`, or has a method that drafts have and transformers models do not have."""
    if isinstance(draft, Draft):
        return True
    return any(callable(getattr(draft, name, None)) for name in ("new_cache", "prefill"))


@singledispatch
def describe(given: Any) -> str:
    """A draft or model in words, by which a profile recognises it: a model's type and size, or a draft's settings."""
    if load_kind(given):
        return describe(given)
    if isinstance(given, Draftable):
        return repr(given)
    if is_own(given):
        return f"own draft {type(given).__name__}"
    config = given.config
    layers = config.get_text_config(decoder=True).num_hidden_layers
    return f"{config.model_type}, {layers} layers, {parameter_count(given)} parameters"


def parameter_count(model: nn.Module) -> int:
    """The number of parameters of a model; tied embedding and lm_head count once."""
    return sum(weight.numel() for weight in model.parameters())


@singledispatch
def draft_parameter_count(given: Any, target: PreTrainedModel) -> int:
    """The number of parameters that drafting one level reads: 0 without weights; for composites, the sum of parts."""
    if load_kind(given):
        return draft_parameter_count(given, target)
    if isinstance(given, nn.Module):
        return parameter_count(given)
    return 0


@as_draft.register
def _(given: EarlyExit, target: Forward, model: PreTrainedModel) -> Draft:
    forward = forward_of(model, "draft", layers=given.indices)
    return ModelDraft(forward, target.vocab_size)


@draft_parameter_count.register
def _(given: EarlyExit, target: PreTrainedModel) -> int:
    """The target's parameters without the layers left out: embedding, final norm and lm_head count."""
    decoder: Any = target.get_decoder()
    count = parameter_count(target)
    for index, layer in enumerate(decoder.layers):
        if index not in given.indices:
            count -= parameter_count(layer)
    return count
