"""What can propose tokens: a draft model, the target's own first layers, or the text so far."""

from heavypath.speculative.drafts.drafts import (
    Draft,
    EarlyExit,
    Feed,
    LookupDraft,
    ModelDraft,
    PromptLookup,
    as_draft,
)

__all__ = ["Draft", "EarlyExit", "Feed", "LookupDraft", "ModelDraft", "PromptLookup", "as_draft"]
