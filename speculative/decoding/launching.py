"""Ways to run a step: call by call, from a recording on a CPU, or as a CUDA graph, see `graphs`.

A recording and a graph are bound to the memory that they were made with, so a launcher belongs to one workspace.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from heavypath.kernels.native.recording import Recording, do, recorded
from heavypath.speculative.decoding.drafted import Lap
from heavypath.speculative.decoding.step import Step, Stepped
from heavypath.speculative.models.forward import Forward
from heavypath.speculative.models.host import host_can_read

logger = logging.getLogger(__name__)

BRANCHES = 6  # recordings of a step that are kept, each with memory of its own
Launch = Callable[[Lap], Stepped]  # runs a step in a workspace


def has_graphs(given: bool | None, target: Forward) -> bool:
    """True if a decoder's steps are graphs: as it was told, or else wherever they can be.

    Raises ValueError for graphs on a CPU, and of a target that the host reads from disk in each step.
    """
    on_host, stream = host_can_read(target.device), target.stream
    if given and on_host:
        raise ValueError(f"cuda_graphs needs models on a CUDA device, got {target.device}; leave it out")
    is_fixed = stream is None or stream.is_fixed
    if given and not is_fixed:
        raise ValueError(
            "cuda_graphs needs a target whose layers stay in memory, got one that is read from disk in each step; "
            "leave it out, or load the target with a larger host_memory"
        )
    return not on_host and is_fixed if given is None else given


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
    """Replays steps on a CPU by `kernels.native.recording`. One that branches has several recordings."""

    def __init__(self) -> None:
        self._known = dict[tuple[Step, int], list[Recorded] | None]()  # the last used first; None for an obstacle

    def run(self, step: Step, slots: int, launch: Launch, lap: Lap, *, again: bool) -> Stepped:
        """See `Launcher`."""
        known = self._known.get((step, slots), [])
        for place, each in enumerate(known or ()):
            if known and each.recording.replay():
                known.insert(0, known.pop(place))
                return each.result
        if not again or known is None or not step.peers.is_alone:  # a collective cannot be replayed
            return launch(lap)
        with recorded() as recording:
            stepped = launch(lambda phase: do(partial(lap, phase)))
        self._known[step, slots] = None if recording.obstacle else [Recorded(recording, stepped), *known][:BRANCHES]
        if recording.obstacle:
            logger.debug("a step is not recorded because of %s", recording.obstacle)
        return stepped
