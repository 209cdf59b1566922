"""Several drafts side by side, each of which drafts paths of its own: SpecInfer's merged trees.

Child j of the root is drawn by draft j mod D, as its draw number j // D, and all below that child by the same draft. So
children of the root have different distributions, which `heavypath.kernels.verifying.laws` verifies: each is weighed
against its own. What a mixture draws from the average of its parts is here drawn from each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.speculative.drafts.composite import (
    CompositeCache,
    CompositeDraft,
    check_drafts,
    describe_parts,
    parts_for,
)
from heavypath.speculative.drafts.draft import Draft, Draftable, Feed
from heavypath.speculative.drafts.kinds import as_draft, describe, draft_parameter_count
from heavypath.speculative.models.forward import Forward


@dataclass(frozen=True)
class Merge(Draftable):
    """A draft out of several, which draft sequences beside each other; for methods that verify each by its own draft.

        SpeculativeDecoder(target, Merge([draft, PromptLookup()]), "specinfer", width=2)    # a sequence of each

    The root of a tree has at least one child for each. At temperature 0 the children are the likeliest tokens of the
    first draft, of the second, and so on, then the second likeliest of the first. Two drafts that begin alike are not
    joined: both subtrees are candidates where their token is accepted.

    drafts: whatever SpeculativeDecoder takes as a draft, but no other Merge

    Source: Miao et al. 2023, "SpecInfer", section 3, merge-based speculation.
    """

    drafts: Sequence[Any]

    def __post_init__(self) -> None:
        check_drafts("Merge", self.drafts)


class MergeDraft(CompositeDraft):
    """`Merge` at work. Each draft is given all nodes, so that it knows every path that may be accepted."""

    def __init__(self, parts: list[Draft], device: torch.device):
        super().__init__(parts, device)
        self.laws = len(parts)

    def __call__(self, feed: Feed, cache: CompositeCache) -> Tensor:
        """The logits of the first draft after each node, then those of the second, ...: fp32 [B, D * n, V].

        Of a step's first feed after the root alone, [B, D, V].
        """
        after = -1 if feed.news else 0
        every = zip(self.drafts, cache.parts, strict=True)
        return torch.cat([part(feed, own)[:, after:].float() for part, own in every], 1)


@as_draft.register
def _(given: Merge, target: Forward, model: PreTrainedModel) -> Draft:
    return MergeDraft(parts_for(given.drafts, "Merge", target, model), target.device)


@describe.register
def _(given: Merge) -> str:
    return describe_parts(given, None)


@draft_parameter_count.register
def _(given: Merge, target: PreTrainedModel) -> int:
    return sum(draft_parameter_count(part, target) for part in given.drafts)
