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
    """This process alone.

    is_alone: whether there is only one process. With several, trees have a fixed size, even where they differ
    """

    is_alone: bool = True

    def begin_text(self, facts: Mapping[str, object], target: Any) -> None:
        """Begin a generation; facts: {name: value} that must be the same on all ranks."""

    def of_first(self, streamers: list[Any], trace: str | Path | None) -> tuple[list[Any], str | Path | None]:
        """The streamers and the trace that this process writes."""
        return streamers, trace

    def tell(self) -> None:
        """Before a step: signal the other processes if this one must stop."""

    def check(self, drafted: Any, logits: Tensor, verified: Verified, left: Tensor) -> None:
        """After a step: stop all sequences, by `left` (`StateField.LEFT`), if the results of the processes differ.

        drafted: a `Drafted`; logits: [B, N, V], all logits of the target
        """

    def error(self, left: int, step: int) -> BaseException | None:
        """The error to raise after step number `step` if `left`, a value of `LEFT`, stands for one; else None."""
        return None

    def end(self) -> None:
        """End a generation."""

    def holding(self) -> AbstractContextManager[object]:
        """Defer exceptions of code that only one process runs until all have reached the same step."""
        return nullcontext()

    def interruptible(self) -> AbstractContextManager[object]:
        """A context in which Ctrl-C stops all processes after the same step."""
        return nullcontext()

    def decided(self, by: Callable[[], Answer]) -> Answer:
        """The result of a function that may return different values in different processes."""
        return by()

    def any(self, fact: bool) -> bool:
        """Whether `fact` is true in any of the processes."""
        return fact


ALONE = Peers()
