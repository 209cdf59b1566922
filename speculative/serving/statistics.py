"""`ServiceStatistics`: what a service has counted."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServiceStatistics:
    """State and counts of a service; the numbers of requests since it began, by their outcome.

    running, waiting: requests in slots, one whose prompt is under way among them, and requests in the queue
    submitted:  requests that were taken; completed, by the end of their text; cancelled; expired, past their deadline;
                failed, by an error. refused: requests not taken, because the queue, or their client's share, was full
    steps:      sums over the requests, as new_tokens and prompt_tokens; reused_tokens: of the prompts, not computed,
                because another text begins alike
    batch_steps: steps of all that ran then, side by side
    cache_bytes: of all caches, which are allocated when the service begins
    seconds_busy: in which it decoded
    """

    slots: int
    cache_bytes: int
    running: int = 0
    waiting: int = 0
    submitted: int = 0
    completed: int = 0
    cancelled: int = 0
    expired: int = 0
    failed: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    batch_steps: int = 0
    seconds_busy: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """New tokens for each forward pass of the target over a tree of a request."""
        return self.new_tokens / self.steps if self.steps else 0.0
