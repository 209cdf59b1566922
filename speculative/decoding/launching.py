"""Ways to run a step: call by call, from a recording on a CPU, or as a CUDA graph.

A recording and a graph are bound to the memory that they were made with, so a launcher belongs to one workspace.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch

from heavypath.kernels.compiling import compile_all, uncompiled_launches
from heavypath.kernels.native.recording import Recording, do, recorded
from heavypath.speculative.decoding.drafted import Lap, no_lap
from heavypath.speculative.decoding.graphs import Graphs
from heavypath.speculative.decoding.step import Step, Stepped
from heavypath.speculative.drafts.draft import NO_DRAFT, Drafting

logger = logging.getLogger(__name__)

Launch = Callable[[Lap], Stepped]  # runs a step in a workspace


class Launcher:
    """Runs steps call by call.

    outlives: whether its workspace is kept for the next generation
    """

    outlives = False

    def prepare(self, step: Step, launch: Launch) -> None:
        """Do ahead what the first run of a step would do besides the step. Nothing is run."""

    def run(self, step: Step, slots: int, launch: Launch, lap: Lap, *, again: bool) -> Stepped:
        """Run a step in the first `slots` slots; again: whether it may be expected to come again."""
        return launch(lap)


class Recorded(NamedTuple):
    """A step that can be replayed, and what it did, in tensors that each replay writes anew."""

    recording: Recording
    result: Stepped


class Recordings(Launcher):
    """Replays steps on a CPU by `kernels.native.recording`."""

    def __init__(self) -> None:
        self._known = dict[tuple[Step, int], Recorded | None]()  # None where a step has an obstacle

    def run(self, step: Step, slots: int, launch: Launch, lap: Lap, *, again: bool) -> Stepped:
        """See `Launcher`."""
        known = self._known.get((step, slots))
        if known is not None:
            known.recording.replay()
            return known.result
        if not again or (step, slots) in self._known or not step.peers.is_alone:  # a collective cannot be replayed
            return launch(lap)
        with recorded() as recording:
            stepped = launch(lambda phase: do(partial(lap, phase)))
        self._known[step, slots] = None if recording.obstacle else Recorded(recording, stepped)
        if recording.obstacle:
            logger.debug("a step is not recorded because of %s", recording.obstacle)
        return stepped


class CudaGraphs(Launcher):
    """Replays steps as CUDA graphs of one device. A step runs once before it is captured.

    warned: reasons why steps could not be captured that a user knows of
    """

    outlives = True

    def __init__(self, device: torch.device, warned: set[str]):
        self.graphs = Graphs[Stepped](device)
        self._device, self._warned = device, warned

    def prepare(self, step: Step, launch: Launch) -> None:
        """Compile what a step launches, side by side.

        A capture tells what would be launched, and nothing runs in it. It ends where rows of a cache are first moved:
        the few kernels after that are compiled when they are launched. Code that is not ours may keep what its first
        call computes, so that its first call must not be a captured one: with such models nothing is done here. Nor
        with ranks, whose first collective makes their connections.
        """
        draft = step.draft or NO_DRAFT
        if not step.peers.is_alone or draft.foreign or any(model.is_foreign for model in _models(step)):
            return
        with uncompiled_launches() as compilations:
            self.graphs.try_out(partial(launch, no_lap))
        logger.debug("compiling %d kernels", len(compilations))
        compile_all(compilations, self._device)

    def run(self, step: Step, slots: int, launch: Launch, lap: Lap, *, again: bool) -> Stepped:
        """See `Launcher`."""
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


def _models(step: Step) -> list[Drafting]:
    return [step.target, *(step.draft or NO_DRAFT).models]
