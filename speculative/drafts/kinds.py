"""Which draft a user's argument stands for. A new kind of draft is a file beside this one, and a case here."""

from typing import Any, TypeGuard, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from heavypath.speculative.drafts.composite import (
    Cascade,
    CascadeDraft,
    Mixture,
    MixtureDraft,
    leaves_of,
    parts_of,
)
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.drafts.heads.draft import HeadDraft
from heavypath.speculative.drafts.heads.eagle import EagleHead
from heavypath.speculative.drafts.lookahead import ExtraNodes, Lookahead, LookaheadDraft
from heavypath.speculative.drafts.lookup import LookupDraft, PromptLookup
from heavypath.speculative.drafts.medusa.draft import MedusaDraft
from heavypath.speculative.drafts.medusa.heads import MedusaHeads
from heavypath.speculative.drafts.merge import Merge, MergeDraft
from heavypath.speculative.drafts.model import EarlyExit, ModelDraft
from heavypath.speculative.drafts.own import OwnDraft, has_methods
from heavypath.speculative.drafts.retrieval import Retrieval, RetrievalDraft
from heavypath.speculative.drafts.tapped import TappedDraft
from heavypath.speculative.models.caches import RowCache
from heavypath.speculative.models.forward import Forward, Taps
from heavypath.speculative.models.forward_of import forward_of

Modelless = PromptLookup | Lookahead | Retrieval | EarlyExit  # what needs no weights but the target's
Several = Cascade | Mixture | Merge  # what is made of drafts
AnyDraft = PreTrainedModel | EagleHead | MedusaHeads | Modelless | Several | Draft  # what users give
Drafting = Forward | TappedDraft  # what has weights to draft with
Part = TypeVar("Part", TappedDraft, LookaheadDraft)


def as_draft(draft: AnyDraft, target: Forward, model: PreTrainedModel) -> Draft:
    """The draft that a user gave for a target; `target` is `forward_of(model)`.

    Raises TypeError or ValueError, saying what differs, for something that is no model and no draft, and for a model
    with another vocabulary or on another device; and for a Merge inside of another draft.
    """
    if isinstance(draft, PromptLookup):
        return LookupDraft(draft, target.vocab_size, target.device)
    if isinstance(draft, Lookahead):
        return LookaheadDraft(draft, target.vocab_size, target.device)
    if isinstance(draft, Retrieval):
        return RetrievalDraft(draft, target.vocab_size, target.device)
    if isinstance(draft, EarlyExit):
        return ModelDraft(forward_of(model, "draft", layers=draft.indices), target.vocab_size)
    if isinstance(draft, EagleHead):
        return HeadDraft(draft, target)
    if isinstance(draft, MedusaHeads):
        return MedusaDraft(draft, target)
    if isinstance(draft, Several):
        parts = [as_draft(part, target, model) for part in draft.drafts]
        if any(isinstance(part, MergeDraft) for part in parts):
            raise ValueError(f"a Merge has paths of its own, and is no part of a {type(draft).__name__}")
        if isinstance(draft, Merge):
            return MergeDraft(parts, target.device)
        if isinstance(draft, Cascade):
            return CascadeDraft(parts, draft.levels, target.device)
        return MixtureDraft(parts, draft.weights, target.device)
    if is_own(draft):
        return OwnDraft(draft, target.vocab_size, target.device)
    forward = forward_of(draft, "draft")  # pyright: ignore[reportArgumentType]
    if forward.device != target.device:
        raise ValueError(f"target and draft must be on one device, got {target.device} and {forward.device}")
    return ModelDraft(forward, target.vocab_size)


def is_own(draft: object) -> TypeGuard[Draft]:
    """Whether it is to be taken for a user's own `Draft`: not one of ours, nor a model that transformers made."""
    ours = isinstance(draft, Modelless | Several)
    return not ours and (not isinstance(draft, nn.Module) or has_methods(draft))


def model_of(draft: Draft | None) -> Drafting | None:
    """What drafts with weights of its own; None for a draft without a model, and for a user's own."""
    return draft.forward if isinstance(draft, ModelDraft) else draft if isinstance(draft, TappedDraft) else None


def models_of(draft: Draft | None) -> list[Drafting]:
    """All that drafts with weights of its own, in a draft that may be made of drafts."""
    models = [] if draft is None else [model_of(leaf) for leaf in leaves_of(draft)]
    return [model for model in models if model is not None]


def proposes_every_token(draft: Draft | None) -> bool:
    """Whether a draft has logits for all tokens, as models have: then more may be drawn than it finds likely."""
    return draft is not None and all(model_of(leaf) is not None for leaf in leaves_of(draft))


def taps_of(draft: Draft | None, cache: RowCache | None) -> Taps | None:
    """What a draft reads of the target's passes; None for all but heads."""
    found = _part_of(draft, cache, TappedDraft)
    return None if found is None else found[0].taps(found[1])


def most_levels(draft: Draft | None) -> int | None:
    """How many levels of a tree a draft can draft; None where it drafts as many as are asked for."""
    return draft.most_levels if isinstance(draft, TappedDraft) else None


def law_count(draft: Draft | None) -> int:
    """How many distributions the children of a root are drawn from: 1, but for a merge one of each of its drafts."""
    return len(draft.parts) if isinstance(draft, MergeDraft) else 1


def why_not_measured(draft: Draft) -> str:
    """Why the acceptance of a draft cannot be counted token by token, in words; "" where it can."""
    if extra_node_count(draft):
        return "the n-grams of a lookahead come of a decoder's steps"
    if law_count(draft) > 1:
        return f"of a Merge each of the root's first {law_count(draft)} children has an acceptance of its own"
    return ""


def extra_node_count(draft: Draft | None) -> int:
    """How many nodes of its own a draft adds to each pass of the target; 0 for all but lookahead."""
    leaves = [] if draft is None else leaves_of(draft)
    return sum(leaf.extra_node_count for leaf in leaves if isinstance(leaf, LookaheadDraft))


def extra_nodes_of(draft: Draft | None, cache: RowCache | None, root: Tensor, lengths: Tensor) -> ExtraNodes | None:
    """The nodes that a draft adds to a pass of the target; None for all but lookahead. root, lengths: LongTensor[B]."""
    found = _part_of(draft, cache, LookaheadDraft)
    return None if found is None else found[0].extra_nodes(found[1], root, lengths)


def _part_of(draft: Draft | None, cache: RowCache | None, kind: type[Part]) -> tuple[Part, Any] | None:
    """The part of this kind, of which there is at most one, and its cache."""
    pairs = [] if draft is None or cache is None else parts_of(draft, cache)
    return next(((part, own) for part, own in pairs if isinstance(part, kind)), None)
