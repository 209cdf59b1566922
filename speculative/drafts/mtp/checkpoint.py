"""Load a layer for multi-token prediction (MTP) that is stored in the target's own checkpoint, after its layers.

    DeepSeek-V3, R1, GLM-4.5, 4.6    model.layers.N.{enorm, hnorm, eh_proj, shared_head.norm}, and a layer of the target

transformers' `MtpModel` converts and loads the tensors, of safetensors alone. Other layouts, such as `mtp.*` of
Qwen3-Next, are refused by name.
"""

import copy
import re
from pathlib import Path
from typing import Any, TypedDict

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from heavypath.speculative.drafts.mtp.draft import MtpConfig, MtpHead
from heavypath.speculative.files.checkpoint import IGNORED, Checkpoint, check_tensors, opened

TYPES = ("deepseek_v3", "glm4_moe")
_OURS = re.compile(r"layers\.(\d+)\.eh_proj\.weight$")
_OTHERS = re.compile(r"(^|\.)mtp(_\w+)?\.")


class _Settings(TypedDict, total=False):
    """The fields of a config.json by which a target's own checkpoint is recognised."""

    model_type: str | None
    hidden_size: int | None
    num_hidden_layers: int | None


def is_mtp(checkpoint: Checkpoint, config: PreTrainedConfig) -> bool:
    """Whether a checkpoint is the target's own, by its config, and has MTP layers."""
    own = checkpoint.settings(_Settings)
    text = config.get_text_config(decoder=True)
    if any(own.get(name) != getattr(text, name, None) for name in _Settings.__annotations__):
        return False
    return any(_layer_of(name) >= text.num_hidden_layers or _OTHERS.search(name) for name in checkpoint.shapes())


def load_mtp(given: str | Path | Checkpoint, target: PreTrainedModel, *, dtype: torch.dtype | None = None) -> MtpHead:
    """Load the MTP layer of a target's checkpoint, in eval mode and without gradients.

    given: the target's folder, its name in the Hugging Face cache, or its checkpoint
    dtype: default: the target's

    Raises FileNotFoundError for missing files, and ValueError for model types not in `TYPES`, for several MTP layers,
    for quantized models, and for tensors that are missing, unknown or of another shape.
    """
    checkpoint = opened(given)
    text = target.config.get_text_config(decoder=True)
    with checkpoint.drafting("MTP layers in"):
        _check_target(target.config)
        _check_tensors(target.config, checkpoint)
        layer = _layer(checkpoint.config.parent, target)
    head = MtpHead(MtpConfig(text.model_type, text.hidden_size, (text.num_hidden_layers,)), layer)
    return head.to(dtype or target.dtype).to(target.device).requires_grad_(False).eval()


def _check_target(config: Any) -> None:
    """Raise ValueError for a target, by its config, whose MTP layers are not supported."""
    kind = config.model_type
    count = getattr(config, "num_mtp_layers", None)
    if kind not in TYPES:
        raise ValueError(f"those of type {kind!r} are not known, expected {' or '.join(TYPES)}")
    if count != 1:
        raise ValueError(f"expected one layer, which drafts all levels, got num_mtp_layers={count}")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("they are quantized, expected layers in the type that the target computes in")


def _check_tensors(config: Any, checkpoint: Checkpoint) -> None:
    """Raise ValueError unless the checkpoint has exactly the tensors of an MTP layer.

    They are those of the target's last layer, four more, and sometimes copies of the target's embedding and lm_head.
    """
    if pickles := [path.name for path in checkpoint.weights() if path.suffix != ".safetensors"]:
        raise ValueError(
            f"they are in {pickles[0]}, a pickle; expected safetensors, which transformers loads them from"
        )
    width = config.hidden_size
    vocab = config.vocab_size
    last, own = (f"model.layers.{config.num_hidden_layers - 1 + add}." for add in (0, 1))
    shapes = {name: shape for name, shape in checkpoint.shapes().items() if not IGNORED.match(name)}
    found = {name: shape for name, shape in shapes.items() if name.startswith(own)}
    expected = {own + name.removeprefix(last): shape for name, shape in shapes.items() if name.startswith(last)}
    expected |= {f"{own}{name}.weight": [width] for name in ("enorm", "hnorm", "shared_head.norm")}
    expected[f"{own}eh_proj.weight"] = [width, 2 * width]
    copies = {f"{own}{name}.weight": [vocab, width] for name in ("shared_head.head", "embed_tokens")}
    expected |= {name: shape for name, shape in copies.items() if name in found}
    check_tensors(found, expected, "an MTP layer and of the target's last layer, whose kind it is")


def _layer(folder: Path, target: PreTrainedModel) -> torch.nn.Module:
    try:
        from transformers.modeling_layers import MtpModel  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:
        raise ValueError(
            f"transformers {transformers.__version__} loads no MTP layers; take a later one, 5.23 does"
        ) from None
    model: Any = copy.copy(target)  # gets a config that names this folder
    model.config = copy.copy(target.config)
    model.config.name_or_path = str(folder)
    model.config.dtype = target.dtype
    try:
        return MtpModel.from_pretrained(model, device_map={"": target.device}).layers[0]
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _layer_of(name: str) -> int:
    """The index of the layer that an `eh_proj` tensor belongs to; -1 for other tensors."""
    found = _OURS.search(name)
    return int(found.group(1)) if found else -1
