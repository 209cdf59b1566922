"""Kinds of drafts: the draft that a user's argument stands for, and its description.

A new kind of draft is a file with a class of `Draftable`, the `Draft` that it makes, and a function that says so:

    @as_draft.register
    def _(given: Mine, target: Forward, model: PreTrainedModel) -> Draft:
        return MyDraft(given, target)

and of `describe` and `draft_parameter_count` where those here do not fit it. Where that is another file than the one of
the class, `names.DRAFTS` says so.
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

AnyDraft = PreTrainedModel | Draftable | Draft  # what users give


@singledispatch
def as_draft(given: Any, target: Forward, model: PreTrainedModel) -> Draft:
    """The draft that a user gave for a target; `target` is `forward_of(model)`.

    Raises TypeError or ValueError, saying what differs, for something that is no model and no draft, and for a model
    with another vocabulary or on another device.
    """
    if load_kind(given):
        return as_draft(given, target, model)
    if is_own(given):
        from heavypath.speculative.drafts.own import OwnDraft

        return OwnDraft(given, target.vocab_size, target.device)
    forward = forward_of(given, "draft")
    if forward.device != target.device:
        raise ValueError(f"target and draft must be on one device, got {target.device} and {forward.device}")
    return ModelDraft(forward, target.vocab_size)


def is_own(given: object) -> TypeGuard[Draft]:
    """True if it is to be taken for a user's own `Draft`: not one of ours, nor a model that transformers made."""
    return not isinstance(given, Draftable) and (not isinstance(given, nn.Module) or has_methods(given))


def has_methods(draft: object) -> bool:
    """True if an object has a method that drafts have, and models of transformers have not."""
    return any(callable(getattr(draft, name, None)) for name in ("new_cache", "prefill"))


@singledispatch
def describe(given: Any) -> str:
    """The user's argument in words, by which a profile knows it again: a model's type and size, a draft's settings."""
    if load_kind(given):
        return describe(given)
    if isinstance(given, Draftable):
        return repr(given)
    if is_own(given):
        return f"own draft {type(given).__name__}"
    layers = given.config.get_text_config(decoder=True).num_hidden_layers
    return f"{given.config.model_type}, {layers} layers, {parameter_count(given)} parameters"


def parameter_count(model: nn.Module) -> int:
    """The parameters of a model; a tied head and embedding count once."""
    return sum(weight.numel() for weight in model.parameters())


@singledispatch
def draft_parameter_count(given: Any, target: PreTrainedModel) -> int:
    """The parameters that drafting a level goes through: none for what has no weights, those of all of its parts."""
    if load_kind(given):
        return draft_parameter_count(given, target)
    return parameter_count(given) if isinstance(given, nn.Module) else 0


@as_draft.register
def _(given: EarlyExit, target: Forward, model: PreTrainedModel) -> Draft:
    return ModelDraft(forward_of(model, "draft", layers=given.indices), target.vocab_size)


@draft_parameter_count.register
def _(given: EarlyExit, target: PreTrainedModel) -> int:
    """The target's without those of the layers left out: embedding, final norm and head count, as a model's do."""
    decoder: Any = target.get_decoder()
    left_out = [layer for index, layer in enumerate(decoder.layers) if index not in given.indices]
    return parameter_count(target) - sum(map(parameter_count, left_out))
