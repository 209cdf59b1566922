"""Choose the forward pass of a model: the fastest one that gives the model's own logits. Refuse models that none fits.

A model that is a Llama, Mistral, Qwen2 or Qwen3 exactly as transformers has it runs by `LlamaForward`, which calls the
smallest of its modules directly. A Qwen3.5 runs by `QwenForward` in the same way. Every other model runs by
transformers' own forward pass, so hooks, adapters, patches and subclasses take effect. Each model is first tried on a
small tree (`probe`). A forward pass of a user's own, registered in `FORWARDS`, comes before all of these.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from heavypath.speculative.models.forward import Forward, parts_of
from heavypath.speculative.models.llama import MODEL_TYPES, LlamaForward, is_as_published
from heavypath.speculative.names import load
from heavypath.speculative.ranks.peers import ALONE, Peers

if TYPE_CHECKING:
    from heavypath.speculative.models.generic import TransformersForward

logger = logging.getLogger(__name__)

# Forward passes of users by `config.model_type`: a class that inherits `Forward`, or a function of model and name.
FORWARDS: dict[str, Callable[[PreTrainedModel, str], Forward]] = {}

# How far logits may differ from the model's own by rounding, in their standard deviations; 0.003 for wider types.
_TOLERANCE = {torch.float16: 0.03, torch.bfloat16: 0.1}


def forward_of(model: Any, name: str, layers: Sequence[int] | None = None) -> Forward:
    """The forward pass over tree nodes of a transformers causal language model, or of a PEFT model around one.

    name:   what messages call the model: "target", whose logits must be right, or "draft", whose logits need not be
    layers: which layers to run, for an early exit (default: all)

    Raises TypeError for something that is no causal language model, ValueError for one that cannot be decoded by trees.
    """
    inner = _without_adapter_wrapper(model, name)
    _check_one_adapter(inner, name)
    if any(hasattr(module, "_hf_hook") for module in inner.modules()):  # accelerate's hooks: weights may be on disk
        load("streamed_if_offloaded")(inner)
    parts = parts_of(inner, name)
    if layers is not None:  # only drafts have layers, and a draft's logits need not be checked
        if (kind := inner.config.model_type) not in MODEL_TYPES:
            raise ValueError(f"an early exit needs a target of type {', '.join(MODEL_TYPES)}; got {kind!r}")
        if not parts.are_usual(inner):
            raise ValueError("an early exit needs a target that is whole, or split by its own tensor-parallel plan")
        forward = LlamaForward(inner, name, layers)
    elif inner.config.model_type in FORWARDS:
        forward = load("registered_forward")(inner, name, model)
    elif is_as_published(inner, parts) and _is_a_llama(inner, name):
        forward = LlamaForward(inner, name)
    else:
        config = inner.config.get_text_config(decoder=True)
        kinds = getattr(config, "layer_types", None) or ()
        has_recurrent_layers = "linear_attention" in kinds or "conv" in kinds
        if has_recurrent_layers or getattr(inner, "_is_stateful", False):
            forward = load("recurrent_forward")(inner, name, lambda own: own.gap(model) <= tolerance_of(own))
        else:
            forward = load("TransformersForward")(inner, name)
        if forward.is_foreign:
            _check(forward, model)
    forward.watch(model)
    return forward


def _check_one_adapter(model: nn.Module, name: str) -> None:
    """Raise ValueError for a model that uses a different adapter for each row of a batch; decoding moves rows.

    PEFT does this by hooks for a call with `adapter_names` or `alora_offsets`. The hooks' keywords show it.
    """
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            given = getattr(hook, "keywords", {})
            for option in ("adapter_names", "alora_offsets"):
                if given.get(option) is not None:
                    raise ValueError(
                        f"{name} has {option}={given[option]!r}, an adapter for each row of a batch; one adapter "
                        "decodes a batch: choose it by set_adapter(name), or none by disable_adapter(), leave "
                        f"{option} out, and decode the prompts of another one apart"
                    )


def peers_of(models: Sequence[Forward], device: torch.device, communication: Any = None) -> Peers:
    """The processes that decode together, over which the models' weights are split; `ALONE` for this process only.

    device:        the device on which they exchange numbers
    communication: the decoder's option of this name, for models that a user has split; else None

    Raises ValueError for NaN or infinite weights, and with several processes RankMismatchError if weights differ.
    """
    for model in models:
        kind = type(model.model).__name__
        by = type(model).__name__
        logger.debug("%s: a %s, %s on %s, by %s", model.name, kind, model.dtype, model.device, by)
    if communication is not None or any(model.ranks is not None for model in models):
        return load("agreement_of")(models, device, communication)
    for model in models:
        model.check_weights()
    return ALONE


def check_alone(what: str, *models: Any) -> None:
    """Raise ValueError if a model is split over processes. what: the feature, which runs in one process only."""
    for model in models:
        if model.ranks is not None:
            raise ValueError(
                f"{what} runs in one process, got {model.name} split over {model.ranks.count}; load it in one, or "
                "decode by `generate`"
            )


def _is_a_llama(model: PreTrainedModel, name: str) -> bool:
    """Whether `LlamaForward` gives the model's own logits, tried on a copy with one layer of each kind."""
    from heavypath.speculative.models.probe import NotFiniteError, gap, with_a_layer_of_each_kind

    short = with_a_layer_of_each_kind(model)
    forward = LlamaForward(short, name)
    try:
        return gap(forward, short) <= tolerance_of(forward)
    except NotFiniteError:  # the check of the whole model will report it
        return False


def tolerance_of(forward: Forward) -> float:
    """How far a forward pass's logits may differ from the model's own, in their standard deviations."""
    return _TOLERANCE.get(forward.dtype, 3e-3)


def _check(forward: "TransformersForward", model: nn.Module) -> None:
    """Raise ValueError if the logits over a small tree differ from the model's own; for a draft, log a warning instead.

    A model that runs a user's own function is tried with long sequences, too.
    """
    from heavypath.speculative.models.probe import NotFiniteError, lengths_to_try
    from heavypath.speculative.models.window_probe import check_windows

    found = 0.0
    length = 0
    for length in lengths_to_try(forward):
        try:
            if length is None:
                found = forward.gap(model)
            else:
                chain = length // 8
                found = forward.gap(model, length - chain - 2, chain)
        except (NotFiniteError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise forward.refusal(f"{error or type(error).__name__}") from error
        if not found <= tolerance_of(forward):
            break
    else:
        return check_windows(forward, tolerance_of(forward))
    what = f"a tree's logits differ from those of its paths by {found:.2g} standard deviations"
    if length is not None:
        what += f" after {length} tokens, while shorter texts agree"
    if forward.strange:
        what += f"; not the library's own: {', '.join(forward.strange)}"
    if forward.name == "draft":
        logger.warning("the draft's logits are not its own (%s): its tokens will be accepted less often", what)
        return
    raise forward.refusal(
        f"{what}, expected at most {tolerance_of(forward)}; its attention must take a 4-D mask, position_ids and a "
        "cache, and its layers must treat each token by itself, which those that scale activations by the whole "
        "tensor (torch.ao's quantize_dynamic) do not"
    )


def _without_adapter_wrapper(model: Any, name: str) -> PreTrainedModel:
    """The transformers model: `model` itself, or the one inside a PeftModel, whose layers have the adapter."""
    if isinstance(model, PreTrainedModel):
        return model
    inside = model.modules() if isinstance(model, nn.Module) else ()
    wrapped = [module for module in inside if isinstance(module, PreTrainedModel)]
    if not wrapped:
        hint = "; a module that drafts without a cache inherits heavypath.Draft, too" if name == "draft" else ""
        raise TypeError(f"{name} must be a transformers causal language model, got {type(model).__name__!r}{hint}")
    if not hasattr(model, "get_base_model"):
        raise TypeError(
            f"{name} must be a transformers causal language model, got {type(model).__name__!r} around a "
            f"{type(wrapped[0]).__name__}; give one that is not wrapped, with all of its weights in this process"
        )
    config: Any = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(
            f"{name} has a {config.peft_type.value} adapter, which puts virtual tokens before each text; adapters "
            "within the layers, like LoRA, can be decoded"
        )
    return wrapped[0]
