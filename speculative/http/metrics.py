"""The Prometheus metrics of /metrics.

Counts and times of requests are recorded here, as clients see them. The service's own counts are read when the metrics
are requested.
"""

import time
from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from heavypath.speculative.serving import Service
from heavypath.speculative.serving.acceptance import Acceptance

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300)
SECONDS_OF_A_TOKEN = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
TOKENS_OF_A_STEP = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 12, 16)


class Metrics:
    """The Prometheus metrics of one server, in its own registry.

    requests: counts HTTP requests by path and status; the other attributes count and time texts, with help texts below
    """

    def __init__(self, service: Service):
        self._registry = registry = CollectorRegistry()
        registry.register(_OfService(service))
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.requests = counter("heavypath_http_requests", "Requests by route and HTTP status.", ["path", "status"])
        outcomes = "stop, length, deadline, disconnected, refused, closed, failed"
        self.completions = counter("heavypath_completions", f"Texts by what ended them: {outcomes}.", ["outcome"])
        self.prompt_tokens = counter("heavypath_prompt_tokens", "Tokens of accepted prompts.")
        self.new_tokens = counter("heavypath_new_tokens", "Tokens in answers.")
        until = "From when a request was taken to its"
        self.first = histogram("heavypath_time_to_first_token_seconds", f"{until} first token.", buckets=SECONDS)
        self.whole = histogram("heavypath_completion_seconds", f"{until} last token.", buckets=SECONDS)
        shared = "Time to the next tokens, shared among as many as came at a time."
        self.between = histogram("heavypath_time_between_tokens_seconds", shared, buckets=SECONDS_OF_A_TOKEN)
        each = "New tokens for each step of a text."
        self.per_step = histogram("heavypath_tokens_per_step", each, buckets=TOKENS_OF_A_STEP)

        # With vLLM's names, which existing dashboards use.
        drafts = "vllm:spec_decode_num"
        became = "Drafted tokens that became text"
        self._drafts = counter(f"{drafts}_drafts", "Steps of a text that drafted anything.")
        self._drafted = counter(f"{drafts}_draft_tokens", "Drafted tokens: nodes of the trees, without roots.")
        self._accepted = counter(f"{drafts}_accepted_tokens", f"{became}.")
        by_depth = f"{became}, by their depth in the tree, from 0."
        self._by_position = counter(f"{drafts}_accepted_tokens_per_pos", by_depth, ["position"])

    def speculation(self, acceptance: Acceptance) -> None:
        """Add the counts of draft tokens of a text that has ended."""
        self._drafts.inc(acceptance.num_spec_steps)
        self._drafted.inc(acceptance.num_draft_tokens)
        self._accepted.inc(acceptance.num_accepted_draft_tokens)
        for position, count in enumerate(acceptance.per_position):
            self._by_position.labels(str(position)).inc(count)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def watch(self, prompt_tokens: int) -> "Watch":
        """Count a text's prompt tokens, and start to measure its times."""
        self.prompt_tokens.inc(prompt_tokens)
        return Watch(self)


class Watch:
    """Measures the times of one text for `Metrics`, from the creation of this object, when the text is submitted."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._begin = time.perf_counter()
        self._last: float | None = None
        self._finished = False

    @property
    def has_begun(self) -> bool:
        """Whether a token has arrived."""
        return self._last is not None

    def tokens(self, count: int) -> None:
        """Record that `count` tokens have arrived."""
        now = time.perf_counter()
        if self._last is None:
            self._metrics.first.observe(now - self._begin)
        else:
            for _ in range(count):
                self._metrics.between.observe((now - self._last) / count)
        self._last = now

    def finish(self, outcome: str, tokens: int, steps: int = 0, acceptance: Acceptance | None = None) -> None:
        """Record the end of the text. Only the first call counts.

        outcome:    why it ended: stop, length, deadline, disconnected, refused, closed or failed
        tokens:     number of its new tokens
        steps:      number of its steps; 0 if not known
        acceptance: counts of its draft tokens; None if not known
        """
        if self._finished:
            return
        self._finished = True
        self._metrics.completions.labels(outcome).inc()
        self._metrics.new_tokens.inc(tokens)
        self._metrics.whole.observe(time.perf_counter() - self._begin)
        if steps:
            self._metrics.per_step.observe(tokens / steps)
        if acceptance is not None:
            self._metrics.speculation(acceptance)


class _OfService:
    """Collects the service's own numbers when the metrics are requested."""

    def __init__(self, service: Service):
        self._service = service

    def collect(self) -> Iterator[Metric]:
        stats = self._service.stats()
        gauges = {
            "running": "Sequences that are being decoded.",
            "waiting": "Sequences that wait for a slot.",
            "slots": "Sequences that can be decoded at a time.",
            "cache_bytes": "Memory of the slots' caches.",
        }
        for name, what in gauges.items():
            yield GaugeMetricFamily(f"heavypath_{name}", what, value=getattr(stats, name))
        counters = {
            "submitted": "Sequences that were accepted.",
            "refused": "Sequences that were refused because the queue, or their client's share of it, was full.",
            "reused_tokens": "Tokens of prompts that were not computed, because another text began alike.",
            "steps": "Steps of the decoder, counted for each sequence that took part.",
            "seconds_busy": "Time that the decoder spent on steps and prompts.",
        }
        for name, what in counters.items():
            yield CounterMetricFamily(f"heavypath_service_{name}", what, value=getattr(stats, name))
