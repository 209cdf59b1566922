"""Steps as CUDA graphs: captured once, then launched as one.

A graph is bound to the memory that it was captured with, so it lives as long as its workspace. All graphs of a
workspace share one pool for what a step needs between its own operations, since no two of them run at the same time.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

MOST = 16  # graphs kept: those used last

Result = TypeVar("Result")


class Graph(Generic[Result]):
    """One function's graph. It has no `result` until it is captured; replaying overwrites the result's tensors."""

    def __init__(self, pool: Any):
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self.is_warm = False  # whether the function ran once, which compiles kernels and fills tables
        self.result: Result | None = None

    @property
    def is_captured(self) -> bool:
        """Whether `replay` can run."""
        return self._graph is not None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture what the block launches, instead of running it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            yield
        self._graph = graph

    def replay(self) -> None:
        """Launch what was captured."""
        assert self._graph is not None
        self._graph.replay()


class Graphs(Generic[Result]):
    """The graphs of functions that change device memory in place and return tensors there."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: OrderedDict[object, Graph[Result]] = OrderedDict()

    def __len__(self) -> int:
        return sum(graph.is_captured for graph in self._graphs.values())

    def of(self, key: object) -> Graph[Result]:
        """The graph of a function, known by its key; a new one if there is none, and the oldest one is dropped."""
        if key not in self._graphs:
            self._graphs[key] = Graph(self._pool)
            if len(self._graphs) > MOST:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key]
