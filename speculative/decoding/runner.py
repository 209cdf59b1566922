"""Run steps: keep the memory that they work in, the steps made so far and, on a GPU, their CUDA graphs.

A benchmark that wants to look at each step can put its own object with these methods in the place of `decoder.runner`.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial

from heavypath.speculative.decoding.drafted import Lap
from heavypath.speculative.decoding.graphs import Graphs
from heavypath.speculative.decoding.request import Request
from heavypath.speculative.decoding.snapshots import host_can_read
from heavypath.speculative.decoding.step import Stepped, StepPlan, new_step
from heavypath.speculative.decoding.workspace import Size, Workspace, tree_rows
from heavypath.speculative.models.forward import Forward

logger = logging.getLogger(__name__)

MOST_STEPS = 64  # kept: one for each plan and, on a CPU, for each depth near the end of a text


class StepRunner:
    """Runs the steps of one target's decoder.

    cuda_graphs: capture each step as a CUDA graph and replay it. Then the memory of the last generation is kept, graphs
        and caches included, for the next one that fits in.
    """

    def __init__(self, target: Forward, cuda_graphs: bool):
        self.target, self.cuda_graphs = target, cuda_graphs
        self.idle: Workspace | None = None  # kept for the next generation
        self._lock = threading.Lock()
        self._on_host = host_can_read(target.device)
        self._step = lru_cache(MOST_STEPS)(partial(new_step, target))

    @contextmanager
    def workspace(self, request: Request, plan: StepPlan) -> Iterator[Workspace]:
        """A workspace for one generation, for the block: the idle one if it fits and has graphs, else a new one."""
        size = Size.of(request, plan)
        if not self.cuda_graphs:
            workspace = Workspace(self.target, plan.draft, size)
            logger.debug("a workspace: %d bytes of caches, %s", workspace.cache_bytes, size)
            yield workspace
            return
        with self._lock:
            workspace, self.idle = self.idle, None
        if workspace is None or not workspace.fits(size, plan.draft):
            del workspace  # before memory is taken for another one
            workspace = Workspace(self.target, plan.draft, size.rounded(), Graphs())
            logger.debug("a new workspace to keep: %d bytes of caches, %s", workspace.cache_bytes, workspace.size)
        yield workspace  # after an exception it is not kept: what it holds may be half done
        self.idle = workspace

    def run(self, plan: StepPlan, workspace: Workspace, *, slots: int, levels: int, longest: int, lap: Lap) -> Stepped:
        """Run one step of the sequences in the first `slots` slots.

        levels:  how many levels of the tree can still be emitted; on a CPU no more are drafted
        longest: rows of the longest prefix, at most
        """
        state, target_cache, draft_cache = workspace.first(slots)
        if self._on_host:
            step = self._step(plan, min(plan.tree.depth, levels))
            return step(state, target_cache, draft_cache, longest, lap)
        # To know the lengths the host would have to wait for the GPU. Besides, one graph is to serve all steps.
        step = self._step(plan, plan.tree.depth)
        visible_rows = workspace.size.cache_rows - tree_rows(plan)
        if workspace.graphs is None:
            return step(state, target_cache, draft_cache, visible_rows, lap)
        graph = workspace.graphs.of((step, slots))
        if not graph.is_warm:
            stepped, graph.is_warm = step(state, target_cache, draft_cache, visible_rows, _no_lap), True
        else:
            if not graph.is_captured:
                logger.debug("capturing a CUDA graph: %d slots, a tree of %d nodes", slots, len(plan.tree))
                with graph.capturing():
                    graph.result = step(state, target_cache, draft_cache, visible_rows, _no_lap)
            graph.replay()
            stepped = graph.result
        assert stepped is not None
        lap("step")
        return stepped


def _no_lap(phase: str) -> None:
    """A graph has no phases that the host could time."""
