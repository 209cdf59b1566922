"""Load a block draft as its authors published it.

    z-lab, JetSpec, SpecForge, DeepSpec    fc, hidden_norm, layers.*, norm, of a Qwen3 that has no embedding;
                                           of DSpark also markov_head.*, of DFlash2 candidate_selector.* and
                                           convolutions in its layers, of Domino prefix_gru.* and embed_proj.*
    speculators                            the same, with embed_tokens, lm_head and d2t of its own
    transformers' assistants               encoder.fc and encoder.output_norm_enc in place of the first two

Some have the embedding of masks in a file of its own, `mask_embedding.pt`: [H], or a dictionary with that alone, and
maybe with the mask_token_id.

`settings` reads config.json. Whatever does not fit the target, is missing or is not known is refused by name: a draft
that is half loaded drafts noise, and nothing else would show it.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.speculative.drafts.blocks.head import BlockHead
from heavypath.speculative.drafts.blocks.settings import BlockSettings, KindSettings, check_kind, config_of, kind_of
from heavypath.speculative.drafts.heads.files import (
    check_all_is_read,
    find_beside,
    find_files,
    read_pickle,
    read_tensors,
)
from heavypath.speculative.drafts.heads.fitting import check_types, fill, take_the_tokens
from heavypath.speculative.files.typed_json import read_json
from heavypath.speculative.ranks.parts import local_of

MASK, MASK_FILE = "mask_embedding", "mask_embedding.pt"
_RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
_OF_DOMINO = {f"{name}.": f"logit_head.{name}." for name in ("prefix_gru", "embed_proj")}  # as early ones have them
# What a draft does without: copies of the target's tensors, tables that are computed, and the head that estimates how
# likely a token is to be accepted, by which others cut their chains short.
_HARMLESS = re.compile(
    r"(verifier_lm_head\.weight|verifier_norm\.weight|(.*\.)?rotary_emb\.inv_freq|confidence_head\.proj\.\w+)$"
)


def load_block(path_or_name: str | Path, target: PreTrainedModel, *, dtype: torch.dtype | None = None) -> BlockHead:
    """A block draft for a target, in eval mode and without gradients; arguments as in `load_head`.

    Raises FileNotFoundError for missing files. Raises ValueError for a kind that is not supported, and for keys and
    tensors that do not fit the target, are missing, or are not known.
    """
    files = find_files(path_or_name)
    settings = read_json(files.config, BlockSettings)
    try:
        check_kind(settings)
        check_all_is_read(files, but=MASK_FILE)
        given = read_tensors(files)
        mask = find_beside(files, MASK_FILE)
        if mask is not None:
            given |= {f"{MASK}, of {MASK_FILE}": _mask_embedding(mask, settings)}
        head, tensors = _built(settings, given, target)
        fill(head, tensors, dtype or target.dtype, target.device)
    except ValueError as error:
        raise ValueError(f"the block draft {files.folder!r} cannot draft for this target: {error}") from error
    return head.requires_grad_(False).eval()


def _mask_embedding(path: Path, settings: Mapping[str, Any]) -> Tensor:
    """The embedding [H] of masks in a file. Raises ValueError for a file of something else, and of another token."""
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


def is_block(path_or_name: str | Path) -> bool:
    """True if a folder, or a model in the Hugging Face cache, is a block draft of any kind. Nothing is downloaded."""
    try:
        files = find_files(path_or_name, local_files_only=True)
    except FileNotFoundError:
        return False
    return kind_of(read_json(files.config, KindSettings)) is not None


def _built(
    settings: Mapping[str, Any], given: Mapping[str, Tensor], target: PreTrainedModel
) -> tuple[BlockHead, dict[str, Tensor]]:
    """The module that the tensors fit into, still without them, and the tensors by its names."""
    tensors: dict[str, Tensor] = {}
    renamed = _RENAMED | (_OF_DOMINO if kind_of(settings) == "domino" else {})
    for name, tensor in given.items():
        ours = name.removeprefix("model.").partition(",")[0]
        for theirs, replacement in renamed.items():
            ours = replacement + ours.removeprefix(theirs) if ours.startswith(theirs) else ours
        if ours in tensors:
            raise ValueError(f"the checkpoint has {ours!r} twice, once as {name!r}; expected one of them")
        if not _HARMLESS.match(ours):
            tensors[ours] = tensor
    for needed in ("fc.weight", "layers.0.self_attn.k_proj.weight"):
        if needed not in tensors:
            raise ValueError(f"{needed} is missing; it is another kind of draft, or fetch the checkpoint again")
    kept = tensors.pop("t2d", None)
    check_types(tensors)
    ends: dict[str, Any] = {
        "embed_tokens.weight": target.get_input_embeddings(), "lm_head.weight": target.get_output_embeddings(),
    }  # fmt: skip
    for name, module in ends.items():
        if name in tensors and _is_copy(tensors[name], local_of(module.weight)):
            del tensors[name]
    config = config_of(settings, tensors, target)
    if config.owns_mask and not config.owns_embedding and hasattr(target.get_input_embeddings(), "embed_scale"):
        raise ValueError(f"{MASK} is beside the target's embeddings, which are scaled, and nothing says if it is, too")
    take_the_tokens(config, tensors, kept)
    try:
        with torch.device("meta"):
            return BlockHead(config), tensors
    except Exception as error:  # transformers' and PyTorch's, of all kinds
        raise ValueError(f"config.json gives what no draft can be made of: {error}") from error


def _is_copy(tensor: Tensor, of_target: Tensor) -> bool:
    """True if a checkpoint's tensor is the target's own, which need not be in memory twice."""
    return tensor.shape == of_target.shape and torch.equal(tensor.to(of_target.device, of_target.dtype), of_target)
