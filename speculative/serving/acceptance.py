"""Counts of the draft tokens that one request's steps accepted."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Acceptance:
    """Counts over the steps that drafted something, with vLLM's names where it has one.

    num_spec_steps:   the number of such steps
    num_draft_tokens: nodes of their trees without the roots, absent nodes included
    histogram:        how many of these steps accepted 0, 1, 2, ... draft tokens
    """

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    histogram: Counter[int] = field(default_factory=Counter)

    def add(self, new: int, nodes: int) -> None:
        """Count a step that produced `new` tokens with a tree of `nodes` nodes."""
        if nodes > 1 and new > 0:
            self.num_spec_steps += 1
            self.num_draft_tokens += nodes - 1
            self.histogram[new - 1] += 1

    def copy(self) -> "Acceptance":
        """A copy. Safe while another thread adds to this object."""
        return Acceptance(self.num_spec_steps, self.num_draft_tokens, self.histogram.copy())

    @property
    def num_accepted_draft_tokens(self) -> int:
        """The number of accepted draft tokens."""
        return sum(accepted * steps for accepted, steps in self.histogram.items())

    @property
    def per_position(self) -> list[int]:
        """The number of steps that accepted the first, the second, ... token of a drafted path."""
        deepest = max(self.histogram, default=0)
        steps = [*self.histogram.items()]
        return [sum(count for accepted, count in steps if accepted > place) for place in range(deepest)]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per step, including the target's own token; 1 if there was no such step."""
        return 1 + self.num_accepted_draft_tokens / max(1, self.num_spec_steps)
