"""The rules of a step: how children are drawn, and by which rule they are accepted."""

from dataclasses import dataclass

from heavypath.kernels.filtering import Filters
from heavypath.speculative.decoding.processing import Processing


@dataclass(frozen=True)
class Rules:
    """How a step draws and verifies.

    draw:              "without_replacement": children are successive draws; "with_replacement": independent draws;
                       "top_k": the draft's most likely tokens
    fill:              draw uniformly once the draft's support is used up
    verification:      the `method` of `verify_tree`
    target_filters, draft_filters: how both models are sampled
    value_temperature: of the draft's probabilities by which trees grow, where the draft itself takes its likeliest
                       tokens
    processing:        what is done to the target's logits before its filters; None for nothing
    """

    draw: str
    fill: bool
    verification: str
    target_filters: Filters
    draft_filters: Filters
    value_temperature: float
    processing: Processing | None = None

    @property
    def drawing_filters(self) -> Filters:
        """The filters that children are drawn with: at temperature 0 the most likely tokens are drawn."""
        return self.draft_filters if self.draw != "top_k" else self.draft_filters._replace(temperature=0.0)
