"""What can propose tokens: a draft model, the target's own first layers, the text so far, a corpus, or one's own."""

from heavypath.speculative.drafts.composite import Cascade, CompositeDraft, Mixture, leaves_of, parts_of
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.drafts.feed import Feed
from heavypath.speculative.drafts.heads.draft import HeadDraft
from heavypath.speculative.drafts.heads.eagle import EagleHead
from heavypath.speculative.drafts.kinds import (
    AnyDraft,
    Drafting,
    Modelless,
    Several,
    as_draft,
    extra_node_count,
    is_own,
    law_count,
    model_of,
    models_of,
    most_levels,
    proposes_every_token,
    taps_of,
    why_not_measured,
)
from heavypath.speculative.drafts.lookahead import Lookahead, LookaheadDraft
from heavypath.speculative.drafts.lookup import LookupDraft, PromptLookup
from heavypath.speculative.drafts.medusa.draft import MedusaDraft
from heavypath.speculative.drafts.medusa.heads import MedusaHeads
from heavypath.speculative.drafts.merge import Merge
from heavypath.speculative.drafts.model import EarlyExit, ModelDraft
from heavypath.speculative.drafts.own import OwnDraft
from heavypath.speculative.drafts.retrieval import Retrieval, RetrievalDraft
from heavypath.speculative.drafts.tapped import TappedDraft

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
    "Lookahead",
    "LookaheadDraft",
    "LookupDraft",
    "MedusaDraft",
    "MedusaHeads",
    "Merge",
    "Mixture",
    "ModelDraft",
    "Modelless",
    "OwnDraft",
    "PromptLookup",
    "Retrieval",
    "RetrievalDraft",
    "Several",
    "TappedDraft",
    "as_draft",
    "extra_node_count",
    "is_own",
    "law_count",
    "leaves_of",
    "model_of",
    "models_of",
    "most_levels",
    "parts_of",
    "proposes_every_token",
    "taps_of",
    "why_not_measured",
]
