"""Load a layer for multi-token prediction (MTP) that is stored in the target's own checkpoint.

    DeepSeek-V3, R1, GLM-4.5 to 4.7, Hy3       model.layers.N.{enorm, hnorm, eh_proj}, a norm, and a layer of the target
    Qwen3-Next, Qwen3.5, Mellum, K-EXAONE      mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm}, mtp.layers.0

N is the number of the target's layers. transformers' `MtpModel` converts and loads the tensors, of safetensors alone.
What transformers' config of a type does not say of the layer is in `TYPES`. Other layouts are refused by name.
"""

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from heavypath.speculative.drafts.mtp.draft import MtpConfig, MtpHead
from heavypath.speculative.files.checkpoint import IGNORED, Checkpoint, check_tensors, opened

_FULL: dict[str, Any] = {"mtp_layer_types": ["full_attention"]}
_EXPERTS: dict[str, Any] = {"mtp_mlp_layer_types": ["sparse"]}
# The kinds of attention and MLP that the layer has if the config does not give them, by the target's type.
TYPES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "exaone_moe": {**_FULL, "mtp_mlp_layer_types": ["dense"]},
    "glm4_moe": {},
    "glm4_moe_lite": _EXPERTS,
    "hy_v3": _EXPERTS,
    "mellum": {"mtp_layer_types": ["sliding_attention"], **_EXPERTS},
    "qwen3_5_moe_text": _FULL,
    "qwen3_5_text": _FULL,
    "qwen3_next": _FULL,
}
_IN_MTP = ("exaone_moe", "mellum", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")  # types with the second layout
_COUNTS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")
_STRANGE = ("mtp_use_dedicated_embeddings", "mtp_sliding_windows")
_LAST_NORMS = {"hy_v3": "final_layernorm"}
_ATTENTION = ("full_attention", "sliding_attention")
_AFTER = re.compile(r"layers\.(\d+)\.(?:enorm|hnorm|eh_proj)\.weight$")
_MTP = re.compile(r"(^|\.)mtp(_\w+)?\.")
_NUMBER = re.compile(r"^mtp\.layers\.(\d+)\.")


class _ShapeSettings(TypedDict, total=False):
    model_type: str | None
    hidden_size: int | None
    num_hidden_layers: int | None


class _Settings(_ShapeSettings, total=False):
    """The fields of a config.json by which a target's own checkpoint is recognised."""

    text_config: _ShapeSettings | None


def is_mtp(checkpoint: Checkpoint, config: PreTrainedConfig) -> bool:
    """Whether a checkpoint is the target's own, by its config, and has MTP layers."""
    settings = checkpoint.settings(_Settings)
    own = settings.get("text_config") or settings
    text = config.get_text_config(decoder=True)
    if any(own.get(name) != getattr(text, name, None) for name in _ShapeSettings.__annotations__):
        return False
    names = checkpoint.shapes()
    return any(_MTP.search(name) for name in names) or bool(_after(names, text.num_hidden_layers))


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
        if pickles := [path.name for path in checkpoint.weights() if path.suffix != ".safetensors"]:
            raise ValueError(
                f"they are in {pickles[0]}, a pickle; expected safetensors, which transformers loads them from"
            )
        shapes = checkpoint.shapes()
        config = _config_of(text, shapes)
        _check_tensors(config, shapes)
        layer = _layer(checkpoint.config.parent, config, target)
    head = MtpHead(MtpConfig(text.model_type, text.hidden_size, (text.num_hidden_layers,)), layer)
    return head.to(dtype or target.dtype).to(target.device).requires_grad_(False).eval()


def _config_of(text: Any, names: Iterable[str]) -> Any:
    """The config of a target's language model, in which the layer's kinds of attention and MLP are set.

    text: as it was loaded; names: of the checkpoint's tensors. Raises ValueError for layers that are not supported.
    """
    kind = text.model_type
    if kind not in TYPES:
        raise ValueError(f"those of type {kind!r} are not known, expected {', '.join(sorted(TYPES))}")
    found = {match[1] for match in map(_NUMBER.match, names) if match} | _after(names, text.num_hidden_layers)
    count = max([len(found), *(getattr(text, key, None) or 0 for key in _COUNTS)])
    if count != 1:
        raise ValueError(f"expected one layer, which drafts all levels, got {count}")
    if getattr(text, "quantization_config", None) is not None:
        raise ValueError("they are quantized, expected layers in the type that the target computes in")
    for key in _STRANGE:
        if getattr(text, key, None):
            raise ValueError(f"config.json gives {key} {getattr(text, key)!r}, which is not known")
    config = copy.copy(text)
    config.num_mtp_layers = 1
    for key, usual in TYPES[kind].items():
        if getattr(text, key, None) is None:
            setattr(config, key, usual)
    return config


def _check_tensors(config: Any, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError unless a checkpoint with these tensors has exactly those of an MTP layer.

    They are those of a layer of the target, four more, and sometimes copies of the target's embedding and lm_head.
    """
    width = config.hidden_size
    vocab = config.vocab_size
    own, block = _prefixes(config)
    first, second, last, joining = _parts(config)
    alike = f"layers.{_alike(config)}."
    found = {name: shape for name, shape in shapes.items() if name.startswith(own) and not IGNORED.match(name)}
    expected = {
        block + name[name.index(alike) + len(alike) :]: shape
        for name, shape in shapes.items()
        if re.match(rf"(model\.)?(language_model\.)?(model\.)?{re.escape(alike)}", name) and not IGNORED.match(name)
    }
    expected |= {f"{own}{name}.weight": [width] for name in (first, second, last)}
    expected[f"{own}{joining}.weight"] = [width, 2 * width]
    copies = {f"{own}{name}.weight": [vocab, width] for name in ("shared_head.head", "embed_tokens")}
    expected |= {name: shape for name, shape in copies.items() if name in found}
    check_tensors(
        _one_by_one(found), _one_by_one(expected), "an MTP layer and of the target's last layer, whose kind it is"
    )


def _prefixes(config: Any) -> tuple[str, str]:
    """The beginning of all of the layer's names, and that of the names which the target's layers have, too."""
    if config.model_type in _IN_MTP:
        return "mtp.", "mtp.layers.0."
    own = f"model.layers.{config.num_hidden_layers}."
    return own, own


def _parts(config: Any) -> tuple[str, str, str, str]:
    """The names of the norms of the embedding, of the hidden state and of the output, and of the first product."""
    if config.model_type in _IN_MTP:
        return "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc"
    return "enorm", "hnorm", _LAST_NORMS.get(config.model_type, "shared_head.norm"), "eh_proj"


def _alike(config: Any) -> int:
    """The index of the target's last layer with the MTP layer's kinds of attention and MLP, which has its shapes."""
    layers = config.num_hidden_layers
    mixers = getattr(config, "layer_types", None) or ["full_attention"] * layers
    mlps = getattr(config, "mlp_layer_types", None) or [None] * layers
    mlp = (getattr(config, "mtp_mlp_layer_types", None) or mlps[-1:])[0]
    alike = [i for i in range(layers) if mixers[i] in _ATTENTION and mlps[i] == mlp]
    if not alike:
        raise ValueError(f"the target has no layer with attention and an MLP of kind {mlp!r}, of which it is one")
    return alike[-1]


def _one_by_one(shapes: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """The shapes of tensors by name, in which each expert of stacked ones has a name of its own.

    Checkpoints have either form, also one in the target's layers and another in the MTP layer.
    """
    found = dict[str, Sequence[int]]()
    for name, shape in shapes.items():
        before, _, stacked = name.rpartition("mlp.experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(stacked, ())
        if not parts or len(shape) != 3 or 0 in shape:
            found[name] = shape
            continue
        count, rows, columns = shape
        for part in parts:
            for index in range(count):
                found[f"{before}mlp.experts.{index}.{part}.weight"] = [rows // len(parts), columns]
    return found


def _layer(folder: Path, config: Any, target: PreTrainedModel) -> nn.Module:
    """transformers' module of the layer, with the tensors of the checkpoint in this folder; config: `_config_of`."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming
        from transformers.modeling_layers import MtpModel  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:
        raise ValueError(
            f"transformers {transformers.__version__} loads no MTP layers; take a later one, 5.23 does"
        ) from None
    own, _ = _prefixes(config)
    model: Any = copy.copy(target)  # gets a config that names this folder, and the names of these tensors
    model.config = copy.copy(config)
    model.config.name_or_path = str(folder)
    model.config.dtype = target.dtype
    model._keys_to_ignore_on_load_unexpected = [rf"^{re.escape(own)}"]
    conversions = getattr(target, "_weight_conversions", None) or get_model_conversion_mapping(target)
    last_norms = [WeightRenaming(rf"\.mtp_block\.{name}\.", ".post_norm.") for name in _LAST_NORMS.values()]
    model._weight_conversions = [*last_norms, *conversions]
    try:
        layer = MtpModel.from_pretrained(model, device_map={"": target.device}).layers[0]
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    norms = type(layer.enorm).__name__, type(model.get_decoder().norm).__name__
    if norms[0] != norms[1]:  # transformers takes the first norm of the target's last layer
        raise ValueError(f"transformers makes it with norms of type {norms[0]}, and the target's last is a {norms[1]}")
    return layer


def _after(names: Iterable[str], layers: int) -> set[str]:
    """The numbers of MTP layers that come after the target's `layers` layers, by the names of tensors."""
    numbers = {match[1] for match in map(_AFTER.search, names) if match}
    return {number for number in numbers if int(number) >= layers}
