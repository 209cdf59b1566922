"""One step of decoding a batch, a function only of the batch's state:

    draft a tree level by level -> target forward on all its nodes -> verify -> compact both caches -> commit

A step changes only a `Workspace`, and on a GPU never synchronises with the host. So a CUDA graph can replay it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, cast

from torch import Tensor

from heavypath.kernels.commit import State
from heavypath.kernels.nodes import Verified
from heavypath.kernels.noise import Noise
from heavypath.kernels.step_kernels import step_kernels
from heavypath.speculative.decoding.drafted import (
    Drafted,
    Drafter,
    Lap,
    Reach,
    Shape,
    TargetInputs,
    check_distributions,
)
from heavypath.speculative.decoding.drafting import static
from heavypath.speculative.decoding.rules import Rules
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.drafts.changes import LogitChange
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.models.caches import KeyValueCache, RowCache
from heavypath.speculative.models.forward import Forward, TreeMask
from heavypath.speculative.names import load
from heavypath.speculative.ranks.peers import ALONE, Peers
from heavypath.speculative.trees.tree import ROOT, TokenTree


class Stepped(NamedTuple):
    """The result of a step: the trees, the target's logits after their nodes, and the accepted nodes.

    raw_logits, logits: [B, N, V], the model's output in its dtype, and the logits after all changes of logits
    """

    drafted: Drafted
    raw_logits: Tensor
    logits: Tensor
    verified: Verified


@dataclass(frozen=True)
class StepPlan:
    """What stays fixed during a generation: models, candidate trees, sampling and verification rules.

    draft:  `NO_DRAFT` if no step drafts anything
    tree:   the trees that the next steps draft
    others: the trees that other steps of the same generation may draft; `tree` may be among them
    peers:  the processes that decode together
    """

    target: Forward
    draft: Draft
    tree: Shape
    rules: Rules
    others: tuple[Shape, ...] = ()
    peers: Peers = ALONE

    def each(self) -> "list[StepPlan]":
        """Return a copy of this plan for each candidate tree, with that tree as `tree`; this plan's own first."""
        return [replace(self, tree=tree) for tree in self.trees]

    @cached_property
    def trees(self) -> tuple[Shape, ...]:
        """All candidate trees, each once; `tree` is the first."""
        return tuple(dict.fromkeys((self.tree, *self.others)))

    def after(self, shortest: int) -> "StepPlan":
        """Return the plan of later steps: this plan or, if the draft has no more positions, one that drafts nothing.

        shortest: all running sequences have at least this many tokens before their roots
        """
        if shortest < self.draft.positions or self.tree.depth == 0:
            return self
        others = self.others if self.tree in self.others else (*self.others, self.tree)
        return replace(self, tree=ROOT, others=others)

    @cached_property
    def depth(self) -> int:
        """The levels of the deepest candidate tree."""
        return max(tree.depth for tree in self.trees)

    @cached_property
    def branching(self) -> int:
        """The most children of a node in any candidate tree."""
        return max(tree.branching for tree in self.trees)

    @cached_property
    def rows(self) -> int:
        """The most cache rows that a candidate tree takes, with the nodes that the draft adds to it."""
        return max(tree.cache_rows for tree in self.trees) + self.draft.extra_nodes


@dataclass(frozen=True, eq=False)
class Step:
    """The work of a step, as a function of the batch: draft, score, verify, compact, commit.

    plan: models and rules; drafter: drafts the trees, near the end of a sequence only their top levels
    """

    plan: StepPlan
    drafter: Drafter

    def __call__(
        self,
        state: Sequences,
        target_cache: KeyValueCache,
        draft_cache: RowCache,
        visible_rows: int,
        lap: Lap,
        changes: Sequence[LogitChange] = (),
    ) -> Stepped:
        """Run one step, which changes `state` and the caches.

        visible_rows: an upper bound of the cache rows of the longest prefix
        lap: called with the name of each phase when it ends
        changes: changes of logits for this batch, applied before those of the rules"""
        plan = self.plan
        change = self._changes(draft_cache, changes, state, lap)
        with plan.target.reading_ahead:
            draft = change.before_drawing(plan.draft, state)
            reach = Reach(visible_rows, plan.depth + 1, trims=plan.peers.is_alone)
            drafted = self.drafter(draft, draft_cache, state, reach, lap)
            inputs = change.before_scoring(drafted.target_inputs, state)
            rows = visible_rows + inputs.tokens.shape[1]
            mask = TreeMask(prefix_length=state.lengths, visible_rows=rows, subtree_end=inputs.subtree_end)
            positions = plan.target.positions_within_limit(inputs.positions, state.lengths)
            taps = plan.draft.taps(draft_cache)
            scores = plan.target(inputs.tokens, positions, inputs.cache_rows, target_cache, mask, taps=taps)
        nodes = drafted.tokens.shape[1]
        raw_logits = scores[:, :nodes]  # without those of nodes that a change has added
        check_distributions("target", raw_logits, state, drafted.depths)
        lap("target")

        logits = change.before_verifying(scores, drafted, state)
        depth = min(self.drafter.depth, nodes - 1)
        noise = Noise(state.seed, drafted.noise_rows)
        verified = plan.rules.verify(drafted.nodes, logits, drafted.logits, depth, noise)
        change.after_verifying(verified)
        lap("verification")

        if nodes > 1:  # move the rows of the accepted path together
            target_cache.accept(verified.path, verified.length, state.lengths)
            draft_cache.accept(verified.path, verified.length, state.lengths, drafted.draft_rows)
        self._commit(drafted, verified, state)
        target_cache.advance(verified.path, state.produced)  # what a cache has besides rows, such as recurrent states
        if drafted.logits is not None:
            draft_cache.advance(verified.path, state.produced, drafted.draft_rows)
        plan.peers.check(drafted, scores, verified, state.left)
        lap("compaction")
        return Stepped(drafted, raw_logits, logits, verified)

    def _changes(
        self, draft_cache: RowCache, changes: Sequence[LogitChange], state: Sequences, lap: Lap
    ) -> "LogitChanges":
        """The changes of logits of this step, in order: the draft's if it drafts, those given, those of the rules."""
        drafts = self.drafter.depth > 0
        of_draft = self.plan.draft.changes(draft_cache) if drafts else ()
        in_order = (*of_draft, *changes, *self.plan.rules.changes)
        return LogitChanges([change.of_step(state, lap) for change in in_order])

    def _commit(self, drafted: Drafted, verified: Verified, state: Sequences) -> None:
        """Append the accepted and bonus tokens to the sequences in `state`, and update its numbers and counts."""
        written = State(state.numbers, state.output, state.stops, state.seen, state.counts)
        kernels = step_kernels(state.root.device)
        kernels.commit(written, drafted.nodes, drafted.depths, verified, self.plan.branching)


class LogitChanges:
    """The changes of logits of one step: each hook calls those of all changes, in order."""

    def __init__(self, changes: Sequence[LogitChange]):
        self._changes = changes

    def before_drawing(self, draft: Draft, state: Sequences) -> Draft:
        """The draft, wrapped by each of the changes in turn."""
        for change in self._changes:
            draft = change.before_drawing(draft, state)
        return draft

    def before_scoring(self, inputs: TargetInputs, state: Sequences) -> TargetInputs:
        """The nodes for the target's pass, with the nodes that all changes append."""
        for change in self._changes:
            inputs = change.before_scoring(inputs, state)
        return inputs

    def before_verifying(self, logits: Tensor, drafted: Drafted, state: Sequences) -> Tensor:
        """The target's logits [B, N, V], changed by each of the changes in turn."""
        for change in self._changes:
            logits = change.before_verifying(logits, drafted, state)
        return logits

    def after_verifying(self, verified: Verified) -> None:
        """Pass the result of the verification to all changes."""
        for change in self._changes:
            change.after_verifying(verified)


def new_step(plan: StepPlan, depth: int) -> Step:
    """Return the step of a plan that drafts the top `depth` levels of its tree: fewer than all near a text's end."""
    tree = plan.tree if depth > 0 else ROOT
    device = plan.target.device
    if tree.grows:
        drafter: Drafter = load("growing_drafter")(tree, depth, plan.draft, plan.rules, device)
    else:
        drafter = static(cast(TokenTree, tree), depth, plan.draft, plan.rules, device)
    return Step(plan, drafter)
