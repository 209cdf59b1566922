"""Run steps: keep the steps made so far and, with CUDA graphs, the memory that they were captured in.

A benchmark that wants to look at each step can put its own object with these methods in the place of `decoder.runner`.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache, partial

import torch

from heavypath.speculative.decoding.drafted import Lap
from heavypath.speculative.decoding.launching import Launcher, Recordings
from heavypath.speculative.decoding.request import Request
from heavypath.speculative.decoding.step import Stepped, StepPlan, new_step
from heavypath.speculative.decoding.workspace import Size, Workspace
from heavypath.speculative.models.host import host_can_read
from heavypath.speculative.models.text_cache import TextCache

KEPT = 2  # caches of texts, for each thread: that of a chat which goes on, and of one text between its turns
MOST_STEPS = 64  # kept: one for each plan and, on a CPU, for each depth near the end of a text


class StepRunner:
    """Runs the steps of one decoder.

    cuda_graphs: replay each step as a CUDA graph. Then the memory of the last generation is kept, for the next one.
    """

    def __init__(self, cuda_graphs: bool):
        self.cuda_graphs = cuda_graphs
        self.idle: Workspace | None = None  # kept for the next generation
        self._warned = set[str]()  # why steps cannot be captured
        self._of_thread, self._lock = threading.local(), threading.Lock()
        self.step = lru_cache(MOST_STEPS)(new_step)

    @property
    def kept(self) -> deque[TextCache]:
        """The texts of this thread's last generations: other threads must not take them away before they are used."""
        if not hasattr(self._of_thread, "kept"):
            self._of_thread.kept = deque(maxlen=KEPT)
        return self._of_thread.kept

    @contextmanager
    def workspace(self, request: Request, plan: StepPlan) -> Iterator[Workspace]:
        """A workspace for one generation: the idle one if it fits, or a new one. The models' GPU is the current one."""
        size, device = Size.of(request, plan), plan.target.device
        with nullcontext() if host_can_read(device) else torch.cuda.device(device):
            if not self.cuda_graphs:
                yield self.new_workspace(plan, size)
                return
            with self._lock:
                workspace, self.idle = self.idle, None
            if workspace is None or not workspace.fits(size, plan):
                del workspace  # before memory is taken for another one
                workspace = self.new_workspace(plan, size.rounded())
            with workspace.in_turn():
                yield workspace
            self.idle = workspace  # not after an exception: what it holds may be half done

    def new_workspace(self, plan: StepPlan, size: Size) -> Workspace:
        """A new workspace; where memory is short, the texts kept for later give theirs."""
        launcher = Recordings() if host_can_read(plan.target.device) else Launcher()
        if self.cuda_graphs:
            from heavypath.speculative.decoding.graphs import CudaGraphs

            launcher = CudaGraphs(plan.target.device, self._warned)
        try:
            return Workspace(plan, size, launcher)
        except torch.OutOfMemoryError:
            if not self.kept:
                raise
        self.kept.clear()  # outside of the handler, whose traceback holds a part of what was allocated
        return Workspace(plan, size, launcher)

    def keep(self, workspace: Workspace, request: Request, plan: StepPlan) -> TextCache:
        """Keep the texts of a request that has been decoded: where memory is short those alone, or without rows."""
        if len(self.kept) == KEPT:
            self.kept.popleft()  # before memory is taken for another one
        for rows in (None, None, 0):
            with suppress(torch.OutOfMemoryError):
                self.kept.append(workspace.finish(request, plan, rows))
                break
            self.kept.clear()
        return self.kept[-1]

    def run(self, plan: StepPlan, workspace: Workspace, *, slots: int, levels: int, longest: int, lap: Lap) -> Stepped:
        """Run one step of the sequences in the first `slots` slots.

        levels:  how many levels of the tree can still be emitted; on a CPU no more are drafted
        longest: rows of the longest prefix, at most
        """
        depth, visible = plan.tree.depth, workspace.most_visible(plan)
        if host_can_read(plan.target.device):  # elsewhere the host does not know the lengths, and one step serves all
            depth, visible = min(depth, levels), longest
        step = self.step(plan, depth)
        launch = partial(step, *workspace.first(slots), visible)
        if workspace.changes:  # which ask the host
            return launch(lap, workspace.changes)
        again = depth == plan.tree.depth  # a tree is cut once, near the end of a text
        return workspace.launcher.run(step, slots, launch, lap, again=again)
