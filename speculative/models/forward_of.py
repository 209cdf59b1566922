"""Which forward pass a model gets."""

from transformers import PreTrainedModel

from heavypath.speculative.models.forward import Forward
from heavypath.speculative.models.generic import TransformersForward
from heavypath.speculative.models.llama import MODEL_TYPES, LlamaForward


def forward_of(model: PreTrainedModel, name: str, layers: int | None = None) -> Forward:
    """The forward pass of a model over tree nodes: on the model's own modules if it is near to Llama, else by
    transformers.

    name: what messages call the model
    layers: how many layers to run, for an early exit (default: all)

    Raises TypeError for something that is no causal language model, ValueError for one that cannot be decoded by trees.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind in MODEL_TYPES:
        return LlamaForward(model, name, layers)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{name} must be a transformers causal language model, got {type(model).__name__!r}")
    if layers is not None:
        raise ValueError(f"an early exit needs a target of type {', '.join(MODEL_TYPES)}; got {kind!r}")
    return TransformersForward(model, name)
