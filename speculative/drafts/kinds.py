"""Which draft a user's argument stands for. A new kind of draft is a file beside this one, and a case here.

All drafts are called alike: given a few nodes of a growing tree (a `Feed`), they return the logits of the token after
each node. What a draft remembers of the text is in a cache with a row for each token, which is compacted as the
target's cache is.
"""

from transformers import PreTrainedModel

from heavypath.speculative.drafts.lookup import LookupDraft, NgramCache, PromptLookup
from heavypath.speculative.drafts.model import EarlyExit, ModelDraft
from heavypath.speculative.models.caches import KeyValueCache
from heavypath.speculative.models.forward import Forward
from heavypath.speculative.models.forward_of import forward_of

Draft = ModelDraft | LookupDraft
Cache = KeyValueCache | NgramCache


def as_draft(draft: PreTrainedModel | PromptLookup | EarlyExit, target: Forward, model: PreTrainedModel) -> Draft:
    """The draft that a user gave for a target; `target` is `forward_of(model)`.

    Raises TypeError or ValueError, saying what differs, for something that is no model, and for a model with another
    vocabulary or on another device.
    """
    if isinstance(draft, PromptLookup):
        return LookupDraft(draft, target.vocab_size, target.device)
    if isinstance(draft, EarlyExit):
        return ModelDraft(forward_of(model, "draft", layers=draft.layers), target.vocab_size)
    forward = forward_of(draft, "draft")
    if forward.device != target.device:
        raise ValueError(f"target and draft must be on one device, got {target.device} and {forward.device}")
    return ModelDraft(forward, target.vocab_size)
