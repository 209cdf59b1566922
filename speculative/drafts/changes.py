"""Changes of logits in a step, between the models and the verification.

A step has a list of changes. Each is told when the step begins, may stand between the draft and the draw of its tokens,
may have the target score more nodes, may change the target's logits, and is told which nodes were accepted. The changes
in this file do nothing.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from heavypath.kernels.nodes import Verified
from heavypath.speculative.drafts.draft import Draft


class LogitChange:
    """A change of logits. state: the `Sequences` of a step; lap: told the name of a phase when it ends."""

    def of_step(self, state: Any, lap: Callable[[str], object]) -> "LogitChange":
        """The change as it is for one step, which begins now."""
        return self

    def before_drawing(self, draft: Draft, state: Any) -> Draft:
        """A draft whose logits are changed, before anything is drawn from them."""
        return draft

    def before_scoring(self, given: Any, state: Any) -> Any:
        """The nodes that the target is to score, a `Given`, with any more after them.

        Those are not drafted, and nobody verifies them: `before_verifying` cuts their logits off.
        """
        return given

    def before_verifying(self, logits: Tensor, drafted: Any, state: Any) -> Tensor:
        """The target's logits [B, N, V] after the nodes of drafted trees, a `Drafted`, changed.

        Nodes may be made absent, by a token of -1 in `drafted.tokens`, for reasons that do not depend on their tokens.
        """
        return logits

    def after_verifying(self, verified: Verified) -> None:
        """Look at what was accepted."""
