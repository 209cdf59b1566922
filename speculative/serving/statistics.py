"""`ServiceStatistics`: the state and the counts of a service."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServiceStatistics:
    """The state and the counts of a service. Requests are counted since it was opened.

    running, waiting: requests in slots (including one whose prompt is being read), and requests in the queue
    submitted:   requests that were taken. They end as one of: completed, by the end of their sequence; cancelled;
                 expired, past their deadline; failed, by an error
    refused:     requests not taken because the queue, or their client's share of it, was full
    steps, new_tokens, prompt_tokens: sums over the requests
    reused_tokens: prompt tokens whose rows were copied from another sequence instead of computed
    batch_steps: steps of the batch, in which all running requests take part
    cache_bytes: size of all caches, which are allocated when the service is opened
    seconds_busy: time spent decoding
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
        """New tokens per step of a request, that is, per forward pass of the target over its tree."""
        return self.new_tokens / self.steps if self.steps else 0.0
