"""Steps as CUDA graphs: recorded once, then launched as one.

A graph is bound to the memory it was recorded with, so it lives as long as its workspace. All share one pool for what
is needed within a step alone, since no two run at a time.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

MOST = 16  # graphs kept: those used last

Result = TypeVar("Result")


class Graphs(Generic[Result]):
    """The graphs of functions that change device memory in place and return tensors there."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._recorded: OrderedDict[object, tuple[torch.cuda.CUDAGraph, Result] | None] = OrderedDict()

    def __len__(self) -> int:
        return sum(recorded is not None for recorded in self._recorded.values())

    def run(self, key: object, function: Callable[[], Result]) -> Result:
        """Do what the function of that key does. Its tensors are overwritten when another one runs.

        The first time it runs as it is, which compiles kernels and fills tables; the second time it is recorded.
        """
        if key not in self._recorded:
            result = function()
            self._recorded[key] = None
            if len(self._recorded) > MOST:
                self._recorded.popitem(last=False)
            return result
        self._recorded.move_to_end(key)
        recorded = self._recorded[key]
        if recorded is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = function()
            recorded = self._recorded[key] = graph, result
        graph, result = recorded
        graph.replay()
        return result
