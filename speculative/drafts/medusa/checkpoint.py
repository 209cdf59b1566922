"""Load Medusa heads as their authors published them: medusa_lm_head.pt, or safetensors with the same names.

    k.j.linear.weight [H, H], k.j.linear.bias [H]    layer j of head k
    k.layers.weight   [V, H]                         its lm_head; older checkpoints have none and use the target's

Heads and layers are counted from the tensors, because config.json often has other numbers: Medusa's own code wrote its
defaults there. A base model that was trained together with the heads (Medusa-2) is the target, and needs nothing more.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.speculative.drafts.heads.settings import measured_acceptance
from heavypath.speculative.drafts.medusa.heads import MedusaConfig, MedusaHeads
from heavypath.speculative.files.checkpoint import Checkpoint, check_config, check_tensors, opened, renamed, shapes_of
from heavypath.speculative.files.hub import WEIGHTS

_LAYER = re.compile(r"(\d+)\.(\d+)\.linear\.(?:weight|bias)")
_LM_HEAD = re.compile(r"(\d+)\.(\d+)\.weight")


def load_medusa(
    given: str | Path | Checkpoint, target: PreTrainedModel, *, dtype: torch.dtype | None = None
) -> MedusaHeads:
    """Load Medusa heads for a target, in eval mode and without gradients.

    given: their folder, their name on the Hugging Face hub, or their checkpoint; dtype: default: the target's

    Raises FileNotFoundError for missing files, and ValueError for tensors that do not fit the target, are missing or
    are unknown.
    """
    checkpoint = opened(given)
    text = target.config.get_text_config()
    with checkpoint.drafting("Medusa heads"):
        tensors = renamed(checkpoint.tensors(WEIGHTS["medusa"]), {})
        settings = checkpoint.settings()
        config = _config_of(tensors, text.hidden_size, text.vocab_size, measured_acceptance(settings))
        with torch.device("meta"):
            heads = MedusaHeads(config)
        lm_heads = ", each with an lm_head" if config.owns_lm_heads else ""
        check_tensors(
            shapes_of(tensors),
            shapes_of(heads.by_name()),
            f"{config.heads} heads of {config.layers} layers{lm_heads}",
            lambda name: (
                f" for a target of width {text.hidden_size} and {text.vocab_size} tokens; give the target that the "
                "heads were trained for"
            ),
        )
        sizes = {"hidden_size": text.hidden_size} | ({"vocab_size": text.vocab_size} if config.owns_lm_heads else {})
        check_config(settings, sizes)
        heads = heads.to(dtype or target.dtype).to_empty(device=target.device).requires_grad_(False)
        for name, place in heads.by_name().items():
            place.copy_(tensors[name])
    return heads.eval()


def is_medusa(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has Medusa heads."""
    return any(checkpoint.find(file) for file in WEIGHTS["medusa"])


def _config_of(
    tensors: Mapping[str, Tensor], hidden_size: int, vocab_size: int, acceptance: tuple[float, float] | None
) -> MedusaConfig:
    """The config with the numbers of heads and layers that appear in the tensors' names."""
    layers, lm_heads = ([found for name in tensors if (found := kind.fullmatch(name))] for kind in (_LAYER, _LM_HEAD))
    places = [(int(found[1]), int(found[2]) + 1) for found in layers]
    places += [(int(found[1]), int(found[2])) for found in lm_heads]
    if not places:
        some = ", ".join(sorted(tensors)[:4])
        raise ValueError(f"0.0.linear.weight, the first layer of the first head, is missing; got {some or 'nothing'}")
    heads = 1 + max(head for head, _ in places)
    deepest = max(count for _, count in places)
    if heads * max(1, deepest) > len(tensors):
        raise ValueError(f"the tensors' names are of {heads} heads of {deepest} layers, and there are {len(tensors)}")
    return MedusaConfig(
        heads=heads,
        layers=deepest,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        owns_lm_heads=any(lm_heads),
        acceptance=acceptance,
    )
