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
from dataclasses import replace
from typing import Any, TypedDict

from torch import Tensor
from transformers import PreTrainedModel

from heavypath.speculative.drafts.blocks.config import BlockConfig
from heavypath.speculative.drafts.blocks.kinds import ASSISTANT, BLOCK_TERMS, check_kind, term_of
from heavypath.speculative.drafts.blocks.term import BlockTerm
from heavypath.speculative.drafts.heads.settings import (
    AddedSettings,
    LayerSettings,
    ModelSettings,
    layer_shapes,
    measured_acceptance,
    number_in,
    together,
)
from heavypath.speculative.files.checkpoint import check_config
from heavypath.speculative.files.typed_json import typed

MAX_BLOCK = 1024  # rows of a pass
_STRANGE = ("use_swa", "attention_sink_bias", "fc_layernorm")  # of drafts that compute something else, wherever given
_CONVOLUTION = ("base_kernel", "kernel_projection.weight")


class _LayersSettings(LayerSettings, total=False):
    layer_types: list[str] | None
    sliding_window: int | None
    use_sliding_window: bool | None
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
    conv_kernel_size: int | None
    conv_group_size: int | None


class BlockSettings(ModelSettings, _LayersSettings, _BlockOptions, total=False):
    """The fields that are read of a block draft's config.json."""

    model_type: str | None
    dflash_config: _BlockOptions | None
    speculators_model_type: str | None
    transformer_layer_config: _LayersSettings | None
    sample_from_anchor: bool | None
    sliding_window_non_causal: bool | None
    draft_vocab_size: int | None
    heavypath: AddedSettings | None


def config_of(settings: Mapping[str, Any], tensors: Mapping[str, Tensor], target: PreTrainedModel) -> BlockConfig:
    """The config of a block draft for this target, from its config.json and its tensors, named as in `BlockHead`.

    Raises ValueError for what is not understood, by its key or its tensor.
    """
    kind = check_kind(settings)
    term = term_of(kind, tensors)
    layer = together(settings, settings.get("transformer_layer_config"))
    options = _options(settings, BLOCK_TERMS[term])
    text = target.config.get_text_config()
    names = tensors.keys()
    shapes: dict[str, Any] = layer_shapes(layer, tensors) | {"head_norms": True}
    vocab = text.vocab_size
    drafted = len(tensors.get("lm_head.weight", ())) or len(tensors.get("d2t", ()))
    sliding = _windows(layer, settings, shapes["layers"])
    mask = options.get("mask_token_id")
    if mask is None or not 0 <= mask < vocab:
        raise ValueError(f"config.json must give mask_token_id, a token of the target's {vocab}, got {mask!r}")
    from_root = _from_root(settings, options, kind)
    block_size = number_in(options, "block_size")
    if (settings.get("block_size") or block_size) != block_size:
        raise ValueError(
            f"config.json's block_size is {settings['block_size']}, and {block_size} in dflash_config: nothing says "
            "with which of them the draft was trained; correct the other"
        )
    if block_size == 1 and not from_root:
        raise ValueError("config.json gives block_size 1, a block of the root alone, which drafts nothing")
    if block_size > MAX_BLOCK:
        raise ValueError(f"config.json gives block_size {block_size}, expected at most {MAX_BLOCK} rows")
    for key in ("output_multiplier", "final_logit_softcapping"):
        if not 0 < options.get(key, 1) <= 1e6:
            raise ValueError(f"config.json gives {key} {options[key]}, expected a number above 0, at most 1e6")
    config = BlockConfig(
        **shapes,
        kind=kind,
        target_hidden_size=text.hidden_size,
        vocab_size=vocab,
        draft_vocab_size=drafted or vocab,
        acceptance=measured_acceptance(settings),
        taps=_taps(options, shapes["layers"], text.num_hidden_layers),
        owns_embedding="embed_tokens.weight" in names or shapes["hidden_size"] != text.hidden_size,
        owns_lm_head="lm_head.weight" in names or shapes["hidden_size"] != text.hidden_size,
        block_size=block_size,
        mask_token_id=mask,
        from_root=from_root,
        causal=_causal(settings, options, sliding, kind),
        windows=sliding,
        multiplier=options.get("output_multiplier", 1.0),
        softcap=options.get("final_logit_softcapping"),
        owns_mask="mask_embedding" in names,
        **_convolutions(options, tensors),
    )
    found = BLOCK_TERMS[term].options(options, tensors, config)
    return config if found is None else replace(config, term=term, options=found)


def _options(settings: Mapping[str, Any], term: type[BlockTerm]) -> dict[str, Any]:
    """The keys of config.json and of the sections that hold a draft's settings, as one dictionary.

    Raises ValueError for keys of other kinds of drafts than `term`.
    """
    inner = settings.get("dflash_config") or {}
    own = settings.get(term.section) or {}
    known = {*_BlockOptions.__annotations__, *term.keys}
    others = {key for each in BLOCK_TERMS.values() for key in (each.section and [each.section]) or each.keys}
    others -= {*known, term.section}
    unknown = {*inner, *own} - known
    strange = {
        key: part[key]
        for key in sorted({*unknown, *others, *_STRANGE})
        for part in (settings, inner, own)
        if part.get(key)
    }
    if strange:
        raise ValueError(
            f"config.json gives {', '.join(f'{key}: {value!r}' for key, value in strange.items())}, which is not known"
        )
    options = term.usual(together(settings, inner, own))
    return options | {key: typed(options[key], kind, key) for key, kind in term.keys.items() if key in options}


def _convolutions(options: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the fields of `BlockConfig` that describe convolutions in the layers, found by the shapes of tensors."""
    base, projection = (tensors.get(f"layers.0.attention_conv.{name}") for name in _CONVOLUTION)
    size = group = 0
    if base is not None and projection is not None and len(projection) and not base.numel() % len(projection):
        size = base.shape[1]
        group = base.numel() // len(projection)
    check_config(options, {"conv_kernel_size": size, "conv_group_size": group})
    return {"conv_size": size, "conv_group": group}


def _from_root(settings: Mapping[str, Any], options: Mapping[str, Any], kind: str) -> bool:
    """Whether row r is the distribution at depth r + 1, instead of depth r."""
    usual = BLOCK_TERMS[kind].from_root
    if "speculators_model_type" in settings:
        given = settings.get("sample_from_anchor")
        return bool(usual) if given is None else given
    of_deepspec = settings.get("target_layer_ids") is not None and settings.get("model_type") != ASSISTANT
    return options.get("shift_label", of_deepspec if usual is None else usual)


def _causal(
    settings: Mapping[str, Any], options: Mapping[str, Any], windows: tuple[int | None, ...], kind: str
) -> tuple[bool, ...]:
    """For each layer, whether a row of the block attends only to the block's rows up to itself; else to all."""
    inner = settings.get("dflash_config") or {}
    told = settings.get("is_causal"), inner.get("is_causal"), options.get("causal"), options.get("causal_head")
    given = next((each for each in told if each is not None), None)
    if given is None:
        given = BLOCK_TERMS[kind].causal
    if given is None and (settings.get("model_type") == ASSISTANT or settings.get("sliding_window_non_causal")):
        given = False
    return tuple(window is not None if given is None else given for window in windows)


def _windows(layer: Mapping[str, Any], settings: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """The number of positions that each layer attends to, from config.json; None for all."""
    usual = "sliding_attention" if settings.get("model_type") == ASSISTANT else "full_attention"
    kinds = layer.get("layer_types", [usual] * layers)
    window = layer.get("sliding_window")
    if layer.get("use_sliding_window") and "layer_types" not in layer and usual == "full_attention":
        raise ValueError(
            "config.json gives use_sliding_window, and no layer_types: nothing says which layers have the window; add "
            "full_attention or sliding_attention for each"
        )
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
    """The numbers, by transformers' counting, of the target's hidden states that the draft reads.

    options: of config.json; layers: the draft's number of layers; of_target: the target's
    """
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
