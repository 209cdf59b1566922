"""Requests that come while others are decoded: `SpeculativeDecoder.serve` takes them, from threads or from asyncio.

completion.py   the owner's side of a request: its tokens as they come, its end, `cancel`
process.py      the process that decodes, which a forked one is not
progress.py     the part that both sides share: written by the thread that decodes, read by others
arrivals.py     a request, checked, and the bounded queue of those that wait
served_models.py, looks.py: the models, and whether they are what they were; pauses.py: blocks in which they may change
logprobs.py     log-probabilities of tokens; acceptance.py: what steps accepted
entrance.py     prompts that are read before they have slots; prefixes.py: what other texts have computed of them
slots.py        the sequences that are decoded side by side: how one joins, moves on by a step, and leaves
service.py      the thread that decodes; statistics.py: its counts; opening.py: how a decoder's service is opened
"""

from heavypath.speculative.serving.arrivals import Closed, ModelChanged, QueueFull
from heavypath.speculative.serving.completion import Completion
from heavypath.speculative.serving.progress import Completed
from heavypath.speculative.serving.service import Service
from heavypath.speculative.serving.statistics import ServiceStatistics

__all__ = ["Closed", "Completed", "Completion", "ModelChanged", "QueueFull", "Service", "ServiceStatistics"]
