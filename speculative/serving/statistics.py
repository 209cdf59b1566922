"""`ServiceStatistics`: the state and the counts of a service."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServiceStatistics:
    """The state of a service, and its counts since it was opened.

    slots:       how many requests can run at a time
    running:     requests in slots, and those whose prompts are being read
    waiting:     requests in the queue
    submitted:   requests that were taken. Each ends as one of: completed, by the end of its sequence; cancelled;
                 expired, past its deadline; failed, by an error
    refused:     requests not taken because the queue, or their client's share of it, was full
    prompt_tokens, new_tokens: sums over the requests
    reused_tokens: prompt tokens whose rows were copied from another sequence instead of computed
    steps:       sum over the requests of the steps in which they took part
    batch_steps: steps of the batch, each of several requests
    cache_bytes: size of all caches, which are allocated when the service is opened
    seconds_busy: seconds in which the decoding thread had a request
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
        """New tokens per step of a request, that is, per forward pass of the target over its tree; 0.0 before any."""
        return self.new_tokens / self.steps if self.steps else 0.0
