"""Trained heads of all kinds: find and load them, convert them into a `Draft`, and describe them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from heavypath.speculative.drafts.blocks.checkpoint import is_block, load_block
from heavypath.speculative.drafts.blocks.draft import BlockHeadDraft
from heavypath.speculative.drafts.blocks.head import BlockHead
from heavypath.speculative.drafts.blocks.p_eagle import ParallelHeadDraft
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.drafts.heads.checkpoint import is_head, load_head
from heavypath.speculative.drafts.heads.draft import HeadDraft
from heavypath.speculative.drafts.heads.eagle import EagleHead
from heavypath.speculative.drafts.kinds import as_draft, describe, draft_parameter_count, parameter_count
from heavypath.speculative.drafts.medusa.checkpoint import is_medusa, load_medusa
from heavypath.speculative.drafts.medusa.draft import MedusaDraft
from heavypath.speculative.drafts.medusa.heads import MedusaHeads
from heavypath.speculative.drafts.mtp.checkpoint import is_mtp, load_mtp
from heavypath.speculative.drafts.mtp.draft import MtpDraft, MtpHead
from heavypath.speculative.files.checkpoint import Checkpoint
from heavypath.speculative.models.forward import Forward

TrainedHead = EagleHead | MedusaHeads | BlockHead | MtpHead


def is_trained_head(path_or_name: str | Path, target: PreTrainedConfig | None = None) -> bool:
    """Whether a folder, or a model in the Hugging Face cache, has an EAGLE head, Medusa heads or a block draft.

    Also True for the checkpoint of a target with this config that has MTP layers. Nothing is downloaded.
    """
    try:
        return _loader(Checkpoint(path_or_name, local_files_only=True), target) is not None
    except FileNotFoundError:
        return False


def load_trained_head(
    path_or_name: str | Path, target: PreTrainedModel, dtype: torch.dtype | None = None
) -> TrainedHead:
    """Load a trained head of any kind for a target, in eval mode and without gradients.

    path_or_name: its folder or its name on the Hugging Face hub; dtype: default: the target's

    Raises FileNotFoundError for missing files, and ValueError for a checkpoint that is no head or does not fit.
    """
    checkpoint = Checkpoint(path_or_name)
    load = _loader(checkpoint, target.config) or load_head  # which says what a head has
    return load(checkpoint, target, dtype=dtype)


def _loader(checkpoint: Checkpoint, target: PreTrainedConfig | None) -> Callable[..., TrainedHead] | None:
    """The function that loads the kind of head that a checkpoint has; None for anything else.

    The target's own checkpoint may have Medusa heads, and block drafts have the tensors that identify an EAGLE head.
    """
    if is_medusa(checkpoint):
        return load_medusa
    if target is not None and is_mtp(checkpoint, target):
        return load_mtp
    if is_block(checkpoint):
        return load_block
    return load_head if is_head(checkpoint) else None


@as_draft.register
def _(given: EagleHead, target: Forward, model: PreTrainedModel) -> Draft:
    return (HeadDraft if given.mask_hidden is None else ParallelHeadDraft)(given, target)


@describe.register
def _(given: EagleHead) -> str:
    config = given.config
    own = [name for name, has in (("embedding", config.owns_embedding), ("lm_head", config.owns_lm_head)) if has]
    owned = f", with an own {' and '.join(own)}" if own else ""
    return f"{config.model_type} head, {config.layers} layers, {parameter_count(given)} parameters{owned}"


@as_draft.register
def _(given: BlockHead, target: Forward, model: PreTrainedModel) -> Draft:
    return BlockHeadDraft(given, target)


@describe.register
def _(given: BlockHead) -> str:
    config = given.config
    kind = f"{config.model_type} draft of blocks of {config.block_size}, {config.layers} layers"
    tempered = f", at temperatures {[*given.temperatures]}" if given.temperatures else ""
    return f"{kind}, {parameter_count(given)} parameters{tempered}"


@draft_parameter_count.register
def _(given: EagleHead | BlockHead | MtpHead, target: PreTrainedModel) -> int:
    """The number of parameters that drafting one level reads: a block draft's are divided by the levels of its pass.

    The target's lm_head is counted if the draft has none.
    """
    lm_head: Any = target.get_output_embeddings()
    count = parameter_count(given) + (lm_head.weight.numel() if getattr(given, "lm_head", None) is None else 0)
    return count // given.config.depths if isinstance(given, BlockHead) else count


@as_draft.register
def _(given: MtpHead, target: Forward, model: PreTrainedModel) -> Draft:
    return MtpDraft(given, target)


@describe.register
def _(given: MtpHead) -> str:
    return f"{given.config.model_type} layer, {parameter_count(given)} parameters"


@as_draft.register
def _(given: MedusaHeads, target: Forward, model: PreTrainedModel) -> Draft:
    return MedusaDraft(given, target)


@describe.register
def _(given: MedusaHeads) -> str:
    config = given.config
    owned = ", with lm_heads of their own" if given.config.owns_lm_heads else ""
    return f"{config.heads} medusa heads, {config.layers} layers, {parameter_count(given)} parameters{owned}"


@draft_parameter_count.register
def _(given: MedusaHeads, target: PreTrainedModel) -> int:
    """The number of parameters of one head, which drafts one level; the target's lm_head counts if heads have none."""
    lm_head: Any = target.get_output_embeddings()
    return parameter_count(given) // given.config.heads + (lm_head.weight.numel() if given.lm_heads is None else 0)
