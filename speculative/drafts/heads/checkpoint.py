"""Load an EAGLE head as its authors published it.

Supported layouts, by tensor names:

    official EAGLE-1 and 2    fc, layers.0.*, embed_tokens
    official EAGLE-3          fc, midlayer.*, norm, lm_head, d2t; also SpecForge's and NVIDIA's
    speculators               fc, layers.0.*, ...; for EAGLE-1 fusion_fc, transformer.*
    P-EAGLE                   mask_hidden in either of the last two
    EAGLE-3.1                 fc_norm.0, .1, .2 in either of the last two

The variant is recognised by the tensors as far as possible: biases, layers, norms, own embedding and lm_head.
`settings.py` reads the rest from config.json.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.speculative.drafts.heads.config import HeadConfig
from heavypath.speculative.drafts.heads.eagle import EagleHead
from heavypath.speculative.drafts.heads.fitting import filled
from heavypath.speculative.drafts.heads.settings import (
    OWN_KEY,
    HeadSettings,
    ModelSettings,
    config_of,
    is_settings_of_head,
    together,
)
from heavypath.speculative.files.checkpoint import Checkpoint, opened, our_name, renamed

# Prefixes of other layouts, with ours.
_RENAMED = {"model.": "", "midlayer.": "layers.0.", "fusion_fc.": "fc.", "transformer.": "layers.0."}


def load_head(
    given: str | Path | Checkpoint,
    target: PreTrainedModel,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> EagleHead:
    """Load an EAGLE head for a target, in eval mode and without gradients.

    given: its folder, its name on the Hugging Face hub, or its checkpoint
    dtype, device: default: the target's

    Raises FileNotFoundError for missing files, and ValueError for a checkpoint that is not a head, and for tensors that
    do not fit the target, are missing or are unknown.
    """
    checkpoint = opened(given)
    with checkpoint.drafting("head"):
        settings = checkpoint.settings(HeadSettings)
        tensors = renamed(checkpoint.tensors(), _RENAMED)
        checkpoint.check_all_is_read()
        if not _has_fc(tensors):
            hint = (
                "" if is_settings_of_head(settings) else "; a whole model loads by AutoModelForCausalLM.from_pretrained"
            )
            raise ValueError(f"fc.weight, which reads the target's hidden states for layers.0, is missing{hint}")
        if "mask_hidden" in tensors:  # [3 Ht] with one or two axes before
            tensors["mask_hidden"] = tensors["mask_hidden"].flatten()
        if (settings.get(OWN_KEY) or {}).get("lm_head_of_target"):
            tensors["lm_head.weight"] = _rows_of_target(target, tensors["d2t"])
        config = config_of(settings, tensors, target)
        if settings.get("tie_word_embeddings") and _could_be_tied(config, tensors):
            tensors["lm_head.weight"], config = tensors["embed_tokens.weight"], replace(config, owns_lm_head=True)
        layer = together(settings.get("eagle_config"), settings, settings.get("transformer_layer_config"))
        return filled(EagleHead, config, layer, tensors, dtype or target.dtype, device or target.device)


def is_head(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is an EAGLE head, by config.json or by its tensors."""
    if is_settings_of_head(checkpoint.settings(ModelSettings)):
        return True
    return _has_fc({our_name(name, _RENAMED) for name in checkpoint.shapes()})


def _has_fc(names: Collection[str]) -> bool:
    return "fc.weight" in names and any(name.startswith("layers.0.") for name in names)


def _rows_of_target(target: PreTrainedModel, offsets: Tensor) -> Tensor:
    """The target's lm_head weights [Vd, H] for a head's tokens. offsets: the checkpoint's d2t, not checked yet."""
    lm_head = target.get_output_embeddings()
    weight = getattr(lm_head, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise ValueError(
            f"the head takes its lm_head from the target, whose lm_head is a {type(lm_head).__name__} without plain "
            "weights; load the target unquantised"
        )
    tokens = offsets.long() + torch.arange(len(offsets), device=offsets.device)
    tokens = tokens.clamp(0, len(weight) - 1)
    return weight.detach()[tokens.to(weight.device)]


def _could_be_tied(config: HeadConfig, tensors: dict[str, Tensor]) -> bool:
    """Whether the checkpoint may have omitted the lm_head as a copy of the head's own embedding."""
    all_tokens = config.generation == 3 and config.draft_vocab_size == config.vocab_size
    return all_tokens and "embed_tokens.weight" in tensors and "lm_head.weight" not in tensors
