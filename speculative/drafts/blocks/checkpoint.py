"""Load a block draft as its authors published it.

    z-lab, JetSpec, SpecForge, DeepSpec    fc, hidden_norm, layers.*, norm, of a Qwen3 that has no embedding;
                                           of DSpark also markov_head.*, of DFlash2 candidate_selector.* and
                                           convolutions in its layers, of Domino prefix_gru.* and embed_proj.*
    AngelSpec, TreeFlash, LiLiCorr         the same; other names are in `BlockTerm.prefixes` of their kinds
    speculators                            the same, with embed_tokens, lm_head and d2t of its own
    transformers' assistants               encoder.fc and encoder.output_norm_enc in place of the first two

Some have the embedding of masks in a file of its own, `mask_embedding.pt`: [H], or a dictionary with that alone, and
maybe with the mask_token_id.

`settings` reads config.json.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.speculative.drafts.blocks.head import BlockHead
from heavypath.speculative.drafts.blocks.kinds import BLOCK_TERMS, KindSettings, check_kind, kind_of
from heavypath.speculative.drafts.blocks.settings import BlockSettings, config_of
from heavypath.speculative.drafts.heads.fitting import filled
from heavypath.speculative.drafts.heads.settings import together
from heavypath.speculative.files.checkpoint import IGNORED, Checkpoint, opened, read_pickle, renamed
from heavypath.speculative.ranks.peers import local_of

MASK = "mask_embedding"
MASK_FILE = "mask_embedding.pt"
_RENAMED = {"model.": "", "encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm.", MASK_FILE: MASK}
# Also the head that estimates how likely a token is to be accepted, by which others cut their chains short.
_IGNORED = re.compile(rf"{IGNORED.pattern}|confidence_head\.proj\.\w+$")


def load_block(
    given: str | Path | Checkpoint, target: PreTrainedModel, *, dtype: torch.dtype | None = None
) -> BlockHead:
    """Load a block draft for a target, in eval mode and without gradients.

    given: its folder, its name on the Hugging Face hub, or its checkpoint; dtype: default: the target's

    Raises FileNotFoundError for missing files. Raises ValueError for a kind that is not supported, and for keys and
    tensors that do not fit the target, are missing, or are not known.
    """
    checkpoint = opened(given)
    settings = checkpoint.settings(BlockSettings)
    with checkpoint.drafting("block draft"):
        term = BLOCK_TERMS[check_kind(settings)]
        checkpoint.check_all_is_read(also=MASK_FILE)
        tensors = checkpoint.tensors(flags=term.flags)
        if (path := checkpoint.find(MASK_FILE)) is not None:
            tensors[MASK_FILE] = _mask_embedding(path, settings)
        tensors = renamed(tensors, {**_RENAMED, **term.prefixes}, _IGNORED)
        for needed in ("fc.weight", "layers.0.self_attn.k_proj.weight"):
            if needed not in tensors:
                raise ValueError(f"{needed} is missing; it is another kind of draft, or fetch the checkpoint again")
        _leave_out_copies(tensors, target)
        config = config_of(settings, tensors, target)
        if config.owns_mask and not config.owns_embedding and hasattr(target.get_input_embeddings(), "embed_scale"):
            raise ValueError(
                f"{MASK} is beside the target's embeddings, which are scaled, and nothing says if it is, too"
            )
        layer = together(settings, settings.get("transformer_layer_config"))
        return filled(BlockHead, config, layer, tensors, dtype or target.dtype, target.device)


def is_block(checkpoint: Checkpoint) -> bool:
    """True if a checkpoint is a block draft of any kind."""
    return kind_of(checkpoint.settings(KindSettings)) is not None


def _mask_embedding(path: Path, settings: Mapping[str, Any]) -> Tensor:
    """Read the embedding [H] of masks from a file.

    settings: of config.json. Raises ValueError for a file of something else, or of another mask_token_id.
    """
    value = read_pickle(path)
    fields = dict(value) if isinstance(value, Mapping) else {MASK: value}
    told = fields.pop("mask_token_id", None)
    tensors = [each for each in fields.values() if isinstance(each, Tensor)]
    if len(fields) != 1 or len(tensors) != 1 or tensors[0].numel() != tensors[0].shape[-1:].numel():
        found = ", ".join(map(_in_words, fields.items())) or "nothing"
        raise ValueError(f"{path.name} has {found}; expected one tensor [H], the embedding of masks")
    inner = settings.get("dflash_config") or {}
    mask = inner.get("mask_token_id", settings.get("mask_token_id"))
    if told is not None and int(told) != mask:
        raise ValueError(f"{path.name} is of mask_token_id {int(told)}, and config.json gives {mask}; fetch both again")
    return tensors[0].flatten()


def _in_words(field: tuple[Any, Any]) -> str:
    name, value = field
    return f"{name} of shape {[*value.shape]}" if isinstance(value, Tensor) else f"{name}, a {type(value).__name__}"


def _leave_out_copies(tensors: dict[str, Tensor], target: PreTrainedModel) -> None:
    """Remove a checkpoint's copies of the target's embedding and lm_head, which need not be in memory twice."""
    ends: dict[str, Any] = {
        "embed_tokens.weight": target.get_input_embeddings(),
        "lm_head.weight": target.get_output_embeddings(),
    }
    for name, module in ends.items():
        found = tensors.get(name)
        own = local_of(module.weight)
        if found is not None and found.shape == own.shape and torch.equal(found.to(own.device, own.dtype), own):
            del tensors[name]
