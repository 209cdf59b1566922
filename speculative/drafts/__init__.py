"""What can propose tokens: a draft model, the target's own first layers, the text so far, a corpus, or one's own."""

from heavypath.speculative.drafts.composite import Cascade, CompositeDraft, Mixture, leaves_of, parts_of
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.drafts.feed import Feed
from heavypath.speculative.drafts.heads.draft import HeadDraft
from heavypath.speculative.drafts.heads.eagle import EagleHead
from heavypath.speculative.drafts.kinds import (
    AnyDraft,
    Drafting,
    as_draft,
    is_own,
    model_of,
    models_of,
    proposes_every_token,
    taps_of,
)
from heavypath.speculative.drafts.lookup import LookupDraft, PromptLookup
from heavypath.speculative.drafts.model import EarlyExit, ModelDraft
from heavypath.speculative.drafts.own import OwnDraft
from heavypath.speculative.drafts.retrieval import Retrieval, RetrievalDraft

__all__ = [
    "AnyDraft",
    "Cascade",
    "CompositeDraft",
    "Draft",
    "Drafting",
    "EagleHead",
    "EarlyExit",
    "Feed",
    "HeadDraft",
    "LookupDraft",
    "Mixture",
    "ModelDraft",
    "OwnDraft",
    "PromptLookup",
    "Retrieval",
    "RetrievalDraft",
    "as_draft",
    "is_own",
    "leaves_of",
    "model_of",
    "models_of",
    "parts_of",
    "proposes_every_token",
    "taps_of",
]
