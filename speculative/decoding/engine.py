"""The engine of `generate` and `serve`: it runs a step, and says what became of each sequence in it.

On a GPU the host learns what a step did while the next one is under way. So one more step may run after the end, where
the host could not know that it was one; what it did is discarded.
"""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from heavypath.speculative.decoding.drafted import Lap
from heavypath.speculative.decoding.runner import StepRunner
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.decoding.step import Stepped, StepPlan
from heavypath.speculative.decoding.workspace import Workspace
from heavypath.speculative.models.host import host_can_read

Who = TypeVar("Who")
What = TypeVar("What")


class SlotNumbers(NamedTuple):
    """The numbers of one slot after a step, in the order of `StateField`, which says what they are."""

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
        """The error to be raised where a step has left a `left` below 0; where: in whose text, for the message."""
        return ValueError(
            "the target's logits hold NaN or +inf, or nothing but -inf, within a step after position "
            f"{self.lengths}{where}"
        )


class Watcher:
    """Hooks around the steps of a generation; here they do nothing.

    waits: whether the host waits for each step, so that it knows what the last one did, and not the one before
    """

    waits = False

    def looks_at(self, state: Sequences) -> Tensor | None:
        """A tensor of the state, whose copy on the host is `looked` after each step."""
        return None

    def before(self, state: Sequences) -> None:
        """Called before each step."""

    def ends(self, rows: Sequence[SlotNumbers], state: Sequences) -> dict[int, int]:
        """After a step, {sequence: with how many new tokens it ends now}. rows: of sequences that went on before it."""
        return {}

    def see(self, stepped: Stepped, state: Sequences, rows: Sequence[SlotNumbers], looked: Tensor | None) -> None:
        """Called after each step. rows: as of `ends`, with 0 `left` where a sequence has ended.

        stepped, state: are of this step if the host waits
        """

    def replanned(self, plan: StepPlan, steps: int, running: int, looked: Tensor | None) -> StepPlan:
        """The plan of the next steps, after so many of them, for so many slots; with one of the trees of `plan`."""
        return plan


class Outcome(NamedTuple, Generic[Who]):
    """The host's knowledge after a step: the sequences in it, the numbers of their slots, and the values it looked at.

    stepped: what the last step did, which is this one if the host waits for steps
    """

    who: Sequence[Who]
    rows: list[SlotNumbers]
    looked: list[Tensor]
    stepped: Stepped


class Engine(Generic[Who]):
    """Runs the steps of a workspace.

    looked_at: tensors of its state, copies of which are looked at after each step; waits: as of `Watcher`
    """

    def __init__(self, runner: StepRunner, workspace: Workspace, looked_at: Sequence[Tensor], *, waits: bool):
        self.runner, self.workspace, numbers = runner, workspace, workspace.state.numbers
        self.on_host = host_can_read(numbers.device)
        self._snapshots = Snapshots[Sequence[Who]]([numbers, *looked_at], late=not waits and not self.on_host)

    def step(
        self, plan: StepPlan, who: Sequence[Who], *, slots: int, levels: int, longest: int, lap: Lap, ends: bool = False
    ) -> Outcome[Who] | None:
        """Run a step, as `StepRunner.run` does; what came of it, or of the one before, None where there was none.

        who: is in the first slots; ends: whether a step ends all texts. If one is under way, it does, and none is run
        """
        if ends and self._snapshots.taken:
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

    If the host waited for the step that a GPU is working at, the GPU would have nothing to do until the host had looked
    and launched the next step. So the host looks at the step before the one under way.
    """

    def __init__(self, tensors: list[Tensor], late: bool):
        self._tensors, self._late = tensors, late
        self.taken: list[tuple[list[Tensor], torch.cuda.Event, What]] = []  # that nobody has seen
        self._free = [[_on_host(tensor) for tensor in tensors] for _ in range(2 * late)]

    def take(self, what: What) -> tuple[list[Tensor], What] | None:
        """Copy the tensors. Returns what is known on the host, and the `what` that was given for it, as who was there.

        That is None if `late` and there was no step before.
        """
        if not self._late:
            return [tensor.cpu() for tensor in self._tensors], what
        copies, event = self._free.pop(), torch.cuda.Event()
        for copy, tensor in zip(copies, self._tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        event.record()
        self.taken.append((copies, event, what))
        return None if len(self.taken) < 2 else self.next()

    def next(self) -> tuple[list[Tensor], What]:
        """The first copies that nobody has seen, as of `take`; waits for them."""
        copies, event, what = self.taken.pop(0)
        event.synchronize()
        self._free.append(copies)
        return copies, what


def _on_host(tensor: Tensor) -> Tensor:
    """Memory for a copy of a tensor, which a GPU can write to by itself."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda, device="cpu")
