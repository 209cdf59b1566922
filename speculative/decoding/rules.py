"""The rules of a step: how children are drawn, and by which rule they are accepted."""

from dataclasses import dataclass

from heavypath.kernels.filtering import Filters
from heavypath.speculative.decoding.processing import Processing


@dataclass(frozen=True)
class Rules:
    """How a step draws and verifies.

    replacement:       whether children are independent draws; else they are successive draws without replacement
    fill:              whether children are drawn uniformly once the draft's support is used up
    verification:      the `method` of `verify_tree`
    target_filters, draft_filters: how both models are sampled
    drawing_filters:   the draft's filters, but with temperature 0 where children are the draft's likeliest tokens
    value_temperature: temperature of the probabilities by which growing trees choose their nodes, where the draft's
                       own temperature is 0
    processing:        what is done to the target's logits before its filters; None for nothing
    """

    replacement: bool
    fill: bool
    verification: str
    target_filters: Filters
    draft_filters: Filters
    drawing_filters: Filters
    value_temperature: float
    processing: Processing | None = None
