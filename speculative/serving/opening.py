"""`serve`: open the service of a decoder."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from heavypath.kernels.filtering import Filters
from heavypath.kernels.numbers import whole
from heavypath.speculative.decoding.request import Request
from heavypath.speculative.decoding.run import StepRunner
from heavypath.speculative.decoding.step import StepPlan
from heavypath.speculative.drafts.draft import NO_DRAFT
from heavypath.speculative.models.forward_of import check_alone
from heavypath.speculative.serving.service import Service
from heavypath.speculative.serving.slots import ServiceLimits
from heavypath.speculative.trees.growth import Growth
from heavypath.speculative.trees.tree import TokenTree

logger = logging.getLogger(__name__)


class TreesOfSlots(Protocol):
    """The part of `TreesByBatch` that a service uses."""

    @property
    def trees(self) -> tuple[TokenTree | Growth, ...]: ...  # noqa: D102
    def of(self, running: int) -> TokenTree | Growth: ...  # noqa: D102


def serve(
    new_plan: Callable[[], StepPlan],
    trees_of: Callable[[int], TreesOfSlots],
    checked: Callable[..., Request],
    draft_filters: Callable[[Filters], Filters],
    slots: int,
    runner: StepRunner,
    *,
    max_tokens: int | None = None,
    queue: int = 64,
    prefill_tokens: int = 256,
    prefix_bytes: int | None = None,
    seed: int = 0,
    unseeded: int | None = None,
) -> Service:
    """Open a service. `SpeculativeDecoder.serve` passes all but the numbers; see `Service` and `ServiceLimits`.

    new_plan: makes the plan for the models in their current state, with a draft even where its tree is only a root
    trees_of: the trees for each number of running requests, given the number of slots
    max_tokens: default 2,048, but at most the target's positions and one more: the last token needs no position
    seed: of the random numbers that all requests share
    unseeded: a seed for the random numbers of requests without a seed, in the order of `submit`. None for a random one,
              so
        that services are independent of each other; `Service.unseeded` has it

    Raises ValueError for numbers below 1, and torch.OutOfMemoryError if the caches do not fit.
    """
    plan = new_plan()
    check_alone("serve", plan.target)
    if not plan.peers.is_alone:
        raise ValueError("serve runs in one process, and this decoder has the option communication; use `generate`")
    seed, unseeded = whole("seed", seed), None if unseeded is None else whole("unseeded", unseeded)
    if unseeded is not None and unseeded < 0:
        raise ValueError(f"unseeded must be None or an integer >= 0, got {unseeded!r}")
    room = min(2048 if max_tokens is None else whole("max_tokens", max_tokens), plan.target.max_positions + 1)
    limits = ServiceLimits(slots, room, queue, prefill_tokens, prefix_bytes).check()
    if limits.max_tokens > plan.draft.positions:
        logger.warning("the draft has %d positions: longer texts go on without it", plan.draft.positions)
    trees = trees_of(slots)
    drafts = any(len(tree) > 1 for tree in trees.trees)

    def with_trees() -> StepPlan:
        plan = new_plan()
        draft = plan.draft if drafts else NO_DRAFT
        return replace(plan, tree=trees.of(slots), others=trees.trees, draft=draft)

    return Service(
        with_trees, trees.of, checked, draft_filters,
        limits=limits, seed=seed, unseeded=unseeded, cuda_graphs=runner.cuda_graphs,
    )  # fmt: skip
