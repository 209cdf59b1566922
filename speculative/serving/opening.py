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
    """The part of `TreesByBatch` that a service uses: all trees, and the tree `of` a number of requests."""

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
    """Open a service for the models of a decoder. `SpeculativeDecoder.serve` gives it all arguments up to `runner`.

    new_plan: makes the plan for the models in their current state, with a draft even where its tree is only a root
    trees_of: given the number of slots, the trees for each number of running requests
    checked: makes a checked request from the arguments of a call
    draft_filters: how the draft is sampled, given how the target is sampled
    slots: how many sequences are decoded in one step
    runner: has the setting of CUDA graphs
    max_tokens: most tokens of a sequence, prompt included. Default: 2,048, but at most the target's number of positions
        plus 1, since the last token needs no position
    queue: how many requests may wait
    prefill_tokens: how many tokens of prompts go through a model between two steps
    prefix_bytes: memory for rows of ended sequences, which prompts with the same beginning reuse. Default: half of the
        memory of the slots; 0: nothing is kept
    seed: seed of the random numbers that all requests share
    unseeded: seed of the seeds that requests without one get, in the order of `submit`. Default: a random one, so that
        services are independent of each other

    Raises TypeError or ValueError for unsuitable numbers (`ServiceLimits`), ValueError for a decoder or a target that
    is split over processes, and torch.OutOfMemoryError if the caches do not fit.
    """
    plan = new_plan()
    check_alone("serve", plan.target)
    if not plan.peers.is_alone:
        raise ValueError("serve runs in one process, and this decoder has the option communication; use `generate`")
    seed = whole("seed", seed)
    unseeded = None if unseeded is None else whole("unseeded", unseeded)
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
        with_trees,
        trees.of,
        checked,
        draft_filters,
        limits=limits,
        seed=seed,
        unseeded=unseeded,
        cuda_graphs=runner.cuda_graphs,
    )
