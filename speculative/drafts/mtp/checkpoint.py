"""Load a layer for multi-token prediction (MTP) that is stored in the target's own checkpoint, after its layers.

    DeepSeek-V3, R1, GLM-4.5, 4.6    model.layers.N.{enorm, hnorm, eh_proj, shared_head.norm}, and a layer of the target

transformers' `MtpModel` finds, converts and loads the tensors. Other layouts, such as `mtp.*` of Qwen3-Next, are
refused by name.
"""

import copy
import re
from pathlib import Path
from typing import Any, TypedDict

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from heavypath.speculative.drafts.heads.files import find_files, tensor_names
from heavypath.speculative.drafts.mtp.draft import MtpConfig, MtpHead
from heavypath.speculative.files.typed_json import read_json

TYPES = ("deepseek_v3", "glm4_moe")
_OURS = re.compile(r"layers\.(\d+)\.eh_proj\.weight$")
_OTHERS = re.compile(r"(^|\.)mtp(_\w+)?\.")
_BESIDE = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens")  # the last two: copies


class _Settings(TypedDict, total=False):
    """The fields of a config.json by which a target's own checkpoint is recognised."""

    model_type: str | None
    hidden_size: int | None
    num_hidden_layers: int | None


def is_mtp(path_or_name: str | Path, config: PreTrainedConfig) -> bool:
    """Whether a folder, or a model in the cache, is the checkpoint of a target with this config and has MTP layers."""
    try:
        files = find_files(path_or_name, local_files_only=True)
    except FileNotFoundError:
        return False
    own, text = read_json(files.config, _Settings), config.get_text_config(decoder=True)
    if any(own.get(name) != getattr(text, name, None) for name in _Settings.__annotations__):
        return False
    return any(_layer_of(name) >= text.num_hidden_layers or _OTHERS.search(name) for name in tensor_names(files))


def load_mtp(
    path_or_name: str | Path,
    target: PreTrainedModel,
    *,
    dtype: torch.dtype | None = None,
) -> MtpHead:
    """Load the MTP layer of a target's checkpoint, in eval mode and without gradients.

    path_or_name: the target's folder, or its name in the Hugging Face cache
    dtype: default: the target's

    Raises FileNotFoundError for missing files, and ValueError for model types not in `TYPES`, for several MTP layers,
    for quantized models, and for missing or unknown tensors.
    """
    files = find_files(path_or_name, local_files_only=True)
    try:
        _check(target, tensor_names(files))
        layer = _layer(files.config.parent, target)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"the MTP layers in {files.folder!r} cannot draft for this target: {error}") from error
    text = target.config.get_text_config(decoder=True)
    head = MtpHead(MtpConfig(text.model_type, text.hidden_size, (text.num_hidden_layers,)), layer)
    return head.to(dtype or target.dtype).to(target.device).requires_grad_(False).eval()


def _check(target: PreTrainedModel, names: set[str]) -> None:
    """Raise ValueError for a target whose MTP layers are not supported, and for unknown tensors."""
    kind, count = target.config.model_type, getattr(target.config, "num_mtp_layers", None)
    if kind not in TYPES:
        raise ValueError(f"those of type {kind!r} are not known, expected {' or '.join(TYPES)}")
    if count != 1:
        raise ValueError(f"expected one layer, which drafts all levels, got num_mtp_layers={count}")
    if getattr(target.config, "quantization_config", None) is not None:
        raise ValueError("they are quantized, expected layers in the type that the target computes in")
    before, own = (f"model.layers.{target.config.num_hidden_layers - 1 + add}." for add in (0, 1))
    known = {own + name.removeprefix(before) for name in names if name.startswith(before)}
    known |= {f"{own}{name}.weight" for name in _BESIDE}
    for name in sorted(names):
        if name.startswith(own) and name not in known:
            raise ValueError(f"{name} is not known: neither of an MTP layer, nor of a layer of the target")


def _layer(folder: Path, target: PreTrainedModel) -> torch.nn.Module:
    try:
        from transformers.modeling_layers import MtpModel  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:
        raise ValueError(
            f"transformers {transformers.__version__} loads no MTP layers; take a later one, 5.23 does"
        ) from None
    model: Any = copy.copy(target)  # gets a config that names this folder
    model.config = copy.copy(target.config)
    model.config.name_or_path, model.config.dtype = str(folder), target.dtype
    return MtpModel.from_pretrained(model, device_map={"": target.device}).layers[0]


def _layer_of(name: str) -> int:
    """The index of the layer that an `eh_proj` tensor belongs to; -1 for other tensors."""
    found = _OURS.search(name)
    return int(found.group(1)) if found else -1
