"""The interface between decoding and the other processes that decode together with this one.

A process that is alone has nobody to agree with, so the methods of `Peers` do nothing. `ranks.agreement` implements
them for several processes.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from heavypath.kernels.nodes import Verified

Answer = TypeVar("Answer")


class Peers:
    """What decoding does together with other processes that hold parts of the model; here nothing, for one process.

    is_alone: whether there is only one process. With several, absent nodes stay in a tree, so that sizes are the same
    """

    is_alone: bool = True

    def begin_text(self, facts: Mapping[str, object], target: Any) -> None:
        """Called before a generation: check that all processes do the same. facts: by name, the same in all of them."""

    def of_first(self, streamers: list[Any], trace: str | Path | None) -> tuple[list[Any], str | Path | None]:
        """The streamers that this process calls, and the file of the trace that it writes."""
        return streamers, trace

    def tell(self) -> None:
        """Called before a step: signal the other processes if this one must stop after it."""

    def check(self, drafted: Any, logits: Tensor, verified: Verified, left: Tensor) -> None:
        """Called at the end of a step: stop all sequences if the results of the processes differ, or one must stop.

        logits: the target's, [B, N, V]; left: `StateField.LEFT`, LongTensor[b], which is written to stop sequences
        """

    def error(self, left: int, step: int) -> BaseException | None:
        """The error to raise after step number `step` if `check` set `left` to a value that means one; else None."""
        return None

    def end(self) -> None:
        """Called after the last step of a generation: raise if one of the processes had to stop in it."""

    def holding(self) -> AbstractContextManager[object]:
        """A context that keeps exceptions of code that one process alone runs, until all have reached the same step."""
        return nullcontext()

    def interruptible(self) -> AbstractContextManager[object]:
        """A context in which Ctrl-C stops all processes after the same step."""
        return nullcontext()

    def decided(self, by: Callable[[], Answer]) -> Answer:
        """The result of the function `by` in the first process, for a function that may differ between processes."""
        return by()

    def any(self, fact: bool) -> bool:
        """Whether `fact` is true in any of the processes."""
        return fact


ALONE = Peers()
