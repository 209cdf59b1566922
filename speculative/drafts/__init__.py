"""What can propose tokens: a draft model, the target's own first layers, or the text so far."""

from heavypath.speculative.drafts.feed import Feed
from heavypath.speculative.drafts.kinds import Draft, as_draft
from heavypath.speculative.drafts.lookup import LookupDraft, PromptLookup
from heavypath.speculative.drafts.model import EarlyExit, ModelDraft

__all__ = ["Draft", "EarlyExit", "Feed", "LookupDraft", "ModelDraft", "PromptLookup", "as_draft"]
