"""What predictions of kernels assume of a GPU, an H200: numbers of the data sheet, and latencies as published.

Multiprocessors share passes over a row (kernels/sharing.py). Such a pass is a chain of waiting, and its chunk:

    publish   the leader's parameters are written and fenced, and the word is given      fence + half a round trip
    notice    a helper's look is on its way                                              1.5 round trips
    take      it takes a chunk, and loads the parameters                                 2 round trips
    chunk     it loads the chunk, computes, and sees that no chunk is left               round trip + instructions
    give      its sums are written and fenced, and counted                               fence + half a round trip
    combine   the leader sees it, and loads all sums                                     2 round trips
    decide    the next parameters are found, by one program                              instructions that wait
"""

from typing import NamedTuple

SCHEDULERS = 4  # of a multiprocessor, each of which issues an instruction of a warp a cycle


class Gpu(NamedTuple):
    """What is assumed; times in microseconds unless it says cycles."""

    processors: int = 132
    clock: float = 1.7e3  # cycles a microsecond
    bandwidth: float = 4.3e6  # bytes a microsecond
    launch: float = 1.3  # in a graph
    trip: float = 0.3  # to the second cache and back
    memory: float = 0.8  # to the memory and back
    fence: float = 0.5
    alone: float = 1.5  # cycles an instruction, by one warp a scheduler
    issued: float = 0.8  # of the cycles of a scheduler with work of several programs
    dependent: float = 4.0  # cycles from an instruction to the next one that needs it, by two warps a scheduler
    barrier: float = 30.0  # cycles


H200 = Gpu()


def shared_pass(gpu: Gpu, chunk: float, decide: float) -> dict[str, float]:
    """Microseconds of each part of a shared pass, for those of its chunk and of what is decided behind it."""
    return {
        "publish": gpu.fence + gpu.trip / 2,
        "notice": 1.5 * gpu.trip,
        "take": 2 * gpu.trip,
        "chunk": chunk,
        "give": gpu.fence + gpu.trip / 2,
        "combine": 2 * gpu.trip,
        "decide": decide,
    }
