"""Grow trees where the draft is confident: DySpec, EAGLE-2's expansion and re-ranking, and RSD-S's stochastic beam.

A slot of a tree is a place for one more child of a node. `kernels.trees.growing` defines its value, which is known
before its token is drawn. Each slot gets the least of three values: its own, that of its parent's slot, and that of the
sibling before it. So the N slots of largest value form a tree. DySpec's heap finds it with a draft call for each node;
here a level is drafted in one call:

    depth times:  the `width` best slots below the nodes just drafted get their tokens, and one draft forward
    at the end:   keep the best size - 1 of all slots

This is the heap's tree if no level of that is wider than `width` and it is not deeper than `depth`. Ties go to the
shallower slot, then to the lower rank, then to the parent drafted earlier.

Why it is lossless: slots may be left out by value, because a value is known before the slot's token is drawn. Leaving
out nodes by their token would change the output's distribution. By "node" the value is the worth of the drawn child,
which is allowed only for deterministic drafts (EAGLE-2, Li et al. 2024, sec. 4). By "beam" a level is the next one of a
stochastic beam search (RSD-S, Jeon et al. 2024, algorithms 7 to 9): the kept keys are independent of their tokens.

DySpec's value uses the draft's probability of a token as its chance of being accepted. If the draft's distribution is
flat, drawn tokens are accepted more often than that, so DySpec's trees are too wide there. `trees.growth.Confidence`
has a measured line instead; a slot's value is then the number of tokens that it is expected to add to a step
(`kernels.trees.growing` has the formulas).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.step_kernels import step_kernels
from heavypath.kernels.trees.slots import Level, Policy, Roots, Slots
from heavypath.speculative.decoding.drafted import (
    Drafted,
    Lap,
    Reach,
    any_drafted,
    check_distributions,
    feed_of,
    root_feed,
)
from heavypath.speculative.decoding.rules import Rules
from heavypath.speculative.decoding.sequences import Sequences, root_rows
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.models.caches import RowCache
from heavypath.speculative.models.forward import host_can_read
from heavypath.speculative.trees.growth import Growth


@dataclass(frozen=True)
class GrowingDrafter:
    """Grows a tree for each sequence. The noise row of slot s is s more than the root's.

    growth: the rule by which trees grow; rules: how children are drawn

    Trees have growth.size nodes on a GPU or with several ranks; else the number of nodes of the largest tree.
    """

    growth: Growth
    rules: Rules

    @property
    def depth(self) -> int:
        """The number of levels below the root that it drafts."""
        return self.growth.depth

    def __call__(self, draft: Draft, cache: RowCache, state: Sequences, reach: Reach, lap: Lap) -> Drafted:
        """Draft the trees level by level, then keep the best nodes; arguments as in `Drafter`."""
        growth = self.growth
        rules = self.rules
        batch = len(state.root)
        device = state.root.device
        kernels = step_kernels(device)
        can_trim = reach.trims and host_can_read(device)
        first_rows = root_rows(state.noise, state.lengths)
        roots = Roots(state.root, state.lengths, first_rows, state.left)
        slots = Slots.room_for(batch, growth.slots, device)
        feed = root_feed(state, reach, 2, growth.depth)
        noise_rows = first_rows[:, None]
        level = Level(0, 1, 0, feed.ancestor_mask[:, 1:, :1])  # the root, which sees itself
        logits: list[Tensor] = []
        while True:
            after = draft(feed, cache)[:, -level.size :]  # [B, n, V]
            lap("draft")
            most = min(growth.width, after.shape[-1])
            drawn = gumbel_topk(after, most, **rules.drawing_filters._asdict(), seed=state.seed, rows=noise_rows)
            check_distributions("draft", drawn.keys, state, level.depth)
            level, inputs = kernels.grow(slots, level, drawn, after, roots, _policy(growth, rules, level.depth, device))
            logits.append(after)
            lap("sampling")
            tokens = slots.tokens[:, level.first : level.end]
            if level.depth == growth.depth or (can_trim and not any_drafted(tokens)):
                break
            noise_rows = inputs.noise_rows
            feed = feed_of(inputs, state, reach.visible_rows + level.end, level.mask, level.depth)
        tree = kernels.assemble(slots, roots, level, growth.size, can_trim)
        every = torch.cat(logits, 1)  # [B, n, V], after the slots of all levels except the last
        chosen = every.flatten(0, 1).index_select(0, tree.inner.flatten())
        drafted = Drafted(
            tokens=tree.tokens,
            parents=tree.parents,
            ranks=tree.ranks,
            depths=tree.depths,
            subtree_end=tree.subtree_end,
            inputs=tree.inputs,
            draft_rows=tree.slots,
            logits=chosen.view(*tree.tokens.shape, -1),
        )
        lap("sampling")
        return drafted


def growing_drafter(tree: Growth, depth: int, draft: Draft, rules: Rules, device: torch.device) -> GrowingDrafter:
    """The drafter of trees that grow by the rule `tree`, but only by `depth` levels.

    Raises ValueError for a `Merge`, and for a method whose children are drawn in another way than growing trees draw
    them.
    """
    if draft.root_distributions > 1:
        raise ValueError(
            "the tree grows, and a Merge needs to know which of its drafts draws a node; give a TokenTree, or take "
            "Mixture for Merge"
        )
    fitting = {"without_replacement": ("slot", "beam"), "top_k": ("slot", "node", "beam")}.get(rules.draw, ())
    if tree.by not in fitting:
        raise ValueError(
            f"a tree that grows by {tree.by!r} does not fit children drawn {rules.draw!r}: the output would not have "
            "the target's distribution; give a TokenTree, or take another method"
        )
    top = replace(tree, depth=depth)
    if top.confidence is not None:
        top.confidence.lines(top.width, device)  # fill the cache now: a capture must not copy from the host
    return GrowingDrafter(top, rules)


def _policy(growth: Growth, rules: Rules, depth: int, device: torch.device) -> Policy:
    """Return what the kernels need to choose slots below nodes of this depth: a `Policy`."""
    noisy = rules.drawing_filters.temperature > 0
    lines = None if growth.confidence is None or not noisy else growth.confidence.lines(growth.width, device)
    return Policy(
        by=growth.by,
        width=growth.width,
        threshold=growth.threshold,
        noisy=noisy,
        temperature=rules.draft_filters.temperature or rules.value_temperature,
        lines=None if lines is None else lines[min(depth, len(lines) - 1)],
    )
