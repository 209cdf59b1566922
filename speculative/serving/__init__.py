"""Requests that come while others are decoded: `SpeculativeDecoder.serve` takes them, from any thread or from asyncio.

completion.py   what a request's owner has in hand: its tokens as they come, its end, `cancel`
progress.py     what both sides share of it: written by the thread that decodes, read by others
arrivals.py     a request, checked, and the bounded queue of those that wait
slots.py        the sequences that are decoded side by side: how one joins, moves on by a step, and leaves
service.py      the thread that decodes, and what it counts
"""

from heavypath.speculative.serving.arrivals import Closed, QueueFull
from heavypath.speculative.serving.completion import Completion
from heavypath.speculative.serving.progress import Completed
from heavypath.speculative.serving.service import Service, ServiceStatistics

__all__ = ["Closed", "Completed", "Completion", "QueueFull", "Service", "ServiceStatistics"]
