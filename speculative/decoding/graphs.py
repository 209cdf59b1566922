"""Steps as CUDA graphs: captured once, then launched as one.

A graph is bound to the memory that it was captured with, so it lives as long as its workspace. All graphs of a
workspace share one pool for what a step needs between its own operations, since no two of them run at the same time. A
capture that is only tried out has a pool of its own.

All captures of a process on a device are on one stream. torch has 32 streams and gives them out in turn, so a new one
for each workspace would soon be one that somebody else uses meanwhile.

But torch knows the memory that cuBLAS works in by the stream. The first capture takes it, from its own pool, and later
ones use it, whatever their pool. From version 2.12 on torch lets it go with any graph that was captured on the stream
(pytorch#193402). The graphs of one workspace would then work in memory that went with another's. Therefore torch is
made to forget it where a capture is into another pool than the one before: each pool's graphs work in its own.

torch.cuda.graph is not used, for three reasons. It empties torch's caches of memory before each capture, which takes
longer than the capture. Its stream belongs to the device that was current when it was first used. And it does not leave
that stream where a capture fails.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack, suppress
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
from heavypath.speculative.drafts.draft import NO_DRAFT, Drafting

if TYPE_CHECKING:  # which has a launcher of these graphs
    from heavypath.speculative.decoding.workspace import Workspace

logger = logging.getLogger(__name__)

MOST = 32  # graphs kept: those used last

Result = TypeVar("Result")

_capturing = threading.Lock()  # one capture may be underway in a process
_streams: dict[torch.device, torch.cuda.Stream] = {}  # to capture on; a graph is replayed on any stream
_pools: dict[torch.device, Any] = {}  # that the last capture on each stream was into


class Pool:
    """Memory that graphs share. torch takes no more of them once all are gone, so that it is another memory then."""

    def __init__(self) -> None:
        self._graphs = WeakSet[torch.cuda.CUDAGraph]()
        self._handle: Any = None

    def handle(self) -> Any:
        """The handle by which torch knows the pool, for a capture."""
        if not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def keeps(self, graph: torch.cuda.CUDAGraph) -> None:
        """Know of a graph that was captured into it."""
        self._graphs.add(graph)


class Graph(Generic[Result]):
    """One function's graph. It has no `result` until it is captured; replaying overwrites the result's tensors."""

    def __init__(self, pool: Pool, device: torch.device):
        self._pool, self._device = pool, device
        self._counters = new_counters(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.is_warm = False  # whether the function ran once, which compiles kernels and fills tables
        self.fails = False  # whether the function cannot be captured
        self.result: Result | None = None

    @property
    def is_captured(self) -> bool:
        """True if `replay` can run."""
        return self._graph is not None

    def capture(self, function: Callable[[], Result]) -> None:
        """Capture what the function launches, instead of running it.

        Raises RuntimeError for a function that cannot be captured, such as one that asks the host for a value. Then
        nothing has run, and the current stream is the one that it was before.
        """
        graph, self.fails = torch.cuda.CUDAGraph(), True
        with _capturing:
            stream, pool = _stream_for(self._device), self._pool.handle()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), counters_for(self._counters):
                if _pools.setdefault(self._device, pool) != pool:
                    _capture_nothing(self._counters)
                _pools[self._device] = pool
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    result = function()
                finally:
                    self._end(graph, pool)
        self._pool.keeps(graph)
        self._graph, self.result, self.fails = graph, result, False

    def _end(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """End a capture. Raises RuntimeError for one that CUDA has broken, and leaves nothing underway.

        Before version 2.13 torch would go on as if it were. Its allocator would refuse to empty its caches, as it does
        where memory is short. A later one says that it has ended the capture already. And its generator would refuse
        random numbers to everybody until another capture comes to its end.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index, pool)
            with suppress(RuntimeError):
                _capture_nothing(self._counters)
            raise

    def replay(self) -> None:
        """Launch what was captured."""
        assert self._graph is not None
        self._graph.replay()


class Graphs(Generic[Result]):
    """The graphs of functions that change memory of the current CUDA device in place and return tensors there.

    device: that device
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, Pool()
        self._graphs: OrderedDict[object, Graph[Result]] = OrderedDict()

    def __len__(self) -> int:
        return sum(graph.is_captured for graph in self._graphs.values())

    def try_out(self, function: Callable[[], object]) -> None:
        """Do what a function does on the host. Nothing runs; nothing is kept, not even that it cannot be captured."""
        with suppress(RuntimeError):
            Graph(Pool(), self._device).capture(function)

    def of(self, key: object) -> Graph[Result]:
        """The graph of a function, known by its key; a new one if there is none, and the oldest one is dropped."""
        if key not in self._graphs:
            self._graphs[key] = Graph(self._pool, self._device)
            if len(self._graphs) > MOST:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key]


class CudaGraphs(Launcher):
    """Replays steps as CUDA graphs of one device. A step runs once before it is captured.

    warned: reasons why steps could not be captured that a user knows of
    """

    outlives = True

    def __init__(self, device: torch.device, warned: set[str]):
        self.graphs = Graphs[Stepped](device)
        self._device, self._warned = device, warned
        self._is_prepared = False

    def prepare(self, step: Step, launch: Launch) -> None:
        """Compile what a step launches, side by side.

        A capture tells what would be launched, and nothing runs in it. It ends where rows of a cache are first moved:
        the few kernels after that are compiled when they are launched. Code that is not ours may keep what its first
        call computes, so that its first call must not be a captured one: with such models nothing is done here. Nor
        with ranks, whose first collective makes their connections.
        """
        self._is_prepared = True
        if not _is_ours(step):
            return
        with uncompiled_launches() as compilations:
            self.graphs.try_out(partial(launch, no_lap))
        logger.debug("compiling %d kernels", len(compilations))
        compile_all(compilations, self._device)

    def run(self, step: Step, slots: int, launch: Launch, lap: Lap, *, again: bool) -> Stepped:
        """See `Launcher`."""
        if not self._is_prepared:  # memory of another size has other variants of kernels, too
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
                for stream in {getattr(model, "stream", None) for model in _models(step)}:
                    if stream is not None:
                        turns.enter_context(stream.replay())
                graph.replay()
            stepped = graph.result
        else:
            stepped, graph.is_warm = launch(no_lap), True
        assert stepped is not None
        lap("step")
        return stepped

    def _warn(self, step: Step, error: RuntimeError) -> None:
        """Say once why steps are not captured. Nothing has run: the same step follows, call by call."""
        if not self._warned:
            names = [type(model.model).__name__ for model in _models(step)]
            names += (step.draft or NO_DRAFT).foreign
            reason = str(error.__context__ or error).strip().splitlines()[0]
            logger.warning(
                "a step of %s cannot be captured as a CUDA graph, so its kernels are launched one by one, which is "
                "slower: %s", " and ".join(names), reason,
            )  # fmt: skip
            self._warned.add(reason)


def warm_up(runner: Any, request: Request, plan: StepPlan, tree_of: Callable[[int], Shape] | None) -> None:
    """Do what the first generation like a request would do besides decoding.

    runner: a `StepRunner`; tree_of: see `warm_up_steps`
    """
    batch, longest = len(request.prompt), request.prompt.shape[1] + request.max_new_tokens
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
    """Run each step that a batch may take, twice: a step is run once before it is captured.

    longest: as of `StepRunner.run`
    tree_of: the tree of so many sequences, beside the root; None for any of the plan's
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
    """Compile side by side what prompts of any length launch, up to those of a request.

    Attention has a variant for every power of two or so of a piece's tokens. Launches that would compile are left out,
    so what is in the workspace afterwards means nothing. Where graphs are not prepared, nothing is done.
    """
    if not _is_ours(plan):
        return
    most = request.prompt.shape[1] - 1
    with uncompiled_launches() as compilations:
        for tokens in (*(1 << power for power in range(most.bit_length())), most):
            prompt = request.prompt[:, : tokens + 1]
            workspace.begin(replace(request, prompt=prompt, lengths=torch.full_like(prompt[:, 0], tokens + 1)), plan)
    compile_all(compilations, plan.target.device)


def _is_ours(what: Step | StepPlan) -> bool:
    """True if one process calls the package's code alone, so that nothing of what is launched need be run."""
    foreign = (what.draft or NO_DRAFT).foreign or any(model.is_foreign for model in _models(what))
    return what.peers.is_alone and not foreign


def _models(step: Step | StepPlan) -> list[Drafting]:
    return [step.target, *(step.draft or NO_DRAFT).models]


def _stream_for(device: torch.device) -> torch.cuda.Stream:
    """The stream that everything is captured on, of the current device."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream()
    return _streams[device]


def _capture_nothing(counters: Tensor) -> None:
    """Capture a graph on the current stream and drop it: torch then lets go what it keeps for captures on the stream.

    counters: of which one is set to the zero that it is; a graph of no work at all would have torch warn of it
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
    try:
        counters[:1].zero_()
    finally:
        graph.capture_end()
    graph.reset()
