"""The `HeadConfig` of a checkpoint, from its config.json, its tensors and the target.

Tensors take precedence over config.json. If checkpoints that look alike mean different things, this is assumed:

    norm_before_residual  false if it is not given, as in the configs of official heads and of speculators
    norm_output           what is fed back is normalised (EAGLE-3.1) in a checkpoint of speculators, and in one with
                          norms before fc; otherwise it is SpecForge's, where it means a norm before lm_head
    layer ids             hidden state i is the input of layer i; if the first is 1, outputs are meant, one higher
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, TypedDict

from torch import Tensor
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from heavypath.speculative.drafts.heads.config import HeadConfig
from heavypath.speculative.files.typed_json import typed

# Key for settings that saving adds, because the official keys do not define them.
OWN_KEY = "heavypath"
_LINEAR = ("fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_FIRST = "layers.0."
_ROPES = ("default", "linear", "llama3", "yarn")


class ModelSettings(TypedDict, total=False):
    """The fields that are read from any model's config.json."""

    architectures: list[str] | None


class _RopeSettings(TypedDict, total=False):
    rope_theta: float | None
    factor: float | None
    original_max_position_embeddings: int | None
    partial_rotary_factor: float | None
    low_freq_factor: float | None
    high_freq_factor: float | None
    attention_factor: float | None
    beta_fast: float | None
    beta_slow: float | None
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool | None


class LayerSettings(TypedDict, total=False):
    """The fields of a config.json that describe a head's layers."""

    num_attention_heads: int | None
    num_key_value_heads: int | None
    head_dim: int | None
    vocab_size: int | None
    max_position_embeddings: int | None
    rms_norm_eps: float | None
    hidden_act: str | None
    rope_theta: float | None
    partial_rotary_factor: float | None
    rope_scaling: _RopeSettings | None
    rope_parameters: _RopeSettings | None


class _Options(TypedDict, total=False):
    draft_vocab_size: int | None
    eagle_aux_hidden_state_layer_ids: list[int] | None
    fc_norm: bool | None
    norm_before_fc: bool | None
    norm_before_residual: bool | None
    norm_output: bool | None


class AddedSettings(TypedDict, total=False):
    """The fields of `OWN_KEY`."""

    acceptance: list[float] | None
    taps: list[int]
    feeds_back_normed: bool
    lm_head_of_target: bool


class HeadSettings(ModelSettings, LayerSettings, _Options, total=False):
    """The fields that are read from a head's config.json."""

    transformer_layer_config: LayerSettings | None
    eagle_config: _Options | None
    heavypath: AddedSettings | None
    tie_word_embeddings: bool | None
    mask_token_id: int | None
    ptd_token_id: int | None
    pard_token: Any


def is_settings_of_head(settings: Mapping[str, Any]) -> bool:
    """Whether a config.json identifies an EAGLE head."""
    identified = settings.get("speculators_model_type") in ("eagle", "eagle3") or "eagle_config" in settings
    return identified or any("CausalLMEagle" in kind for kind in settings.get("architectures") or ())


def config_of(settings: Mapping[str, Any], tensors: Mapping[str, Tensor], target: PreTrainedModel) -> HeadConfig:
    """The config of an EAGLE head for this target, from its config.json and its tensors, named as in `EagleHead`.

    The head has its own embedding or lm_head if the checkpoint has one, or if the target's does not fit.
    """
    layer = together(settings, settings.get("transformer_layer_config"))
    options = together(settings.get("eagle_config"), settings)
    own = settings.get(OWN_KEY) or {}
    text = target.config.get_text_config()
    names = tensors.keys()
    shapes = layer_shapes(layer, tensors)
    width = shapes["hidden_size"]
    tap_norms = bool(options.get("fc_norm")) or any(name.startswith("fc_norm.") for name in names)
    norm_before_fc = bool(options.get("norm_before_fc")) or "input_norm.weight" in names
    eagle31 = "speculators_model_type" in settings or tap_norms or norm_before_fc
    third = _attends_side_by_side(tensors)
    drafted = _drafted_tokens(layer, options, tensors, text.vocab_size) if third else text.vocab_size
    same_lm_head = not third or (drafted == text.vocab_size and width == text.hidden_size)
    return HeadConfig(
        **shapes,
        generation=3 if third else 1,
        target_hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        draft_vocab_size=drafted,
        taps=_taps(options, own, text.num_hidden_layers) if third else (text.num_hidden_layers,),
        tap_norms=third and tap_norms,
        norm_before_fc=third and norm_before_fc,
        norm_before_residual=third and bool(options.get("norm_before_residual")),
        feeds_back_normed=third and bool(own.get("feeds_back_normed", eagle31 and options.get("norm_output"))),
        mask_token_id=_mask(settings, names, text.vocab_size) if third else None,
        acceptance=measured_acceptance(settings),
        owns_embedding="embed_tokens.weight" in names or width != text.hidden_size,
        owns_lm_head="lm_head.weight" in names or not same_lm_head,
    )


def measured_acceptance(settings: Mapping[str, Any]) -> tuple[float, float] | None:
    """The `acceptance` of `TappedConfig` that a config.json has; None if it has none.

    Raises ValueError for anything but two probabilities.
    """
    found = typed(settings.get(OWN_KEY) or {}, AddedSettings, OWN_KEY).get("acceptance")
    if found is None:
        return None
    if len(found) != 2 or not all(0 <= each <= 1 for each in found):
        raise ValueError(f"config.json gives acceptance {found}, expected two probabilities, at temperature 0 and at 1")
    greedy, sampled = found
    return greedy, sampled


def layer_shapes(layer: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The fields of `TappedConfig` that describe the layers. Raises ValueError for impossible ones."""
    width = tensors["fc.weight"].shape[0]
    heads = number_in(layer, "num_attention_heads")
    kv_heads = number_in({"num_key_value_heads": heads} | layer, "num_key_value_heads")
    head_dim = layer.get("head_dim") or _rows(tensors, "self_attn.q_proj") // heads
    layers = 1 + max(int(found[1]) for name in tensors if (found := re.match(r"layers\.(\d+)\.", name)))
    if heads % kv_heads or head_dim < 1 or head_dim % 2 or layers > len(tensors):
        raise ValueError(
            f"config.json and the tensors give {heads} heads of width {head_dim}, {kv_heads} of them of keys, and "
            f"{layers} layers; no such head can be"
        )
    return {
        "hidden_size": width,
        "intermediate_size": _rows(tensors, "mlp.gate_proj"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "layers": layers,
        "rms_norm_eps": _epsilon(layer),
        "hidden_act": _activation(layer),
        "rope_parameters": _rope(layer),
        "biases": frozenset(
            name for name in _LINEAR if any(re.search(rf"^(layers\..*)?\b{name}\.bias$", found) for found in tensors)
        ),
        "head_norms": any(name.endswith(("q_norm.weight", "k_norm.weight")) for name in tensors),
    }


def together(*parts: Mapping[str, Any] | None) -> dict[str, Any]:
    """All fields that any of the parts sets to a value; later parts take precedence."""
    return {key: value for part in parts for key, value in (part or {}).items() if value is not None}


def _mask(settings: Mapping[str, Any], names: Collection[str], vocab_size: int) -> int | None:
    """The mask token of a head that drafts all levels at once; None for other heads, which lack a mask_hidden.

    names: of the head's tensors. Raises ValueError if the token is not one of the target's.
    """
    if "mask_hidden" not in names:
        return None
    given = together(*({"mask": settings.get(key)} for key in ("pard_token", "ptd_token_id", "mask_token_id")))
    mask = given.get("mask")
    if type(mask) is not int or not 0 <= mask < vocab_size:
        raise ValueError(
            f"there is mask_hidden, so config.json must give mask_token_id, ptd_token_id or pard_token as a token of "
            f"the target's {vocab_size}, got {mask!r}"
        )
    return mask


def _attends_side_by_side(tensors: Mapping[str, Tensor]) -> bool:
    """Whether these are tensors of an EAGLE-3 head, whose first layer reads embedding and features concatenated."""
    query = tensors.get(f"{_FIRST}self_attn.q_proj.weight")
    twice = query is not None and query.shape[-1] == 2 * tensors["fc.weight"].shape[0]
    return twice or f"{_FIRST}hidden_norm.weight" in tensors or "d2t" in tensors


def _drafted_tokens(
    layer: Mapping[str, Any], options: Mapping[str, Any], tensors: Mapping[str, Tensor], vocab_size: int
) -> int:
    """The number of tokens that an EAGLE-3 head can propose. Raises ValueError for a target of another vocabulary.

    layer, options: the parts of config.json on layers and on the head; vocab_size: the target's
    """
    if "lm_head.weight" in tensors:
        drafted = len(tensors["lm_head.weight"])
    elif "d2t" in tensors:
        drafted = len(tensors["d2t"])
    else:
        drafted = options.get("draft_vocab_size", vocab_size)
    given = layer.get("vocab_size", vocab_size)
    if drafted != vocab_size and "embed_tokens.weight" not in tensors and given != vocab_size:
        raise ValueError(
            f"config.json gives vocab_size {given}, expected the target's {vocab_size}; give the target that the head "
            "was trained for"
        )
    return drafted


def _taps(options: Mapping[str, Any], own: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The numbers of the hidden states that an EAGLE-3 head reads from a target with `layers` layers.

    options: published settings; own: those that `save_head` wrote
    """
    if "taps" in own:
        taps = tuple(own["taps"])
        last = layers
    else:
        taps = tuple(options.get("eagle_aux_hidden_state_layer_ids") or (2, layers // 2, layers - 3))
        taps = tuple(tap + 1 for tap in taps) if taps[0] == 1 else taps
        last = layers - 1
    if layers in taps and last < layers:
        raise ValueError(
            f"the head reads the outputs of layers {', '.join(str(tap - 1) for tap in taps)}; that of the last, "
            f"{layers - 1}, is not to be had before the target's final norm: a head of earlier layers is expected"
        )
    if not all(isinstance(tap, int) and 0 <= tap <= last for tap in taps):
        raise ValueError(
            f"the head reads the hidden states {', '.join(map(str, taps))}, expected 0 to {last} of a target of "
            f"{layers} layers; give the target that the head was trained for"
        )
    return taps


def _rope(layer: Mapping[str, Any]) -> dict[str, Any]:
    """The `rope_parameters`, in the form of transformers 5, from a config.json's fields on layers.

    The length that the head was trained for is left out: it is not a limit.
    """
    given = together(layer.get("rope_scaling"), layer.get("rope_parameters"))
    kind = given.pop("rope_type", given.pop("type", "default"))
    if "mrope_section" in given:  # for images and text; for text alone it equals the default
        kind = "default"
        given = {"rope_theta": given.get("rope_theta")}
    turning = given.get("partial_rotary_factor", layer.get("partial_rotary_factor", 1))
    if turning != 1:
        raise ValueError(f"config.json gives partial_rotary_factor {turning}; expected heads that are turned whole, 1")
    theta = layer.get("rope_theta") or given.get("rope_theta") or 10000.0
    if kind not in _ROPES or any(isinstance(value, dict) for value in given.values()):
        raise ValueError(f"config.json gives rotary settings {given} of type {kind!r}, expected {', '.join(_ROPES)}")
    if kind in ("llama3", "yarn") and "max_position_embeddings" in layer:
        given.setdefault("original_max_position_embeddings", layer["max_position_embeddings"])
    return {**given, "rope_type": kind, "rope_theta": float(theta)}


def _epsilon(layer: Mapping[str, Any]) -> float:
    found = layer.get("rms_norm_eps", 1e-6)
    if not 0 <= found <= 1:
        raise ValueError(f"config.json gives rms_norm_eps {found}, expected a number of 0 to 1")
    return found


def _activation(layer: Mapping[str, Any]) -> str:
    found = layer.get("hidden_act", "silu")
    if found not in ACT2FN:
        raise ValueError(f"config.json gives hidden_act {found!r}, which transformers does not have")
    return found


def _rows(tensors: Mapping[str, Tensor], name: str) -> int:
    found = tensors.get(f"{_FIRST}{name}.weight")
    if found is None:
        raise ValueError(f"{_FIRST}{name}.weight is missing; it is another kind of head, or fetch the checkpoint again")
    return found.shape[0]


def number_in(settings: Mapping[str, Any], key: str) -> int:
    """The positive integer that config.json has for a key. Raises ValueError if it has none, or another value."""
    found = settings.get(key)
    if not isinstance(found, int) or found < 1:
        raise ValueError(f"config.json must give {key}, a positive number, got {found!r}")
    return found
