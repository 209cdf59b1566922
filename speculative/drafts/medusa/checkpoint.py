"""Load Medusa heads as their authors published them: medusa_lm_head.pt, or safetensors with the same names.

    k.j.linear.weight [H, H], k.j.linear.bias [H]    layer j of head k
    k.layers.weight   [V, H]                         its lm_head; older checkpoints have none and use the target's

Heads and layers are counted from the tensors, because config.json often has other numbers: Medusa's own code wrote its
defaults there. Whatever does not fit the target, is missing or is unknown is refused by name. A base model that was
trained together with the heads (Medusa-2) is the target, and needs nothing special.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.speculative.drafts.heads.files import find_files, read_tensors
from heavypath.speculative.drafts.medusa.heads import MedusaConfig, MedusaHeads

WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


def load_medusa(path_or_name: str | Path, target: PreTrainedModel, *, dtype: torch.dtype | None = None) -> MedusaHeads:
    """Load Medusa heads for a target, in eval mode and without gradients; arguments as for `load_head`.

    Raises FileNotFoundError for missing files, and ValueError for tensors that do not fit the target, are missing or
    are unknown.
    """
    files = find_files(path_or_name, weights=WEIGHTS)
    tensors = read_tensors(files)
    text = target.config.get_text_config()
    try:
        with torch.device("meta"):
            heads = MedusaHeads(_config_of(tensors, text.hidden_size, text.vocab_size))
        _check(heads, tensors)
    except ValueError as error:
        raise ValueError(f"the Medusa heads {files.folder!r} cannot draft for this target: {error}") from error
    heads = heads.to(dtype or target.dtype).to_empty(device=target.device).requires_grad_(False)
    for name, place in _by_name(heads).items():
        place.copy_(tensors[name])
    return heads.eval()


def is_medusa(path_or_name: str | Path) -> bool:
    """Whether a folder, or a model in the Hugging Face cache, has Medusa heads. Nothing is downloaded."""
    try:
        find_files(path_or_name, local_files_only=True, weights=WEIGHTS)
    except FileNotFoundError:
        return False
    return True


def _config_of(tensors: Mapping[str, Tensor], hidden_size: int, vocab_size: int) -> MedusaConfig:
    """The config with the numbers of heads and layers that appear in the tensors' names."""
    layers = [re.fullmatch(r"(\d+)\.(\d+)\.linear\.(?:weight|bias)", name) for name in tensors]
    lm_heads = [re.fullmatch(r"(\d+)\.(\d+)\.weight", name) for name in tensors]
    places = [(int(found[1]), int(found[2]) + 1) for found in layers if found]
    places += [(int(found[1]), int(found[2])) for found in lm_heads if found]
    if not places:
        some = ", ".join(sorted(tensors)[:4])
        raise ValueError(f"0.0.linear.weight, the first layer of the first head, is missing; got {some or 'nothing'}")
    heads, deepest = 1 + max(head for head, _ in places), max(count for _, count in places)
    if heads * max(1, deepest) > len(tensors):
        raise ValueError(f"the tensors' names are of {heads} heads of {deepest} layers, and there are {len(tensors)}")
    return MedusaConfig(
        heads=heads,
        layers=deepest,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        owns_lm_heads=any(lm_heads),
    )


def _by_name(heads: MedusaHeads) -> dict[str, Tensor]:
    """Views of the heads' weights, by their names in a checkpoint."""
    layers, found = heads.config.layers, dict[str, Tensor]()
    for head in range(heads.config.heads):
        for layer in range(layers):
            found[f"{head}.{layer}.linear.weight"] = heads.weight[layer, head]
            found[f"{head}.{layer}.linear.bias"] = heads.bias[layer, head]
        if heads.lm_heads is not None:
            found[f"{head}.{layers}.weight"] = heads.lm_heads[head]
    return found


def _check(heads: MedusaHeads, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless these are exactly the tensors of such heads."""
    config, expected = heads.config, _by_name(heads)
    for words, names in (("missing", expected.keys() - tensors), ("not known", tensors.keys() - expected)):
        if names:
            some = ", ".join(sorted(names)[:4]) + (", ..." if len(names) > 4 else "")
            raise ValueError(
                f"{len(names)} tensors are {words}: {some}; expected those of {config.heads} heads of {config.layers} "
                f"layers{', each with an lm_head' if config.owns_lm_heads else ''}"
            )
    for name, place in expected.items():
        tensor = tensors[name]
        if tensor.shape != place.shape:
            raise ValueError(
                f"{name} has shape {[*tensor.shape]}, expected {[*place.shape]} for a target of width "
                f"{config.hidden_size} and {config.vocab_size} tokens; give the target that the heads were trained for"
            )
        if not tensor.is_floating_point():
            raise ValueError(f"{name} is {tensor.dtype}; expected floating point: quantised heads are not supported")
