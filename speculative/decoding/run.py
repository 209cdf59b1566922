"""Run the steps of a generation: the loop, one step of it, and how a step is launched.

    decode            runs one step after another until all sequences have ended
      Engine          runs a step, and returns the new numbers of each sequence; the service uses it, too
        StepRunner    keeps steps and their memory
          Recordings  replays steps on a CPU; `graphs` does so on a GPU, and a plain `Launcher` runs call by call

Running sequences move into the slots of those that have ended, so that later steps are smaller. Everything else after a
step is done by watchers: streams, stopping criteria, traces, changes of the tree.

On a GPU the host reads the result of a step while the next one is running. So one more step may run after the end,
before the host knows that all sequences have ended; its result is discarded. Recordings and graphs are bound to the
memory with which they were made, so a launcher belongs to one workspace.
"""

import logging
import threading
from collections import deque
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache, partial
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from heavypath.kernels.native.recording import Recording, do, recorded
from heavypath.kernels.step_kernels import step_kernels
from heavypath.speculative.decoding.drafted import Lap
from heavypath.speculative.decoding.request import Request
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.decoding.step import Step, Stepped, StepPlan, new_step
from heavypath.speculative.decoding.workspace import Launch, Launcher, Size, Workspace
from heavypath.speculative.models.forward import Forward, host_can_read
from heavypath.speculative.models.text_cache import TextCache
from heavypath.speculative.names import load
from heavypath.speculative.ranks.peers import Peers

logger = logging.getLogger(__name__)

KEPT = 2  # text caches that each thread keeps: for a chat that goes on, and another generation between its turns
MOST_STEPS = 64  # that are kept: one for each plan and, on a CPU, for each depth near the end of a sequence
BRANCHES = 6  # recordings of a step that are kept, each with separate memory

Who = TypeVar("Who")
What = TypeVar("What")


def decode(
    request: Request,
    plan: StepPlan,
    runner: "StepRunner",
    workspace: Workspace,
    *,
    stats: Statistics,
    watchers: Sequence["Watcher"] = (),
) -> Tensor:
    """Decode until all sequences have ended; return their new tokens, LongTensor[B, most new tokens], then padding.

    runner: runs the steps; workspace: their memory, which must hold the prompts already
    stats: gets the counts and the seconds by phase
    watchers: one of them may change the tree of later steps, to one of the trees of `plan`

    Raises ValueError for logits that give no distribution. With ranks, all of them raise RankMismatchError after the
    step in which they differ, and each raises the errors of the others.
    """
    peers = plan.peers
    state = workspace.state
    batch = len(request.prompt)
    watching = Watchers(watchers, state)
    waits = watching.wait or bool(workspace.changes)
    engine = Engine[int](runner, workspace, watching.tensors, waits=waits)
    ended: dict[int, SlotNumbers] = {}
    members = [*workspace.order]  # the sequences in the slots
    longest = request.prompt.shape[1] - 1
    most_left = request.max_new_tokens
    steps = 0  # whose result the host has read
    while True:
        watching.before(state)
        peers.tell()
        outcome = engine.step(
            plan,
            members[:],
            slots=len(members),
            levels=most_left - 1,
            longest=longest,
            lap=stats.lap,
            last=most_left == 1,
        )
        if outcome is None:
            continue
        steps += 1
        rows = {slot: row for slot, row in enumerate(outcome.rows) if row.member not in ended}
        for row in rows.values():
            if row.left < 0:
                raise peers.error(row.left, steps) or row.error(f" of sequence {row.member}")
        rows = watching.after(outcome, rows, state, peers)
        ended |= {row.member: row for row in rows.values() if row.left == 0}
        if len(ended) == batch:
            break

        longest = max(row.lengths for row in outcome.rows)
        most_left = max(row.left for row in rows.values())
        running = batch - len(ended)
        slots = running if engine.on_host else 1 << (running - 1).bit_length()
        close_up(workspace, members, ended, slots, longest + 2 * (plan.depth + 1))  # a step may be running

        shortest = min(row.lengths for row in rows.values() if row.left > 0)
        next_plan = watching.replanned(plan, steps, len(members)).after(shortest)
        if next_plan.tree != plan.tree:
            stats.replans.append((steps, f"{len(next_plan.tree)} nodes, {next_plan.tree.depth} levels"))
            workspace.rest_or_catch_up(request, plan, next_plan, len(members))
        plan = next_plan
        stats.lap("host")

    peers.end()
    ends = [ended[member] for member in range(batch)]
    tokens_of = torch.tensor([row.produced for row in ends], device="cpu")
    steps_of = torch.tensor([row.steps for row in ends], device="cpu")
    stats.end(state.counts, tokens_of, steps_of, sum(row.nodes for row in ends))
    new = state.output[:batch, : int(tokens_of.max())]
    column = torch.arange(new.shape[1], device="cpu")
    is_token = column < tokens_of[:, None]
    return new.where(is_token.to(new.device), request.pad)


def close_up(workspace: Workspace, members: list[int], ended: Container[int], slots: int, rows: int) -> None:
    """Move the running sequences into the first `slots` slots, so that later steps are smaller.

    members: the sequence in each slot, updated in place; ended: sequences that have ended
    rows: the most cache rows of a running sequence, which are moved with it
    """
    if slots < len(members):
        logger.debug("the batch closes up from %d slots to %d", len(members), slots)
    free = [slot for slot, member in enumerate(members[:slots]) if member in ended]
    for slot in range(slots, len(members)):
        if members[slot] not in ended:
            destination = free.pop(0)
            workspace.swap(slot, destination, rows)  # an ended sequence keeps its cache rows, for a later request
            members[destination] = members[slot]
    del members[slots:]


class SlotNumbers(NamedTuple):
    """The numbers of one slot after a step, as the host reads them: one for each `StateField`, in that order."""

    root: int
    previous: int
    lengths: int
    produced: int
    left: int
    steps: int
    nodes: int
    member: int
    noise: int

    def error(self, where: str) -> ValueError:
        """Return the error for logits without a distribution, when `left` is -1; where: the sequence in words."""
        return ValueError(
            "the target's logits hold NaN or +inf, or nothing but -inf, within a step after position "
            f"{self.lengths}{where}"
        )


class Watcher:
    """Hooks around the steps of a generation; here they do nothing.

    waits: whether the host waits for each step, so that it has the results of the last step, not the one before
    """

    waits = False

    def looks_at(self, state: Sequences) -> Tensor | None:
        """Return a tensor that is to be copied to the host after each step, for `see` and `replanned`; None for none.

        state: the batch, whose tensors stay the same for the whole generation
        """
        return None

    def before(self, state: Sequences) -> None:
        """Called before each step is launched, with the batch."""

    def ends(self, rows: Sequence[SlotNumbers], state: Sequences) -> dict[int, int]:
        """Return the sequences to end now: their numbers in the batch, and how many of their new tokens to keep.

        rows: the numbers of each sequence that took part in the step
        """
        return {}

    def see(self, stepped: Stepped, state: Sequences, rows: Sequence[SlotNumbers], looked: Tensor | None) -> None:
        """Called after each step.

        rows: as in `ends`; `left` is 0 if a sequence has ended
        looked: the copy of the tensor from `looks_at`
        stepped, state: of this step if the host waits, else of a later one
        """

    def replanned(self, plan: StepPlan, steps: int, running: int, looked: Tensor | None) -> StepPlan:
        """Return the plan of later steps: `plan`, or a copy with another of its trees.

        steps: the number of steps so far; running: slots in use; looked: the copy of the tensor from `looks_at`
        """
        return plan


class Watchers:
    """The watchers of one generation, with the tensors that they look at.

    tensors: the tensors that are copied to the host after each step
    wait:    whether the host waits for each step, because one of them needs it
    """

    def __init__(self, watchers: Sequence[Watcher], state: Sequences):
        self._watchers = watchers
        self._looks = [watcher.looks_at(state) for watcher in watchers]
        self._looked: list[Tensor | None] = []  # by each, after the last step
        self.tensors = [tensor for tensor in self._looks if tensor is not None]
        self.wait = any(watcher.waits for watcher in watchers)

    def before(self, state: Sequences) -> None:
        """Call `before` of each watcher, with the batch."""
        for watcher in self._watchers:
            watcher.before(state)

    def after(
        self, outcome: "Outcome[int]", rows: dict[int, SlotNumbers], state: Sequences, peers: Peers
    ) -> dict[int, SlotNumbers]:
        """End the sequences that a watcher wants to end, then call each with the result of the step.

        rows: {slot: its numbers}, of the sequences that took part in the step

        Returns the rows, changed where a sequence was ended.
        """
        rows = dict(rows)
        for watcher in self._watchers:
            ends = watcher.ends([*rows.values()], state)
            for slot, row in rows.items():
                if row.member in ends:
                    produced = ends[row.member]
                    rows[slot] = row._replace(produced=produced, left=0)
                    state.produced[slot] = produced
                    state.left[slot] = 0
        copies = iter(outcome.looked)
        self._looked = [None if tensor is None else next(copies) for tensor in self._looks]
        for watcher, looked in zip(self._watchers, self._looked, strict=True):
            with peers.holding():
                watcher.see(outcome.stepped, state, [*rows.values()], looked)
        return rows

    def replanned(self, plan: StepPlan, steps: int, running: int) -> StepPlan:
        """Return the plan of later steps, after each watcher may have changed its tree; arguments as in `Watcher`."""
        for watcher, looked in zip(self._watchers, self._looked, strict=True):
            plan = watcher.replanned(plan, steps, running, looked)
        return plan


class Outcome(NamedTuple, Generic[Who]):
    """What the host has read of a step.

    who: the step's sequences, as `Engine.step` was given them; rows: the numbers of their slots
    looked: copies of the watched tensors
    stepped: the result of the step launched last, which is the same step only if the host waits for steps
    """

    who: Sequence[Who]
    rows: list[SlotNumbers]
    looked: list[Tensor]
    stepped: Stepped


class Engine(Generic[Who]):
    """Runs the steps of a workspace, and copies their numbers to the host.

    looked_at: tensors of its state that are copied to the host after each step
    waits: whether the host waits for each step, so that it has its results, not those of the step before
    """

    def __init__(self, runner: "StepRunner", workspace: Workspace, looked_at: Sequence[Tensor], *, waits: bool):
        self.runner = runner
        self.workspace = workspace
        numbers = workspace.state.numbers
        self.on_host = host_can_read(numbers.device)
        self._snapshots = Snapshots[Sequence[Who]]([numbers, *looked_at], late=not waits and not self.on_host)

    def step(
        self, plan: StepPlan, who: Sequence[Who], *, slots: int, levels: int, longest: int, lap: Lap, last: bool = False
    ) -> Outcome[Who] | None:
        """Run a step; return its outcome or, if the host does not wait, that of the step before (None for the first).

        who: the sequences in the first slots, which the outcome returns; other arguments: as in `StepRunner.run`
        last: whether the next step ends all sequences. If a step is already running, it is that one, and no other is
            launched
        """
        if last and self._snapshots.taken:
            taken = self._snapshots.next()
        else:
            self._stepped = self.runner.run(plan, self.workspace, slots=slots, levels=levels, longest=longest, lap=lap)
            taken = self._snapshots.take(who)
        if taken is None:
            return None
        (numbers, *looked), who = taken
        rows = [SlotNumbers._make(row) for row in numbers[:, : len(who)].T.tolist()]
        return Outcome(who, rows, looked, self._stepped)


class Snapshots(Generic[What]):
    """Copies of small tensors on the host: as they are after this step or, if `late`, as they were one step before.

    If the host waited for the running step, the GPU would be idle until the host had read the copies and launched the
    next step. So the host reads the copies of the step before.
    """

    def __init__(self, tensors: list[Tensor], late: bool):
        self._tensors = tensors
        self._late = late
        self.taken: list[tuple[list[Tensor], torch.cuda.Event, What]] = []  # copies that are not returned yet
        self._free = [[_on_host(tensor) for tensor in tensors] for _ in range(2 * late)]

    def take(self, what: What) -> tuple[list[Tensor], What] | None:
        """Copy the tensors. Return the copies that the host may read now, with the `what` of their step.

        what: anything that belongs to the step of this call. Returns None if `late` and there was no step before.
        """
        if not self._late:
            return [tensor.cpu() for tensor in self._tensors], what
        copies = self._free.pop()
        event = torch.cuda.Event()
        for copy, tensor in zip(copies, self._tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        event.record()
        self.taken.append((copies, event, what))
        return None if len(self.taken) < 2 else self.next()

    def next(self) -> tuple[list[Tensor], What]:
        """Wait for the oldest copies that were not returned yet, and return them as `take` does."""
        copies, event, what = self.taken.pop(0)
        event.synchronize()
        self._free.append(copies)
        return copies, what


def _on_host(tensor: Tensor) -> Tensor:
    """Allocate memory for a copy of a tensor, pinned so that a GPU can write to it asynchronously."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda, device="cpu")


class StepRunner:
    """Runs the steps of one decoder.

    cuda_graphs: replay steps as CUDA graphs. Then the memory of the last generation is kept for the next one.
    """

    def __init__(self, cuda_graphs: bool):
        self.cuda_graphs = cuda_graphs
        self.idle: Workspace | None = None  # kept for the next generation
        self._warned = set[str]()  # logged reasons why steps cannot be captured
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self.step = lru_cache(MOST_STEPS)(new_step)

    @property
    def kept(self) -> deque[TextCache]:
        """Text caches of this thread's last generations; of each thread its own, so that no other thread drops them."""
        if not hasattr(self._of_thread, "kept"):
            self._of_thread.kept = deque(maxlen=KEPT)
        return self._of_thread.kept

    @contextmanager
    def workspace(self, request: Request, plan: StepPlan) -> Iterator[Workspace]:
        """A context with a workspace for one generation: the idle one if it fits, else a new one.

        In it the target's GPU is the current device.
        """
        size = Size.of(request, plan)
        device = plan.target.device
        on_device = nullcontext() if host_can_read(device) else torch.cuda.device(device)
        with on_device:
            if not self.cuda_graphs:
                yield self.new_workspace(plan, size)
                return
            with self._lock:
                workspace = self.idle
                self.idle = None
            if workspace is None or not workspace.fits(size, plan):
                del workspace  # before memory is allocated for another one
                workspace = self.new_workspace(plan, size.rounded())
            with workspace.in_turn():
                yield workspace
            self.idle = workspace  # not after an exception, when its contents may be inconsistent

    def new_workspace(self, plan: StepPlan, size: Size) -> Workspace:
        """Allocate a workspace; if memory is short, drop the kept text caches first."""
        device = plan.target.device
        launcher: Launcher
        if self.cuda_graphs:
            launcher = load("CudaGraphs")(device, self._warned)
        elif step_kernels(device).impl == "native":
            launcher = Recordings()
        else:
            launcher = Launcher()
        try:
            return Workspace(plan, size, launcher)
        except torch.OutOfMemoryError:
            if not self.kept:
                raise
        self.kept.clear()  # outside of the handler, whose traceback keeps part of the allocated memory
        return Workspace(plan, size, launcher)

    def keep(self, workspace: Workspace, request: Request, plan: StepPlan) -> TextCache:
        """Keep a decoded request's sequences with their cache rows, and return them.

        If memory is short, earlier ones are dropped first, and then no rows are kept.
        """
        if len(self.kept) == KEPT:
            self.kept.popleft()  # before memory is allocated for another one
        for rows in (None, None, 0):
            with suppress(torch.OutOfMemoryError):
                self.kept.append(workspace.finish(request, plan, rows))
                break
            self.kept.clear()
        return self.kept[-1]

    def run(self, plan: StepPlan, workspace: Workspace, *, slots: int, levels: int, longest: int, lap: Lap) -> Stepped:
        """Run one step of the sequences in the first `slots` slots.

        levels:  most levels of a tree that can still become output; on a CPU no more levels are drafted
        longest: an upper bound of the cache rows of the longest prefix
        """
        depth = plan.tree.depth
        visible = workspace.most_visible(plan)
        if host_can_read(plan.target.device):  # on a GPU the host does not know the lengths, and one step serves all
            depth = min(depth, levels)
            visible = longest
        step = self.step(plan, depth)
        launch = partial(step, *workspace.first(slots), visible)
        if workspace.changes:  # they run on the host, so the step cannot be replayed
            return launch(lap, workspace.changes)
        again = depth == plan.tree.depth  # a shortened tree is used once, near the end of a sequence
        return workspace.launcher.run(step, slots, launch, lap, again=again)


def has_graphs(given: bool | None, target: Forward) -> bool:
    """Whether a decoder's steps run as CUDA graphs: `given`, or by default wherever they can.

    Raises ValueError if True is given on a CPU, or with a target that the host reads from disk in each step.
    """
    on_host = host_can_read(target.device)
    stream = target.stream
    if given and on_host:
        raise ValueError(f"cuda_graphs needs models on a CUDA device, got {target.device}; leave it out")
    is_fixed = stream is None or stream.is_fixed
    if given and not is_fixed:
        raise ValueError(
            "cuda_graphs needs a target whose layers stay in memory, got one that is read from disk in each step; "
            "leave it out, or load the target with a larger host_memory"
        )
    return not on_host and is_fixed if given is None else given


class Recorded(NamedTuple):
    """A step on a CPU as `native.recording` recorded it, and its result, whose tensors each replay overwrites.

    On a GPU the same is a `graphs.Graph`.
    """

    recording: Recording
    result: Stepped


class Recordings(Launcher):
    """Replays steps on a CPU by `kernels.native.recording`. A step with branches has several recordings."""

    def __init__(self) -> None:
        self._known = dict[tuple[Step, int], list[Recorded] | None]()  # most recently used first; None: an obstacle

    def run(self, step: Step, slots: int, launch: Launch, lap: Lap, *, again: bool) -> Stepped:
        """Replay a recording of the step whose branches fit. If there is none, run the step; record it if `again`.

        Arguments and result as in `Launcher.run`.
        """
        key = (step, slots)
        known = self._known.get(key, [])
        if known is None:
            return launch(lap)
        for index, (recording, result) in enumerate(known):
            if recording.replay():
                known.insert(0, known.pop(index))
                return result
        if not again or not step.plan.peers.is_alone:  # a collective cannot be replayed
            return launch(lap)
        with recorded() as recording:
            result = launch(lambda phase: do(partial(lap, phase)))
        if recording.obstacle:
            self._known[key] = None
            logger.debug("a step is not recorded because of %s", recording.obstacle)
        else:
            self._known[key] = [Recorded(recording, result), *known][:BRANCHES]
        return result
