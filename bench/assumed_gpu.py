"""What predictions of kernels assume of a GPU, an H200: numbers of the data sheet, and latencies as published."""

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
