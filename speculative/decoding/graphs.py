"""Replay decoding steps as CUDA graphs: each is captured once, then launched by one call.

A graph is bound to the memory with which it was captured, so it lives as long as its workspace. All graphs of a
workspace share one memory pool for a step's temporary tensors, since no two of them run at the same time. A trial
capture has a separate pool.

All captures of a process on a device use one stream. torch has 32 streams and returns them in turn, so a new one for
each workspace would soon be a stream that other code uses at the same time.

But torch caches cuBLAS's workspace memory by thread and stream. The first capture allocates it, from its own pool, and
later captures reuse it, whatever their pool. From version 2.12 on torch frees it with any graph that was captured on
the stream (`clearCublasWorkspacesForStream`, pytorch#193402). Then graphs of one workspace would use memory freed with
another's. Therefore this module makes torch drop it before a capture into another pool than the last one, so that each
pool's graphs use their own. Version 2.11 never frees it: there all graphs that one thread has captured use the same
memory. That is right because a thread replays its graphs on one stream, one after another.

torch.cuda.graph is not used, for three reasons. It empties torch's memory caches before each capture, which takes
longer than the capture. Its stream belongs to the device that was current at its first use. And it does not restore the
current stream if a capture fails.

Python's garbage collector does not run during a capture. It could collect a decoder that nobody uses any more, which
copies the weights of its models (`models.joined`). The copies would be captured, too, not made.
"""

import gc
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from heavypath.kernels.compiling import compile_all, uncompiled_launches
from heavypath.kernels.tickets import counters_for, new_counters
from heavypath.speculative.decoding.drafted import Lap, Shape, no_lap
from heavypath.speculative.decoding.request import Request
from heavypath.speculative.decoding.step import Step, Stepped, StepPlan
from heavypath.speculative.decoding.workspace import Launch, Launcher
from heavypath.speculative.drafts.draft import Drafting

if TYPE_CHECKING:  # which has a launcher of these graphs
    from heavypath.speculative.decoding.workspace import Workspace

logger = logging.getLogger(__name__)

MOST = 32  # graphs that are kept, the most recently used

Result = TypeVar("Result")

_capturing = threading.Lock()  # only one capture at a time in a process
_streams: dict[torch.device, torch.cuda.Stream] = {}  # for captures; a graph can be replayed on any stream
_pools: dict[torch.device, Any] = {}  # the pool of the last capture on each device


class Pool:
    """A memory pool that graphs share. Once all its graphs are gone, torch accepts no more, so a new handle is made."""

    def __init__(self) -> None:
        self._graphs = WeakSet[torch.cuda.CUDAGraph]()
        self._handle: Any = None

    def handle(self) -> Any:
        """Return torch's handle of the pool, for a capture; a new one once all graphs of the last one are gone."""
        if not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def keeps(self, graph: torch.cuda.CUDAGraph) -> None:
        """Register a graph that was captured into this pool."""
        self._graphs.add(graph)

    def renew(self) -> None:
        """Have later captures use another pool of torch's; the graphs so far keep theirs."""
        self._graphs.clear()


class Graph(Generic[Result]):
    """The CUDA graph of one function. `result` is None until it is captured; a replay overwrites its tensors."""

    def __init__(self, pool: Pool, device: torch.device):
        self._pool = pool
        self._device = device
        self._counters = new_counters(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.is_warm = False  # whether the function has run once, which compiles kernels and fills tables
        self.fails = False  # whether the function could not be captured
        self.result: Result | None = None

    @property
    def is_captured(self) -> bool:
        """Whether the graph can be replayed."""
        return self._graph is not None

    def capture(self, function: Callable[[], Result]) -> None:
        """Capture the function's launches, without running them.

        Raises RuntimeError for a function that cannot be captured, such as one that synchronises with the host. Then
        nothing has run, and the current stream is restored.
        """
        graph = torch.cuda.CUDAGraph()
        self.fails = True
        torch.cuda.current_blas_handle()  # each thread has its own, and cuBLAS cannot make one in a capture
        with _capturing:
            stream = _stream_for(self._device)
            pool = self._pool.handle()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), counters_for(self._counters), _uncollected():
                if _pools.setdefault(self._device, pool) != pool:
                    _capture_nothing(self._counters)
                _pools[self._device] = pool
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    result = function()
                finally:
                    self._end(graph, pool)
        self._pool.keeps(graph)
        self._graph = graph
        self.result = result
        self.fails = False

    def _end(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """End a capture. Raises RuntimeError if CUDA invalidated it, and restores torch's state.

        Before version 2.13 torch would still act as if a capture were running. Its allocator would refuse to empty its
        caches, as it does if memory is short; later versions have ended this already. And its random generator would
        refuse to work until another capture ends. Its allocator of pinned memory has no such call: it refuses another
        capture into this pool, so later ones get another. It serves nobody from this one, as it compares the number of
        the stream's capture, which is never given twice (`CUDAGraph::capture_begin`, `CachingHostAllocator.h`).
        """
        try:
            graph.capture_end()
        except RuntimeError:
            self._pool.renew()
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index, pool)
            with suppress(RuntimeError):
                _capture_nothing(self._counters)
            raise

    def replay(self) -> None:
        """Launch the captured graph."""
        assert self._graph is not None
        self._graph.replay()


class Graphs(Generic[Result]):
    """CUDA graphs by key, at most MOST, of functions that change memory of a device and return tensors on it.

    device: must be the current CUDA device
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = Pool()
        self._graphs: OrderedDict[object, Graph[Result]] = OrderedDict()

    def __len__(self) -> int:
        return sum(graph.is_captured for graph in self._graphs.values())

    def try_out(self, function: Callable[[], object]) -> None:
        """Capture a function and drop the graph: only its host code runs. Errors of the capture are ignored."""
        with suppress(RuntimeError):
            Graph(Pool(), self._device).capture(function)

    def of(self, key: object) -> Graph[Result]:
        """Return the graph with this key; if there is none, a new one, dropping the least recently used beyond MOST."""
        if key not in self._graphs:
            self._graphs[key] = Graph(self._pool, self._device)
            if len(self._graphs) > MOST:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key]


class CudaGraphs(Launcher):
    """Replays steps as CUDA graphs of one device. A step runs once before it is captured.

    warned: reasons that were already logged why steps cannot be captured
    """

    outlives = True

    def __init__(self, device: torch.device, warned: set[str]):
        self.graphs = Graphs[Stepped](device)
        self._device = device
        self._warned = warned
        self._is_prepared = False

    def prepare(self, step: Step, launch: Launch) -> None:
        """Compile a step's kernels in parallel.

        A trial capture collects the launches without running them. It ends where rows of a cache are first moved, since
        `compact_cache` refuses its first call in a capture: the few kernels after that are compiled at their first
        launch. Code outside the package may keep results of its first call, which therefore must not be captured: with
        such models nothing is done here. The same holds for ranks, whose first collective sets up their connections.
        """
        self._is_prepared = True
        if not _is_ours(step.plan):
            return
        with uncompiled_launches() as compilations:
            self.graphs.try_out(partial(launch, no_lap))
        logger.debug("compiling %d kernels", len(compilations))
        compile_all(compilations, self._device)

    def run(self, step: Step, slots: int, launch: Launch, lap: Lap, *, again: bool) -> Stepped:
        """Run a step; arguments and result as in `Launcher.run`. `again` is ignored.

        The first time it runs call by call, the second time it is captured, and from then on replayed.
        """
        if not self._is_prepared:  # for each launcher, since a workspace of another size may need other kernel variants
            self.prepare(step, launch)
        graph = self.graphs.of((step, slots))
        if graph.is_warm and not graph.is_captured and not graph.fails:
            logger.debug("capturing a CUDA graph: %d slots, a tree of %d levels", slots, step.drafter.depth)
            try:
                graph.capture(partial(launch, no_lap))
            except RuntimeError as error:
                self._warn(step, error)
        if graph.is_captured:
            with ExitStack() as turns:
                for stream in {getattr(model, "stream", None) for model in _models(step.plan)}:  # of layers, not CUDA's
                    if stream is not None:
                        turns.enter_context(stream.replay())
                graph.replay()
            stepped = graph.result
        else:
            stepped = launch(no_lap)
            graph.is_warm = True
        assert stepped is not None
        lap("step")
        return stepped

    def _warn(self, step: Step, error: RuntimeError) -> None:
        """Log once why steps are not captured. Nothing has run; the caller runs the same step call by call."""
        if not self._warned:
            names = [type(model.model).__name__ for model in _models(step.plan)]
            names += step.plan.draft.foreign
            reason = str(error.__context__ or error).strip().splitlines()[0]
            logger.warning(
                "a step of %s cannot be captured as a CUDA graph, so its kernels are launched one by one, which is "
                "slower: %s",
                " and ".join(names),
                reason,
            )
            self._warned.add(reason)


def warm_up(runner: Any, request: Request, plan: StepPlan, tree_of: Callable[[int], Shape] | None) -> None:
    """Compile and capture all that a generation for such a request needs, so that the first one is as fast as others.

    runner: a `StepRunner`; tree_of: as in `warm_up_steps`
    """
    batch = len(request.prompt)
    longest = request.prompt.shape[1] + request.max_new_tokens
    with torch.inference_mode(), runner.workspace(request, plan) as workspace:
        if runner.cuda_graphs:
            _compile_prompts(request, plan, workspace)
        workspace.begin(request, plan)
        warm_up_steps(runner, plan, workspace, batch, longest, tree_of)
        workspace.state.numbers.cpu()  # waits for the device


def warm_up_steps(
    runner: Any,
    plan: StepPlan,
    workspace: "Workspace",
    batch: int,
    longest: int,
    tree_of: Callable[[int], Shape] | None,
) -> None:
    """Run each step that a batch of up to `batch` sequences may take, twice: once, and once to capture it.

    longest: as in `StepRunner.run`
    tree_of: returns the tree for a number of sequences, besides the tree of only a root; None if any tree may be used
    """
    sizes = [batch, *(1 << power for power in reversed(range((batch - 1).bit_length())))]
    for each in plan.each():
        own = [size for size in sizes if tree_of is None or len(each.tree) == 1 or tree_of(size) == each.tree]
        if own:
            step = runner.step(each, each.tree.depth)
            launch = partial(step, *workspace.first(own[0]), workspace.most_visible(each))
            workspace.launcher.prepare(step, launch)
        for slots in own * 2:
            runner.run(each, workspace, slots=slots, levels=each.tree.depth, longest=longest, lap=no_lap)


def _compile_prompts(request: Request, plan: StepPlan, workspace: "Workspace") -> None:
    """Compile in parallel the kernels for prompts of any length up to the request's.

    Attention has about one variant for each power of two of a piece's tokens. Launches that would compile are skipped,
    so the workspace's contents are undefined afterwards. Does nothing if foreign code or several ranks take part.
    """
    if not _is_ours(plan):
        return
    most = request.prompt.shape[1] - 1
    with uncompiled_launches() as compilations:
        for tokens in (*(1 << power for power in range(most.bit_length())), most):
            prompt = request.prompt[:, : tokens + 1]
            workspace.begin(replace(request, prompt=prompt, lengths=torch.full_like(prompt[:, 0], tokens + 1)), plan)
    compile_all(compilations, plan.target.device)


def _is_ours(plan: StepPlan) -> bool:
    """Whether only the package's code runs, in one process, so that launches may be skipped."""
    foreign = plan.draft.foreign or any(model.is_foreign for model in _models(plan))
    return plan.peers.is_alone and not foreign


def _models(plan: StepPlan) -> list[Drafting]:
    return [plan.target, *plan.draft.models]


def _stream_for(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for captures on the current device."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream()
    return _streams[device]


@contextmanager
def _uncollected() -> Iterator[None]:
    """A context in which Python's garbage collector does not run."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _capture_nothing(counters: Tensor) -> None:
    """Capture a graph on the current stream and drop it: torch then frees what it keeps for captures on the stream.

    counters: one of them is set to zero, which it already is, because torch warns of an empty graph
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
    try:
        counters[:1].zero_()
    finally:
        graph.capture_end()
    graph.reset()
