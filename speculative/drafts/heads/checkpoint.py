"""Load an EAGLE head as its authors published it, and save one in the official layout.

Supported layouts, by tensor names:

    official EAGLE-1 and 2    fc, layers.0.*, embed_tokens
    official EAGLE-3          fc, midlayer.*, norm, lm_head, d2t; also SpecForge's and NVIDIA's
    speculators               fc, layers.0.*, ...; for EAGLE-1 fusion_fc, transformer.*
    P-EAGLE                   mask_hidden in either of the last two
    EAGLE-3.1                 fc_norm.0, .1, .2 in either of the last two

The variant is recognised by the tensors as far as possible: biases, layers, norms, own embedding and lm_head.
`settings.py` reads the rest from config.json. Whatever does not fit the target, is missing or is unknown is refused by
name: a head that is only partly loaded drafts noise, and nothing else would show it.
"""

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.speculative.drafts.heads.config import HeadConfig
from heavypath.speculative.drafts.heads.eagle import EagleHead
from heavypath.speculative.drafts.heads.files import check_all_is_read, find_files, read_tensors, tensor_names
from heavypath.speculative.drafts.heads.fitting import check_types, fill, take_the_tokens
from heavypath.speculative.drafts.heads.saving import common_settings, save_checkpoint
from heavypath.speculative.drafts.heads.settings import (
    OWN_KEY,
    HeadSettings,
    ModelSettings,
    config_of,
    is_settings_of_head,
)
from heavypath.speculative.files.typed_json import read_json

# Prefixes of other layouts, with ours.
_RENAMED = {"model.": "", "midlayer.": "layers.0.", "fusion_fc.": "fc.", "transformer.": "layers.0."}
# Tensors that are ignored: copies of the target's, computed tables, and the inverse of d2t.
_HARMLESS = re.compile(r"(t2d|verifier_lm_head\.weight|verifier_norm\.weight|(.*\.)?rotary_emb\.inv_freq)$")


def load_head(
    path_or_name: str | Path,
    target: PreTrainedModel,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
) -> EagleHead:
    """Load an EAGLE head for a target, in eval mode and without gradients.

    path_or_name: its folder, or its name on the Hugging Face hub
    dtype, device: default: the target's
    revision, local_files_only: for a name, as in transformers' `from_pretrained`

    Raises FileNotFoundError for missing files, and ValueError for a checkpoint that is not a head, and for tensors that
    do not fit the target, are missing or are unknown.
    """
    files = find_files(path_or_name, revision, local_files_only)
    settings, tensors = read_json(files.config, HeadSettings), read_tensors(files)
    check_all_is_read(files)
    try:
        tensors = _renamed(tensors)
        head = _built(settings, tensors, target)
        fill(head, tensors, dtype or target.dtype, torch.device(device or target.device))
    except ValueError as error:
        raise ValueError(f"the head {files.folder!r} cannot draft for this target: {error}") from error
    return head.requires_grad_(False).eval()


def is_head(path_or_name: str | Path) -> bool:
    """Whether a folder, or a model in the Hugging Face cache, is an EAGLE head. Nothing is downloaded."""
    try:
        files = find_files(path_or_name, local_files_only=True)
    except FileNotFoundError:
        return False
    settings = read_json(files.config, ModelSettings)
    return is_settings_of_head(settings) or _has_fc({_ours(name) for name in tensor_names(files)})


def save_head(head: EagleHead, folder: str | Path) -> None:
    """Write a head to a folder in the official layout, in its own dtype; `load_head` returns an equal head."""
    config, tensors = head.config, head.state_dict()
    if config.generation == 3:
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    settings: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if config.generation == 3 else "LlamaForCausalLM"],
        "model_type": "llama",
        **common_settings(config),
        "target_hidden_size": config.target_hidden_size,
        "bias": "fc" in config.biases,
        "mlp_bias": "gate_proj" in config.biases,
        OWN_KEY: {"taps": config.taps, "feeds_back_normed": config.feeds_back_normed},
    }
    if config.generation == 3:
        settings |= {
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": config.taps, "use_aux_hidden_state": True},
            "fc_norm": config.tap_norms,
            "norm_before_fc": config.norm_before_fc,
            "norm_before_residual": config.norm_before_residual,
            "norm_output": config.feeds_back_normed,
        }
    if config.mask_token_id is not None:
        settings["mask_token_id"] = config.mask_token_id
    save_checkpoint(folder, settings, tensors, config)


def _ours(name: str) -> str:
    for theirs, replacement in _RENAMED.items():
        if name.startswith(theirs):
            name = replacement + name.removeprefix(theirs)
    return name


def _renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by the names of `EagleHead`, without ignored ones; `t2d` is kept."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        ours = _ours(name)
        if ours in found:
            raise ValueError(f"the checkpoint has {ours!r} twice, once as {name!r}; expected one of them")
        if ours == "t2d" or not _HARMLESS.match(ours):
            found[ours] = tensor
    return found


def _has_fc(names: Collection[str]) -> bool:
    return "fc.weight" in names and any(name.startswith("layers.0.") for name in names)


def _built(settings: dict[str, Any], tensors: dict[str, Tensor], target: PreTrainedModel) -> EagleHead:
    """An empty module for the tensors; `tensors` is changed in place to match its names."""
    if not _has_fc(tensors):
        hint = "" if is_settings_of_head(settings) else "; a whole model loads by AutoModelForCausalLM.from_pretrained"
        raise ValueError(f"fc.weight, which reads the target's hidden states for layers.0, is missing{hint}")
    kept = tensors.pop("t2d", None)
    check_types(tensors)
    if "mask_hidden" in tensors:  # [3 Ht] with one or two axes before
        tensors["mask_hidden"] = tensors["mask_hidden"].flatten()
    config = config_of(settings, tensors, target)
    if settings.get("tie_word_embeddings") and config.generation == 3 and _could_be_tied(config, tensors):
        tensors["lm_head.weight"], config = tensors["embed_tokens.weight"], replace(config, owns_lm_head=True)
    take_the_tokens(config, tensors, kept)
    try:
        with torch.device("meta"):
            return EagleHead(config)
    except Exception as error:  # transformers and PyTorch raise errors of many types
        raise ValueError(f"config.json gives what no head can be made of: {error}") from error


def _could_be_tied(config: HeadConfig, tensors: dict[str, Tensor]) -> bool:
    """Whether the checkpoint may have omitted the lm_head as a copy of the head's own embedding."""
    all_tokens = config.draft_vocab_size == config.vocab_size
    return all_tokens and "embed_tokens.weight" in tensors and "lm_head.weight" not in tensors
