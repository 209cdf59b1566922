"""The models of a service, which other threads may change while it is open."""

import logging
from collections.abc import Callable

import torch

from heavypath.speculative.decoding.step import StepPlan
from heavypath.speculative.serving.arrivals import ModelChanged
from heavypath.speculative.serving.looks import Look

logger = logging.getLogger(__name__)


class ServedModels:
    """The models of a service, with checks whether they have changed since its plan was made.

    plan:     the plan of a step, made for the models as they were then
    is_stale: whether a change since then has been noticed
    """

    def __init__(self, new_plan: Callable[[], StepPlan]):
        """new_plan: makes the plan for the models in their current state."""
        self._new_plan = new_plan
        self._take()
        self.is_stale = False

    def target_is_current(self, *, thorough: bool) -> bool:
        """Whether the target is unchanged since the plan was made. Sets `is_stale` if target or draft have changed.

        thorough: also make the checks that take milliseconds
        """
        is_current = self._of_target.is_current(thorough=thorough)
        if not (is_current and self._of_draft.is_current(thorough=thorough)):
            self.is_stale = True
        return is_current

    def let_go(self) -> None:
        """Mark the models as stale and release all views of their weights. Called before they may change."""
        self.is_stale = True
        self._of_target.let_go()
        self._of_draft.let_go()

    def renewed(self, device: torch.device, max_tokens: int) -> StepPlan:
        """Make a new plan, for the models in their current state. Raises ModelChanged if they cannot be decoded.

        device: the device that they must be on; max_tokens: the length of the longest sequence, prompt included
        """
        try:
            with torch.inference_mode(mode=False):  # weights that are joined are no tensors of inference
                self._take()
            if self.plan.target.device != device:
                raise ValueError(f"the service is on {device}, and they have moved to {self.plan.target.device}")
            self.plan.target.check_positions(max_tokens - 1, "for the longest text of the service")
            if not all(model.is_current() for model in self._all):
                raise RuntimeError("they are being changed; do that within `with service.paused():`")
        except Exception as error:
            raise ModelChanged(f"the models cannot be decoded as they are now: {error}") from error
        logger.info("the models may have changed: later requests are decoded by them as they are now")
        return self.plan

    def _take(self) -> None:
        """Make the plan, and record the state of its models."""
        self.plan = self._new_plan()
        drafting = self.plan.draft.models
        self._all = [self.plan.target, *drafting]
        self._of_target = Look([self.plan.target])
        self._of_draft = Look(drafting)
