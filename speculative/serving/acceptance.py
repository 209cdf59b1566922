"""Counts of the draft tokens that one request's steps accepted."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Acceptance:
    """How many draft tokens the target accepted in one request, under vLLM's names of the counts.

    Only steps that drafted something are counted.

    num_spec_steps:   the number of these steps
    num_draft_tokens: nodes of their trees without the roots, also nodes for which the draft found no token
    histogram:        number of accepted draft tokens in a step -> number of steps
    """

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    histogram: Counter[int] = field(default_factory=Counter)

    def add(self, new: int, nodes: int) -> None:
        """Count a step with a tree of `nodes` nodes, root included, that produced `new` tokens, the last by the target.

        A step without draft tokens or without new tokens is not counted.
        """
        if nodes > 1 and new > 0:
            self.num_spec_steps += 1
            self.num_draft_tokens += nodes - 1
            self.histogram[new - 1] += 1

    def copy(self) -> "Acceptance":
        """A copy. Safe while another thread adds to this object."""
        return Acceptance(self.num_spec_steps, self.num_draft_tokens, self.histogram.copy())

    @property
    def num_accepted_draft_tokens(self) -> int:
        """The number of accepted draft tokens in all counted steps."""
        return sum(accepted * steps for accepted, steps in self.histogram.items())

    @property
    def per_position(self) -> list[int]:
        """Item d is the number of steps that accepted more than d draft tokens, from d = 0 to the longest path."""
        deepest = max(self.histogram, default=0)
        steps = [*self.histogram.items()]
        return [sum(count for accepted, count in steps if accepted > place) for place in range(deepest)]

    @property
    def mean_acceptance_length(self) -> float:
        """New tokens per counted step, including the token from the target; 1.0 if no step was counted."""
        return 1 + self.num_accepted_draft_tokens / max(1, self.num_spec_steps)
