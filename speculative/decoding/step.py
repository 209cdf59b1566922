"""One step of decoding a batch, as a function of its state alone.

    draft a tree level by level -> target forward on all its nodes -> verify -> compact both caches -> commit

A step changes a `Workspace` alone, and on a GPU asks the host nothing. So a CUDA graph can replay it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

from torch import Tensor

from heavypath.kernels.commit import State
from heavypath.kernels.nodes import Verified
from heavypath.kernels.noise import Noise
from heavypath.kernels.step_kernels import step_kernels
from heavypath.speculative.decoding.drafted import Drafted, Drafter, Lap, Reach, Shape, check_distributions
from heavypath.speculative.decoding.drafting import static
from heavypath.speculative.decoding.rules import Rules
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.drafts.changes import LogitChange
from heavypath.speculative.drafts.draft import NO_DRAFT, Draft
from heavypath.speculative.models.caches import KeyValueCache, RowCache
from heavypath.speculative.models.forward import Forward, TreeMask
from heavypath.speculative.names import load
from heavypath.speculative.ranks.peers import ALONE, Peers
from heavypath.speculative.trees.tree import ROOT, TokenTree


class Stepped(NamedTuple):
    """The result of a step: the trees, the target's logits after their nodes, and the nodes that were accepted.

    raw_logits, logits: [B, N, V], as the model gave them, in its own dtype, and after the changes of logits
    """

    drafted: Drafted
    raw_logits: Tensor
    logits: Tensor
    verified: Verified


@dataclass(frozen=True)
class StepPlan:
    """The common part of all steps of a generation: whose text, the drafter (or None), the trees, the rules.

    tree:   what the next steps draft
    others: what other steps of the same texts may draft
    peers:  the processes that decode together
    """

    target: Forward
    draft: Draft | None
    tree: Shape
    rules: Rules
    others: tuple[Shape, ...] = ()
    peers: Peers = ALONE

    def each(self) -> "list[StepPlan]":
        """The plan with each of its trees, this one's first."""
        return [replace(self, tree=tree) for tree in self.trees]

    @property
    def trees(self) -> tuple[Shape, ...]:
        """Each of the trees once, this one first."""
        return tuple(dict.fromkeys((self.tree, *self.others)))

    def after(self, shortest: int) -> "StepPlan":
        """The plan of steps whose texts have so many tokens before their roots, or more.

        It is of roots alone where the draft has no more positions.
        """
        if self.draft is None or shortest < self.draft.positions or self.tree.depth == 0:
            return self
        others = self.others if self.tree in self.others else (*self.others, self.tree)
        return replace(self, tree=ROOT, others=others)

    @property
    def depth(self) -> int:
        """The most levels that any of the trees has."""
        return max(tree.depth for tree in self.trees)

    @property
    def branching(self) -> int:
        """The most children that a node of any of the trees has."""
        return max(tree.branching for tree in self.trees)

    @property
    def rows(self) -> int:
        """The most cache rows that any of the trees takes, with the nodes that the draft adds to it."""
        return max(tree.cache_rows for tree in self.trees) + (self.draft or NO_DRAFT).extra_nodes


@dataclass(frozen=True, eq=False)
class Step:
    """The work of a step, with any batch.

    drafter:   drafts the trees; near the end of a text only their top levels
    branching: the most children that a node has in any tree of the text, which is how `commit` numbers its counts
    most_levels: that any step of the text drafts
    peers:     the processes that decode together
    """

    target: Forward
    draft: Draft | None
    drafter: Drafter
    branching: int
    most_levels: int
    rules: Rules
    peers: Peers = ALONE

    def __call__(
        self, state: Sequences, target_cache: KeyValueCache, draft_cache: RowCache | None, visible_rows: int, lap: Lap,
        changes: Sequence[LogitChange] = (),
    ) -> Stepped:  # fmt: skip
        """Run one step. visible_rows: cache rows that hold the longest prefix, or more; changes: before the rules'."""
        changes = [change.of_step(state, lap) for change in (*self._own(draft_cache), *changes, *self.rules.changes)]
        reach = Reach(visible_rows, self.most_levels + 1, trims=self.peers.is_alone)
        with self.target.reading_ahead:
            drafted = self.drafter(self._changed(changes, state), draft_cache, state, reach, lap)
            given = drafted.given
            for change in changes:
                given = change.before_scoring(given, state)
            nodes, rows = drafted.tokens.shape[1], visible_rows + given.tokens.shape[1]
            mask = TreeMask(prefix_length=state.lengths, visible_rows=rows, subtree_end=given.subtree_end)
            positions = self.target.settled(given.positions, state.lengths)
            taps = None if self.draft is None or draft_cache is None else self.draft.taps(draft_cache)
            every = self.target(given.tokens, positions, given.cache_rows, target_cache, mask, taps=taps)
        raw_logits = every[:, :nodes]
        check_distributions("target", raw_logits, state, drafted.depths)
        lap("target")
        logits = every
        for change in changes:
            logits = change.before_verifying(logits, drafted, state)
        depth, noise = min(self.drafter.depth, nodes - 1), Noise(state.seed, drafted.noise_rows)
        verified = self.rules.verify(drafted.nodes, logits, drafted.logits, depth, noise)
        for change in changes:
            change.after_verifying(verified)
        lap("verification")
        self._keep(drafted, verified, state, target_cache, draft_cache)
        self.peers.check(drafted, every, verified, state.left)
        lap("compaction")
        return Stepped(drafted, raw_logits, logits, verified)

    def _changed(self, changes: Sequence[LogitChange], state: Sequences) -> Draft | None:
        """The draft with its logits changed."""
        draft = self.draft
        for change in changes:
            draft = None if draft is None else change.before_drawing(draft, state)
        return draft

    def _own(self, cache: RowCache | None) -> Sequence[LogitChange]:
        """The draft's own changes, which come first; none in a step that drafts nothing."""
        return () if self.draft is None or cache is None or self.drafter.depth == 0 else self.draft.changes(cache)

    def _keep(
        self, drafted: Drafted, verified: Verified, state: Sequences, target_cache: KeyValueCache,
        draft_cache: RowCache | None,
    ) -> None:  # fmt: skip
        """Move the accepted rows of both caches to the text, and the texts on."""
        if draft_cache is not None and drafted.tokens.shape[1] > 1:
            target_cache.accept(verified.path, verified.length, state.lengths)
            draft_cache.accept(verified.path, verified.length, state.lengths, drafted.draft_rows)
        written = State(state.numbers, state.output, state.stops, state.seen, state.counts)
        kernels = step_kernels(state.root.device)
        kernels.commit(written, drafted.nodes, drafted.depths, verified, self.branching)
        target_cache.advance(verified.path, state.produced)
        if draft_cache is not None and drafted.logits is not None:
            draft_cache.advance(verified.path, state.produced, drafted.draft_rows)


def new_step(plan: StepPlan, depth: int) -> Step:
    """The step of a plan that drafts the top `depth` levels of its tree: fewer than all near the end of a text."""
    tree, device = plan.tree if depth > 0 else ROOT, plan.target.device
    if tree.grows:
        drafter: Drafter = load("growing_drafter")(tree, depth, plan.rules, device)
    else:
        drafter = static(cast(TokenTree, tree), depth, plan.draft, plan.rules, device)
    return Step(
        target=plan.target,
        draft=plan.draft,
        drafter=drafter,
        branching=plan.branching,
        most_levels=plan.depth,
        rules=plan.rules,
        peers=plan.peers,
    )
