"""Run steps: keep the memory that they work in, the steps made so far and, on a GPU, their CUDA graphs.

A benchmark that wants to look at each step can put its own object with these methods in the place of `decoder.runner`.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache, partial

import torch

from heavypath.kernels.compiling import compile_all, uncompiled_launches
from heavypath.kernels.native.recording import do, recorded
from heavypath.speculative.decoding.drafted import Lap
from heavypath.speculative.decoding.drafters import Shape
from heavypath.speculative.decoding.graphs import Graphs
from heavypath.speculative.decoding.request import Request
from heavypath.speculative.decoding.step import Stepped, StepPlan, new_step
from heavypath.speculative.decoding.workspace import Recorded, Size, Workspace, tree_rows
from heavypath.speculative.drafts.draft import NO_DRAFT
from heavypath.speculative.models.host import host_can_read
from heavypath.speculative.models.text_cache import TextCache

logger = logging.getLogger(__name__)

KEPT = 2  # caches of texts, for each thread: that of a chat which goes on, and of one text between its turns
MOST_STEPS = 64  # kept: one for each plan and, on a CPU, for each depth near the end of a text


class StepRunner:
    """Runs the steps of one decoder.

    cuda_graphs: capture each step as a CUDA graph and replay it. Then the memory of the last generation is kept, graphs
        and caches included, for the next one that fits in.
    """

    def __init__(self, cuda_graphs: bool):
        self.cuda_graphs = cuda_graphs
        self.idle: Workspace | None = None  # kept for the next generation
        self._warned = False  # that steps cannot be captured
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._step = lru_cache(MOST_STEPS)(new_step)

    @property
    def kept(self) -> deque[TextCache]:
        """The texts of this thread's last generations: other threads must not take them away before they are used."""
        if not hasattr(self._of_thread, "kept"):
            self._of_thread.kept = deque(maxlen=KEPT)
        return self._of_thread.kept

    @contextmanager
    def workspace(self, request: Request, plan: StepPlan) -> Iterator[Workspace]:
        """A workspace for one generation, for the block: the idle one if it fits and has graphs, else a new one.

        In the block a GPU that the models are on is the current one: streams, events and graphs belong to that.
        """
        size, device = Size.of(request, plan), plan.target.device
        with nullcontext() if host_can_read(device) else torch.cuda.device(device):
            if self.cuda_graphs:
                with self._idle_workspace(plan, size) as workspace:
                    yield workspace
            else:
                yield self._new_workspace(plan, size)

    @contextmanager
    def _idle_workspace(self, plan: StepPlan, size: Size) -> Iterator[Workspace]:
        """The idle workspace, or a new one, which is idle again after the block."""
        with self._lock:
            workspace, self.idle = self.idle, None
        if workspace is None or not workspace.fits(size, plan):
            del workspace  # before memory is taken for another one
            workspace = self._new_workspace(plan, size.rounded(), Graphs(plan.target.device))
        with workspace.in_turn():
            yield workspace
        self.idle = workspace  # not after an exception: what it holds may be half done

    def _new_workspace(self, plan: StepPlan, size: Size, graphs: Graphs[Stepped] | None = None) -> Workspace:
        """A new workspace; where memory is short, the texts kept for later give theirs."""
        try:
            workspace = Workspace(plan, size, graphs)
        except torch.OutOfMemoryError:
            if not self.kept:
                raise
            workspace = None
        if workspace is None:  # outside of the handler, whose traceback holds a part of what was allocated
            self.kept.clear()
            workspace = Workspace(plan, size, graphs)
        return workspace

    def run(self, plan: StepPlan, workspace: Workspace, *, slots: int, levels: int, longest: int, lap: Lap) -> Stepped:
        """Run one step of the sequences in the first `slots` slots.

        levels:  how many levels of the tree can still be emitted; on a CPU no more are drafted
        longest: rows of the longest prefix, at most
        """
        state, target_cache, draft_cache = workspace.first(slots)
        if host_can_read(plan.target.device):
            step = self._step(plan, min(plan.tree.depth, levels))
            if workspace.changes:
                return step(state, target_cache, draft_cache, longest, lap, workspace.changes)
            known = workspace.recordings.get((step, slots))
            if known is not None:
                known.recording.replay()
                return known.result
            if levels < plan.tree.depth or (step, slots) in workspace.recordings or not plan.peers.is_alone:
                # A cut tree is drafted once at most, and some steps cannot be replayed, as those with collectives.
                return step(state, target_cache, draft_cache, longest, lap)
            with recorded() as recording:
                stepped = step(state, target_cache, draft_cache, longest, lambda phase: do(partial(lap, phase)))
            workspace.recordings[step, slots] = None if recording.obstacle else Recorded(recording, stepped)
            if recording.obstacle:
                logger.debug("a step is not recorded because of %s", recording.obstacle)
            return stepped
        # To know the lengths the host would have to wait for the GPU. Besides, one graph is to serve all steps.
        step = self._step(plan, plan.tree.depth)
        if workspace.graphs is None or workspace.changes:  # which ask the host
            return step(state, target_cache, draft_cache, _most_visible(plan, workspace), lap, workspace.changes)
        graph, launch = workspace.graphs.of((step, slots)), self._launch(plan, workspace, slots)
        if graph.is_warm and not graph.is_captured and not graph.fails:
            logger.debug("capturing a CUDA graph: %d slots, a tree of %d nodes", slots, len(plan.tree))
            try:
                graph.capture(launch)
            except RuntimeError as error:
                self._warn(plan, error)
        if graph.is_captured:
            with _alone_with_weights(plan):
                graph.replay()
            stepped = graph.result
        else:
            stepped, graph.is_warm = launch(), True
        assert stepped is not None
        lap("step")
        return stepped

    def compile(self, plan: StepPlan, workspace: Workspace, slots: int) -> None:
        """Compile what a step launches, side by side, before it first runs; nothing where steps are not captured.

        A capture tells what would be launched, and nothing runs in it. It ends where rows of a cache are first moved:
        the few kernels behind that are compiled when they are launched. Code that is not ours may keep what its first
        call computes, so that its first call must not be a captured one: with such models nothing is done here. Nor
        with ranks, whose first collective makes their connections.
        """
        if workspace.graphs is None or not plan.peers.is_alone or _has_foreign_code(plan):
            return
        with uncompiled_launches() as compilations:
            workspace.graphs.try_out(self._launch(plan, workspace, slots))
        logger.debug("compiling %d kernels", len(compilations))
        compile_all(compilations, plan.target.device)

    def warm_up(
        self, plan: StepPlan, workspace: Workspace, batch: int, longest: int,
        tree_of: Callable[[int], Shape] | None,
    ) -> None:  # fmt: skip
        """Run each step that a batch may take, twice: a step is run once before it is captured.

        longest: as of `run`; tree_of: the tree of so many sequences; None where a batch may take any of the plan's
        """
        sizes = [batch, *(1 << power for power in reversed(range((batch - 1).bit_length())))]
        for each in plan.each():
            own = [size for size in sizes if tree_of is None or tree_of(size) == each.tree]
            if own:
                self.compile(each, workspace, own[0])
            for slots in own * 2:
                self.run(each, workspace, slots=slots, levels=each.tree.depth, longest=longest, lap=_no_lap)

    def _launch(self, plan: StepPlan, workspace: Workspace, slots: int) -> Callable[[], Stepped]:
        """What a graph of a step is captured of; one graph serves texts of all lengths."""
        step = self._step(plan, plan.tree.depth)
        return partial(step, *workspace.first(slots), _most_visible(plan, workspace), _no_lap)

    def _warn(self, plan: StepPlan, error: RuntimeError) -> None:
        """Say once that steps are not captured, and why. Nothing has run: the same step follows, launch by launch."""
        if not self._warned:
            names = [type(model.model).__name__ for model in (plan.target, *(plan.draft or NO_DRAFT).models)]
            names += (plan.draft or NO_DRAFT).foreign
            reason = str(error.__context__ or error).strip().splitlines()[0]
            logger.warning(
                "a step of %s cannot be captured as a CUDA graph, so its kernels are launched one by one, which is "
                "slower: %s",
                " and ".join(names), reason,
            )  # fmt: skip
        self._warned = True


@contextmanager
def _alone_with_weights(plan: StepPlan) -> Iterator[None]:
    """What a graph is launched in."""
    streams = {getattr(model, "stream", None) for model in (plan.target, *(plan.draft or NO_DRAFT).models)}
    with ExitStack() as turns:
        for stream in streams:
            if stream is not None:
                turns.enter_context(stream.replay())
        yield


def _most_visible(plan: StepPlan, workspace: Workspace) -> int:
    """Rows of the longest prefix that the workspace has room for."""
    return workspace.size.cache_rows - tree_rows(plan)


def _has_foreign_code(plan: StepPlan) -> bool:
    """Whether a step calls modules of transformers as they are, or a user's own draft."""
    models = plan.target, *(plan.draft or NO_DRAFT).models
    return bool((plan.draft or NO_DRAFT).foreign) or any(model.is_foreign for model in models)


def _no_lap(phase: str) -> None:
    """A graph has no phases that the host could time."""
