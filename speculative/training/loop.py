"""The training loop: gradients, optimizer steps, progress lines and checkpoints. Ctrl-C stops it between two steps."""

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
    """Where and how often a training saves its state.

    path: the file
    every: number of steps between two checkpoints
    resume: whether to continue from the file
    state: further values to save with each checkpoint; when a training resumes, they are updated in place
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
    """Run all steps of the schedule. Returns the seconds they took, including those before an interruption.

    batches:           the same batches in every run; a resumed run skips the batches of steps already done
    gradients:         a function that adds a batch's gradients to the parameters
    before_checkpoint: called with the number of steps done and the result of the last one

    Ctrl-C raises KeyboardInterrupt after the current step, once a checkpoint is written.
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
    """An event that the first Ctrl-C sets; the second one interrupts at once. Works only in the main thread."""
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
