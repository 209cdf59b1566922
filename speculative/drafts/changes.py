"""`LogitChange`: hooks that change logits in a step, between the models and the verification.

A step has a list of changes. Each is called when the step begins, before tokens are drawn, before the target's pass,
before verification, and after it. In this base class the hooks do nothing.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from heavypath.kernels.nodes import Verified
from heavypath.speculative.drafts.draft import Draft


class LogitChange:
    """A change of a step's logits; override the hooks that you need.

    In all hooks `state` is the batch, a `Sequences`.
    """

    def of_step(self, state: Any, lap: Callable[[str], object]) -> "LogitChange":
        """The change for the step that begins now; itself if it does not differ between steps.

        lap: a function to be called with the name of a phase when the phase ends, for the time that each takes
        """
        return self

    def before_drawing(self, draft: Draft, state: Any) -> Draft:
        """The draft to draw from: the given one, or a wrapper that changes its logits."""
        return draft

    def before_scoring(self, inputs: Any, state: Any) -> Any:
        """The nodes for the target's pass: `inputs`, a `TargetInputs`, possibly with more nodes appended.

        Appended nodes are not drafted and not verified: `before_verifying` must cut off their logits.
        """
        return inputs

    def before_verifying(self, logits: Tensor, drafted: Any, state: Any) -> Tensor:
        """The target's logits after the nodes of drafted trees (a `Drafted`), changed: [B, N, V].

        logits: [B, N + A, V], of the N drafted nodes, then of the A nodes that this change and later ones appended

        A hook may remove nodes by writing -1 to `drafted.tokens`, for reasons that do not depend on the nodes' tokens.
        """
        return logits

    def after_verifying(self, verified: Verified) -> None:
        """Called with the result of the verification, before it is committed; a change may update its own state."""
