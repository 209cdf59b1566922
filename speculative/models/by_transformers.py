"""Choose among the passes of models that are no Llamas: transformers' own, for recurrent layers, too, and Qwen3.5's.

A Qwen3.5 exactly as transformers has it runs by its own modules, where that gives its logits.
"""

from collections.abc import Callable

from transformers import PreTrainedModel

from heavypath.speculative.models.generic import TransformersForward


def transformers_forward(
    model: PreTrainedModel, name: str, fits: Callable[[TransformersForward], bool]
) -> TransformersForward:
    """The forward pass of a model over tree nodes; fits: whether one that is not transformers' own gives its logits."""
    kinds = {*(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())}
    if kinds & {"linear_attention", "conv"} or getattr(model, "_is_stateful", False):
        from heavypath.speculative.models.recurrent.forward import RecurrentForward
        from heavypath.speculative.models.recurrent.qwen import QwenForward, is_published_qwen

        if is_published_qwen(model) and fits(own := QwenForward(model, name)):
            return own
        return RecurrentForward(model, name)
    return TransformersForward(model, name)
