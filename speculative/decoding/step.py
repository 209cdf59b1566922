"""One step of decoding a batch, a function only of the batch's state:

    draft a tree level by level -> target forward on all its nodes -> verify -> compact both caches -> commit

A step changes only a `Workspace`, and on a GPU never synchronises with the host. So a CUDA graph can replay it.
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

    tree:   the trees that the next steps draft
    others: the trees that other steps of the same generation may draft
    peers:  the processes that decode together
    """

    target: Forward
    draft: Draft | None
    tree: Shape
    rules: Rules
    others: tuple[Shape, ...] = ()
    peers: Peers = ALONE

    def each(self) -> "list[StepPlan]":
        """Return a plan for each of the trees, this one's first."""
        return [replace(self, tree=tree) for tree in self.trees]

    @property
    def trees(self) -> tuple[Shape, ...]:
        """All candidate trees, each once; `tree` is the first."""
        return tuple(dict.fromkeys((self.tree, *self.others)))

    def after(self, shortest: int) -> "StepPlan":
        """Return the plan of later steps, where all sequences have at least `shortest` tokens before their roots.

        Its trees are only roots if the draft has no more positions.
        """
        if self.draft is None or shortest < self.draft.positions or self.tree.depth == 0:
            return self
        others = self.others if self.tree in self.others else (*self.others, self.tree)
        return replace(self, tree=ROOT, others=others)

    @property
    def depth(self) -> int:
        """The levels of the deepest candidate tree."""
        return max(tree.depth for tree in self.trees)

    @property
    def branching(self) -> int:
        """The most children of a node in any candidate tree."""
        return max(tree.branching for tree in self.trees)

    @property
    def rows(self) -> int:
        """The most cache rows that a candidate tree takes, with the nodes that the draft adds to it."""
        return max(tree.cache_rows for tree in self.trees) + (self.draft or NO_DRAFT).extra_nodes


@dataclass(frozen=True, eq=False)
class Step:
    """The work of a step, for any batch.

    drafter:   drafts the trees; near the end of a sequence only their top levels
    branching: the most children of a node in any tree of the generation, by which `commit` indexes its counts
    most_levels: the most levels that any step of the generation drafts
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
        """Run one step. visible_rows: at least the rows of the longest prefix; changes: applied before the rules'."""
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
        """Return the draft, wrapped so that its logits are changed."""
        draft = self.draft
        for change in changes:
            draft = None if draft is None else change.before_drawing(draft, state)
        return draft

    def _own(self, cache: RowCache | None) -> Sequence[LogitChange]:
        """Return the draft's changes of logits, which come first; none in a step that drafts nothing."""
        return () if self.draft is None or cache is None or self.drafter.depth == 0 else self.draft.changes(cache)

    def _keep(
        self, drafted: Drafted, verified: Verified, state: Sequences, target_cache: KeyValueCache,
        draft_cache: RowCache | None,
    ) -> None:  # fmt: skip
        """Move the accepted rows of both caches to the end of the prefix, and commit the accepted tokens."""
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
    """Return the step of a plan that drafts the top `depth` levels of its tree: not all near the end of a sequence."""
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
