"""Continuous batching: `SpeculativeDecoder.serve` takes requests from threads or asyncio while others are decoded.

completion.py   the state of a request, written by the decoding thread: tokens as they arrive, the result, `cancel`
arrivals.py     checked requests, and the bounded queue in which they wait
served_models.py, looks.py: the models, and whether they have changed; pauses.py: contexts in which they may change
logprobs.py     log-probabilities of tokens; acceptance.py: counts of accepted tokens
entrance.py     prefill, before a prompt has a slot; prefixes.py: reuse of rows of sequences with the same beginning
slots.py        the sequences that are decoded in one batch: how one joins, takes a step, and leaves
service.py      the decoding thread; statistics.py: its counts; opening.py: `serve`
"""

from heavypath.speculative.serving.arrivals import Closed, ModelChanged, QueueFull
from heavypath.speculative.serving.completion import Completed, Completion
from heavypath.speculative.serving.service import Service
from heavypath.speculative.serving.statistics import ServiceStatistics

__all__ = ["Closed", "Completed", "Completion", "ModelChanged", "QueueFull", "Service", "ServiceStatistics"]
