"""The processes that decode together, as the loop and the steps see them.

A process that is alone has nobody to agree with: what is asked of `Peers` then changes nothing. `ranks.agreement` has
those of several processes.
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

    is_alone: whether it is; trees of several have one size, even if they differ
    """

    is_alone: bool = True

    def begin_text(self, facts: Mapping[str, object], target: Any) -> None:
        """Begin a text, of which these facts must be the same on all ranks: names, and what has them."""

    def of_first(self, streamers: list[Any], trace: str | Path | None) -> tuple[list[Any], str | Path | None]:
        """The streamers and the trace of this process, given what it was asked for."""
        return streamers, trace

    def tell(self) -> None:
        """Before a step: tell the others if this process is to end."""

    def check(self, drafted: Any, logits: Tensor, verified: Verified, left: Tensor) -> None:
        """After a step: end all sequences if others did not do the same, by `left`, `StateField.LEFT` of the state.

        drafted: a `Drafted`; logits: [B, N, V], all that the target gave
        """

    def error(self, left: int, step: int) -> BaseException | None:
        """The error to be raised where `LEFT` says so after a step, which is number `step` of the text."""
        return None

    def end(self) -> None:
        """End a text."""

    def holding(self) -> AbstractContextManager[object]:
        """Have what the block raises, which others do not run, raised after the same step everywhere."""
        return nullcontext()

    def interruptible(self) -> AbstractContextManager[object]:
        """In the block Ctrl-C ends all processes after the same step."""
        return nullcontext()

    def decided(self, by: Callable[[], Answer]) -> Answer:
        """The result of a function whose answers may differ between processes."""
        return by()

    def any(self, fact: bool) -> bool:
        """True if something holds for any of them."""
        return fact


ALONE = Peers()
