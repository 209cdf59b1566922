"""The loop of a training: gradients, a step, now and then a line and a checkpoint; it stops between two steps."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from heavypath.speculative.training.learning import Learnt
from heavypath.speculative.training.optimization import Optimization, TrainingProgress

Batch = TypeVar("Batch")


@dataclass
class Checkpoints:
    """The checkpoints of a training: where it leaves its state, every so many steps, and whether it goes on from there.

    state: whatever else there is to go on from; saved as it is then, and restored in place
    """

    path: Path
    every: int
    resume: bool
    state: dict[str, Any] = field(default_factory=dict)


def train(
    optimization: Optimization,
    batches: Iterable[Batch],
    gradients: Callable[[Batch], Learnt],
    checkpoints: Checkpoints,
    progress: TrainingProgress,
    before_checkpoint: Callable[[int, Learnt], object] = lambda step, learnt: None,
) -> float:
    """Take the schedule's steps; return the seconds they took, those before an interruption included.

    batches:           the same ones in every run; those after the checkpoint's are left out
    gradients:         adds those of a batch to the parameters
    before_checkpoint: called with the steps done and what the last one learnt

    Ctrl-C ends it by a KeyboardInterrupt once the step is done and a checkpoint is written.
    """
    done = 0
    if checkpoints.resume:
        found = optimization.load(checkpoints.path)
        done = found.pop("step")
        progress.go_on(done, found.pop("seconds"))
        checkpoints.state.update(found)
    steps = optimization.schedule.steps
    with _interrupted() as interrupted:
        for step, batch in islice(enumerate(batches), done, steps):
            learnt = gradients(batch)
            optimization.step(step)
            done = step + 1
            if progress.is_due(done):
                overlaps = "".join(f" {overlap:.3f}" for overlap in learnt.overlaps.tolist())
                progress.report(done, f"loss {learnt.loss.item():.3f}" + (overlaps and f"  overlap{overlaps}"))
            if done % checkpoints.every == 0 or done == steps or interrupted.is_set():
                if not interrupted.is_set():
                    before_checkpoint(done, learnt)
                optimization.save(checkpoints.path, done, progress.seconds, **checkpoints.state)
            if interrupted.is_set():
                progress.say(f"interrupted after step {done} of {steps}; resuming goes on from there")
                raise KeyboardInterrupt
    return progress.seconds


@contextmanager
def _interrupted() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets, in the main thread; the second interrupts at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.getsignal(signal.SIGINT)

    def note(*_: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
