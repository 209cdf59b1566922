"""`BLOCK_TERMS`: the kinds of block drafts by name, and which of them a config.json describes."""

from collections.abc import Mapping
from typing import Any

import transformers

from heavypath.speculative.drafts.blocks.dfly import DFlyTerm
from heavypath.speculative.drafts.blocks.dspine import DSpineTerm
from heavypath.speculative.drafts.blocks.lilicorr import LiLiCorrTerm
from heavypath.speculative.drafts.blocks.term import BlockTerm
from heavypath.speculative.drafts.blocks.terms import DominoTerm, MarkovTerm, SelectorTerm
from heavypath.speculative.drafts.blocks.treeflash import TreeFlashTerm
from heavypath.speculative.drafts.heads.settings import ModelSettings

# By a name that config.json gives: in `architectures`, as it is or before "Draft" or "Model", `model_type`,
# `projector_type` or `speculators_model_type`.
BLOCK_TERMS: dict[str, type[BlockTerm]] = {
    "dflash": BlockTerm,
    "dspark": MarkovTerm,
    "dflash2": SelectorTerm,
    "domino": DominoTerm,
    "dfly": DFlyTerm,
    "treeflash": TreeFlashTerm,
    "dspine": DSpineTerm,
    "lilicorr": LiLiCorrTerm,
}
ASSISTANT = "muse_glimmer_assistant"  # as transformers calls it
_MARKS = ("mask_token_id", "target_layer_ids", "aux_hidden_state_layer_ids")  # of a block draft, with block_size


class KindSettings(ModelSettings, total=False):
    """The fields by which a config.json of any model is recognised as a block draft's."""

    model_type: str | None
    speculators_model_type: str | None
    dflash_config: dict[str, Any] | None
    block_size: Any


def kind_of(settings: Mapping[str, Any]) -> str | None:
    """The authors' name of the kind of block draft that a config.json describes; None if it is no block draft.

    The kind need not be one of `BLOCK_TERMS`.
    """
    names = settings.get("architectures") or ()
    classes = " ".join(names).lower()
    model = settings.get("model_type")
    told = settings.get("speculators_model_type")
    if told is not None:
        if told in BLOCK_TERMS and BLOCK_TERMS[told].of_speculators:
            return told
        return None if "eagle" in told else f"{told} of speculators"
    if "gemma" in classes and "dspark" in classes:
        return "dspark of Gemma 4"
    for kind in sorted(BLOCK_TERMS, key=len, reverse=True):
        own = kind.lower()
        if own in (*classes.split(), model) or f"{own}draft" in classes or f"{own}model" in classes:
            return (settings.get("dflash_config") or {}).get("projector_type") or kind
    if model == ASSISTANT:
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
    """The kind of block draft, an entry of `BLOCK_TERMS`. Raises ValueError for one that is not supported."""
    kind = kind_of(settings)
    if kind not in BLOCK_TERMS:
        raise ValueError(
            f"it is a block draft of kind {kind!r}, which is not supported; expected {', '.join(BLOCK_TERMS)}, or "
            "JetSpec, which is a dflash"
        )
    return kind


def term_of(kind: str, tensors: Mapping[str, Any]) -> str:
    """The name in `BLOCK_TERMS` of the term of a draft of this kind.

    tensors: by the head's names; a DFlash with tensors of another term is of that term's kind
    """
    if BLOCK_TERMS[kind] is not BlockTerm:
        return kind
    by_tensors = (name for name, term in BLOCK_TERMS.items() if term.found_by_tensors)
    return next((name for name in by_tensors if _has(BLOCK_TERMS[name], tensors)), "dflash")


def _has(term: type[BlockTerm], tensors: Mapping[str, Any]) -> bool:
    return any(name.startswith(f"{term.module}.") for name in tensors)
