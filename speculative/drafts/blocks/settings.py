"""The block draft that a checkpoint holds: its `BlockConfig`, from config.json, its tensors and the target.

These settings differ between layouts, and only the number of accepted tokens would show an error in them:

    output of row r     the distribution at depth r: z-lab, JetSpec, DFlash2 and transformers' assistants. At depth
                        r + 1: DeepSpec, whose keys are at the top level, and DSpark. speculators: `sample_from_anchor`
    block rows seen     causal or not for all layers, by the first given of `is_causal`, `causal`, `causal_head`; else
                        layers with a window are causal, those without are not. In transformers' assistants, Domino,
                        and with speculators' `sliding_window_non_causal`, no layer is then causal
    hidden states       `target_layer_ids` count layers, whose outputs are read: hidden state id + 1. Those of
                        speculators, `aux_hidden_state_layer_ids`, are numbers of hidden states
"""

from collections.abc import Mapping
from typing import Any, TypedDict

import transformers
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.speculative.drafts.blocks.config import BlockConfig
from heavypath.speculative.drafts.heads.settings import LayerSettings, ModelSettings, layer_shapes, number_in, together
from heavypath.speculative.files.checkpoint import check_config

MAX_BLOCK = 1024  # rows of a pass
KINDS = ("dflash", "dspark", "dflash2", "domino")
_MARKS = ("mask_token_id", "target_layer_ids", "aux_hidden_state_layer_ids")  # of a block draft, with block_size
_ASSISTANT = "muse_glimmer_assistant"  # as transformers calls it
_STRANGE = ("use_swa", "attention_sink_bias", "fc_layernorm")  # of drafts that compute something else, wherever given
_SELECTOR = "candidate_selector.predecessor"
_CONVOLUTION = ("base_kernel", "kernel_projection.weight")


class _LayersSettings(LayerSettings, total=False):
    layer_types: list[str] | None
    sliding_window: int | None
    num_target_layers: int | None


class _BlockOptions(TypedDict, total=False):
    block_size: int | None
    mask_token_id: int | None
    target_layer_ids: list[int] | None
    aux_hidden_state_layer_ids: list[int] | None
    is_causal: bool | None
    causal: bool | None
    causal_head: bool | None
    shift_label: bool | None
    projector_type: str | None
    output_multiplier: float | None
    final_logit_softcapping: float | None
    num_target_layers: int | None
    markov_rank: int | None
    markov_head_type: str | None
    enable_confidence_head: bool | None
    confidence_head_with_markov: bool | None
    conv_kernel_size: int | None
    conv_group_size: int | None
    selector_rank: int | None
    selector_top_k: int | None
    emb_dim: int | None
    gru_hidden_dim: int | None
    pure_draft_prefix_len: int | None


class BlockSettings(ModelSettings, _LayersSettings, _BlockOptions, total=False):
    """The fields that are read of a block draft's config.json."""

    model_type: str | None
    dflash_config: _BlockOptions | None
    speculators_model_type: str | None
    transformer_layer_config: _LayersSettings | None
    sample_from_anchor: bool | None
    sliding_window_non_causal: bool | None
    draft_vocab_size: int | None


class KindSettings(ModelSettings, total=False):
    """The fields that say that a config.json is of a block draft, which is asked of that of any model."""

    model_type: str | None
    speculators_model_type: str | None
    dflash_config: dict[str, Any] | None
    block_size: Any


def kind_of(settings: Mapping[str, Any]) -> str | None:
    """The kind of block draft by a config.json, by its authors' name, known here or not; None for anything else."""
    names = settings.get("architectures") or ()
    classes = " ".join(names).lower()
    told = settings.get("speculators_model_type")
    if told is not None:
        if told in KINDS and told != "domino":
            return told
        return None if "eagle" in told else f"{told} of speculators"
    if "gemma" in classes and "dspark" in classes:
        return "dspark of Gemma 4"
    for kind in ("dflash2", "dspark", "domino", "dflash"):
        if f"{kind}draft" in classes or f"{kind}model" in classes:
            return (settings.get("dflash_config") or {}).get("projector_type") or kind
    if settings.get("model_type") == _ASSISTANT:
        return "dflash"
    is_block = "dflash_config" in settings or (
        settings.get("block_size") is not None and any(settings.get(mark) is not None for mark in _MARKS)
    )
    if is_block:
        known = {*dir(transformers)}
        others = [name for name in names if name not in known and "eagle" not in name.lower()]
        if others:
            return others[0]
    return "dflash" if "dflash_config" in settings else None


def check_kind(settings: Mapping[str, Any]) -> str:
    """The kind, or a ValueError for one that is not understood."""
    kind = kind_of(settings)
    if kind not in KINDS:
        raise ValueError(
            f"it is a block draft of kind {kind!r}, which is not supported; expected {', '.join(KINDS)}, or JetSpec, "
            "which is a dflash"
        )
    return kind


def config_of(settings: Mapping[str, Any], tensors: Mapping[str, Tensor], target: PreTrainedModel) -> BlockConfig:
    """The config of the block draft that the tensors, by the names of `BlockHead`, make up for this target.

    Raises ValueError for what is not understood, by its key or its tensor.
    """
    kind = check_kind(settings)
    layer = together(settings, settings.get("transformer_layer_config"))
    inner = settings.get("dflash_config") or {}
    unknown = [key for key in inner if key not in _BlockOptions.__annotations__]
    strange = {key: value for key in (*unknown, *_STRANGE) for value in (inner.get(key), settings.get(key)) if value}
    if strange:
        raise ValueError(
            f"config.json gives {', '.join(f'{key}: {value!r}' for key, value in strange.items())}, which is not known"
        )
    options = together(settings, inner)
    text, names = target.config.get_text_config(), tensors.keys()
    shapes: dict[str, Any] = layer_shapes(layer, tensors) | {"head_norms": True}
    vocab, drafted = text.vocab_size, len(tensors.get("lm_head.weight", ())) or len(tensors.get("d2t", ()))
    sliding = _windows(layer, settings, shapes["layers"])
    mask = options.get("mask_token_id")
    if mask is None or not 0 <= mask < vocab:
        raise ValueError(f"config.json must give mask_token_id, a token of the target's {vocab}, got {mask!r}")
    from_root = _from_root(settings, options)
    block_size = number_in(options, "block_size")
    if block_size == 1 and not from_root:
        raise ValueError("config.json gives block_size 1, a block of the root alone, which drafts nothing")
    if block_size > MAX_BLOCK:
        raise ValueError(f"config.json gives block_size {block_size}, expected at most {MAX_BLOCK} rows")
    for key in ("output_multiplier", "final_logit_softcapping"):
        if not 0 < options.get(key, 1) <= 1e6:
            raise ValueError(f"config.json gives {key} {options[key]}, expected a number above 0, at most 1e6")
    return BlockConfig(
        **shapes,
        kind=kind,
        target_hidden_size=text.hidden_size,
        vocab_size=vocab,
        draft_vocab_size=drafted or vocab,
        taps=_taps(options, shapes["layers"], text.num_hidden_layers),
        owns_embedding="embed_tokens.weight" in names or shapes["hidden_size"] != text.hidden_size,
        owns_lm_head="lm_head.weight" in names or shapes["hidden_size"] != text.hidden_size,
        block_size=block_size,
        mask_token_id=mask,
        from_root=from_root,
        causal=_causal(settings, options, sliding),
        windows=sliding,
        multiplier=options.get("output_multiplier", 1.0),
        softcap=options.get("final_logit_softcapping"),
        owns_mask="mask_embedding" in names,
        **(_domino(options, block_size) if kind == "domino" else _term(options, tensors, drafted or vocab)),
        **_convolutions(options, tensors),
    )


def _term(options: Mapping[str, Any], tensors: Mapping[str, Tensor], vocab: int) -> dict[str, Any]:
    """Return the fields of `BlockConfig` that describe the draft's term, found by the names and shapes of its tensors.

    Raises ValueError if config.json gives no valid selector_top_k for a selector.
    """
    words, codebook = (tensors.get(name) for name in ("markov_head.markov_w1.weight", f"{_SELECTOR}_codebook"))
    projections = {"gate_proj": "gated", "joint_proj": "rnn"}
    found = [name for name in projections if f"markov_head.{name}.weight" in tensors]
    term = projections[found[0]] if found else "vanilla" if words is not None else ""
    ranks = [0 if each is None else each.shape[-1] for each in (words, codebook)]
    selected = options.get("selector_top_k", 0)
    check_config(options, {"markov_rank": ranks[0], "selector_rank": ranks[1]})
    if term:
        check_config(options, {"markov_head_type": term})
    if codebook is not None and not 1 <= selected <= vocab:
        raise ValueError(f"config.json must give selector_top_k, 1 to {vocab} tokens to choose from, got {selected}")
    return {
        "term": term if codebook is None else "selector",
        "rank": max(ranks),
        "term_bias": any(f"markov_head.{name}.bias" in tensors for name in found),
        "selected": 0 if codebook is None else selected,
    }


def _domino(options: Mapping[str, Any], block_size: int) -> dict[str, Any]:
    """Return the fields of `BlockConfig` that describe Domino's term; config.json gives its sizes."""
    plain = options.get("pure_draft_prefix_len", 0)
    if not 0 <= plain < block_size:
        raise ValueError(f"config.json gives pure_draft_prefix_len {plain}, expected 0 to {block_size - 1}")
    sizes = {"rank": number_in(options, "emb_dim"), "state_size": number_in(options, "gru_hidden_dim")}
    return {"term": "domino", "plain": plain} | sizes


def _convolutions(options: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the fields of `BlockConfig` that describe convolutions in the layers, found by the shapes of tensors."""
    base, projection = (tensors.get(f"layers.0.attention_conv.{name}") for name in _CONVOLUTION)
    size = group = 0
    if base is not None and projection is not None and len(projection) and not base.numel() % len(projection):
        size, group = base.shape[1], base.numel() // len(projection)
    check_config(options, {"conv_kernel_size": size, "conv_group_size": group})
    return {"conv_size": size, "conv_group": group}


def _from_root(settings: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether row r is the distribution at depth r + 1, instead of depth r."""
    if "speculators_model_type" in settings:
        given = settings.get("sample_from_anchor")
        return settings["speculators_model_type"] == "dspark" if given is None else given
    kind = kind_of(settings)
    of_deepspec = settings.get("target_layer_ids") is not None and settings.get("model_type") != _ASSISTANT
    return options.get("shift_label", kind == "dspark" or (of_deepspec and kind != "domino"))


def _causal(
    settings: Mapping[str, Any], options: Mapping[str, Any], windows: tuple[int | None, ...]
) -> tuple[bool, ...]:
    """By layer, true if a row of the block sees the rows up to itself alone."""
    inner = settings.get("dflash_config") or {}
    told = settings.get("is_causal"), inner.get("is_causal"), options.get("causal"), options.get("causal_head")
    given = next((each for each in told if each is not None), None)
    never = settings.get("model_type") == _ASSISTANT or kind_of(settings) == "domino"
    if given is None and (never or settings.get("sliding_window_non_causal")):
        given = False
    return tuple(window is not None if given is None else given for window in windows)


def _windows(layer: Mapping[str, Any], settings: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer."""
    usual = "sliding_attention" if settings.get("model_type") == _ASSISTANT else "full_attention"
    kinds, window = layer.get("layer_types", [usual] * layers), layer.get("sliding_window")
    strange = sorted({*kinds} - {"full_attention", "sliding_attention"})
    if strange or len(kinds) != layers:
        raise ValueError(
            f"config.json gives layer_types {kinds}, expected full_attention or sliding_attention for each of "
            f"{layers} layers"
        )
    if "sliding_attention" in kinds and (window is None or window < 1):
        raise ValueError(f"config.json must give sliding_window, a positive number, got {window!r}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _taps(options: Mapping[str, Any], layers: int, of_target: int) -> tuple[int, ...]:
    """The hidden states that it reads of a target of `of_target` layers, by transformers' numbers."""
    told = options.get("num_target_layers", of_target)
    if told != of_target:
        raise ValueError(
            f"config.json gives num_target_layers {told}, the target has {of_target}; give the target that the draft "
            "was trained for"
        )
    taps = options.get("aux_hidden_state_layer_ids")
    if taps is None:
        ids = options.get("target_layer_ids")
        if ids is None and "num_target_layers" not in options:
            raise ValueError("config.json must give target_layer_ids, or aux_hidden_state_layer_ids of speculators")
        if ids is None:
            ids = [told // 2] if layers == 1 else [round(1 + i * (told - 4) / (layers - 1)) for i in range(layers)]
        taps = [number + 1 for number in ids]
    if not taps or not all(0 <= tap < of_target for tap in taps):
        raise ValueError(
            f"the draft reads the outputs of layers {', '.join(str(tap - 1) for tap in taps) or 'none'}; expected some "
            f"of the target's {of_target} but the last, whose output is not to be had before the final norm"
        )
    return tuple(taps)
