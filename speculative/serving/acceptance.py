"""Counts of what the steps of one request accepted, taken as each of them ends."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Acceptance:
    """Counts of the steps that drafted anything, by vLLM's names where it has one.

    num_spec_steps:   such steps
    num_draft_tokens: nodes of their trees beside the roots, absent ones included
    histogram:        how many of these steps accepted 0, 1, 2, ... drafted tokens of the text
    """

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    histogram: Counter[int] = field(default_factory=Counter)

    def add(self, new: int, nodes: int) -> None:
        """A step has brought so many tokens of the text, by a tree of so many nodes."""
        if nodes > 1 and new > 0:
            self.num_spec_steps += 1
            self.num_draft_tokens += nodes - 1
            self.histogram[new - 1] += 1

    def copy(self) -> "Acceptance":
        """A copy, also while another thread adds to it."""
        return Acceptance(self.num_spec_steps, self.num_draft_tokens, self.histogram.copy())

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Drafted tokens that are in the text."""
        return sum(accepted * steps for accepted, steps in self.histogram.items())

    @property
    def per_position(self) -> list[int]:
        """The number of steps that accepted the first, the second, ... token of a drafted path."""
        deepest = max(self.histogram, default=0)
        steps = [*self.histogram.items()]
        return [sum(count for accepted, count in steps if accepted > place) for place in range(deepest)]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens for each of these steps, the target's own included; 1 without any."""
        return 1 + self.num_accepted_draft_tokens / max(1, self.num_spec_steps)
