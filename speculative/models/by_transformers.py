"""Choose between the two passes that call transformers' own: for attention layers, or for recurrent ones, too."""

from transformers import PreTrainedModel

from heavypath.speculative.models.generic import TransformersForward


def transformers_forward(model: PreTrainedModel, name: str) -> TransformersForward:
    """The forward pass of a model over tree nodes, by transformers' own."""
    kinds = {*(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())}
    if kinds & {"linear_attention", "conv"} or getattr(model, "_is_stateful", False):
        from heavypath.speculative.models.recurrent.forward import RecurrentForward

        return RecurrentForward(model, name)
    return TransformersForward(model, name)
