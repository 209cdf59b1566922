"""One step of decoding a batch, as a function of its state alone.

    draft a tree level by level -> target forward on all its nodes -> verify -> compact both caches -> commit

Everything that a step reads or writes, but for its own intermediate tensors, is in a `Workspace`, and on a GPU a step
asks the host nothing. Run again, it does the next step. So it can be captured as a CUDA graph and replayed.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from heavypath.kernels.commit import State, commit
from heavypath.kernels.nodes import Nodes, Verified
from heavypath.kernels.noise import Noise
from heavypath.kernels.sequence_scores import sequence_scores
from heavypath.speculative.decoding.device_tree import DeviceTree, device_tree
from heavypath.speculative.decoding.drafted import Drafted, Lap, Reach, check_distributions, given_to_target
from heavypath.speculative.decoding.drafting import draft_tree, root_alone
from heavypath.speculative.decoding.growing import grow_tree
from heavypath.speculative.decoding.growth import Growth
from heavypath.speculative.decoding.noise_rows import node_rows, race_rows, root_rows
from heavypath.speculative.decoding.rules import Rules
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.drafts.draft import NO_DRAFT, Draft
from heavypath.speculative.models.caches import KeyValueCache, RowCache
from heavypath.speculative.models.forward import Forward, TreeMask
from heavypath.speculative.processors.draft import ProcessedDraft
from heavypath.speculative.processors.texts import BatchProcessors, StepProcessors, drafted_paths
from heavypath.speculative.ranks.peers import ALONE, Peers
from heavypath.speculative.trees.tree import TokenTree


class Stepped(NamedTuple):
    """What a step did: the trees, the target's logits after their nodes, and what was accepted of them.

    raw_logits, logits: [B, N, V], as the model gave them, in its own dtype, and after `rules.processing` or processors
    """

    drafted: Drafted
    raw_logits: Tensor
    logits: Tensor
    verified: Verified


@dataclass(frozen=True)
class StepPlan:
    """What all steps of a generation have in common: whose text, who drafts (or None), which trees, what rules.

    tree:   what the next steps draft
    others: what other steps of the same texts may draft
    peers:  the processes that decode together
    """

    target: Forward
    draft: Draft | None
    tree: TokenTree | Growth
    rules: Rules
    others: tuple[TokenTree | Growth, ...] = ()
    peers: Peers = ALONE

    def each(self) -> "list[StepPlan]":
        """The plan with each of its trees, this one's first."""
        return [replace(self, tree=tree) for tree in dict.fromkeys((self.tree, *self.others))]

    @property
    def drafts_always(self) -> bool:
        """Whether each of the trees has drafted nodes."""
        return min(len(tree) for tree in (self.tree, *self.others)) > 1

    @property
    def depth(self) -> int:
        """The most levels that any of the trees has."""
        return max(tree.depth for tree in (self.tree, *self.others))

    @property
    def branching(self) -> int:
        """The most children that a node of any of the trees has."""
        return max(tree.branching for tree in (self.tree, *self.others))

    @property
    def rows(self) -> int:
        """The most cache rows that any of the trees takes."""
        return max(tree.slots if isinstance(tree, Growth) else len(tree) for tree in (self.tree, *self.others))


@dataclass(frozen=True, eq=False)
class Step:
    """What a step does, with any batch.

    tree:      the static tree that is drafted, or how trees grow; near the end of a text only its top levels
    branching: the most children that a node has in any tree of the text, which is how `commit` numbers its counts
    most_levels: that any step of the text drafts
    peers:     the processes that decode together
    """

    target: Forward
    draft: Draft | None
    tree: DeviceTree | Growth
    branching: int
    most_levels: int
    rules: Rules
    peers: Peers = ALONE

    @property
    def depth(self) -> int:
        """Levels of the tree."""
        return self.tree.depth if isinstance(self.tree, Growth) else len(self.tree.levels)

    def __call__(
        self,
        state: Sequences,
        target_cache: KeyValueCache,
        draft_cache: RowCache | None,
        visible_rows: int,
        lap: Lap,
        processors: BatchProcessors | None = None,
    ) -> Stepped:
        """Run one step. visible_rows: cache rows that hold the longest prefix, or more.

        processors: what else is done to the logits of both models; it asks the host
        """
        asked = None
        if processors is not None:
            asked = processors.step(state.member, state.produced, state.left, state.output)
            lap("processing")
        reach = Reach(visible_rows, self.most_levels + 1, trims=self.peers.is_alone)
        with self.target.reading_ahead:
            drafted = self._drafted(state, draft_cache, reach, lap, asked)
            lengths, nodes = state.lengths, drafted.tokens.shape[1]
            extra = taps = None
            if self.draft is not None and draft_cache is not None:
                taps = self.draft.taps(draft_cache)
                # A step that drafts nothing is the last one of all texts, or its draft has no nodes of its own.
                extra = self.draft.beside(draft_cache, state.root, lengths) if self.depth else None
            given = given_to_target(drafted, extra, lengths)
            rows = visible_rows + given.tokens.shape[1]
            every = self.target(
                given.tokens,
                self.target.settled(given.positions, lengths),
                given.cache_rows,
                target_cache,
                TreeMask(prefix_length=lengths, visible_rows=rows, subtree_end=given.subtree_end),
                taps=taps,
            )
        raw_logits = logits = every[:, :nodes]
        check_distributions("target", logits, state, drafted.depths)
        lap("target")
        if self.rules.processing is not None:
            logits = self.rules.processing(logits, drafted, state)
        if asked is not None:
            logits = asked.of_target(logits, drafted_paths(drafted.tokens, drafted.parents))
            lap("processing")
        if self.rules.by_sequence:
            logits = sequence_scores(logits, state.settings[:, 0])
        drafted_nodes = Nodes(drafted.tokens, drafted.parents, drafted.ranks)
        noise = Noise(state.seed, drafted.noise_rows)
        verified = self.rules.verify(drafted_nodes, logits, drafted.drawn_from, min(self.depth, nodes - 1), noise)
        if asked is not None:
            asked.check_reached(verified)
        lap("verification")
        if extra is not None:
            extra.read(every[:, nodes:], verified.length)
        if draft_cache is not None and nodes > 1:
            target_cache.accept(verified.path, verified.length, lengths)
            draft_cache.accept(verified.path, verified.length, lengths, drafted.draft_rows)
        written = State(state.numbers, state.output, state.stops, state.seen, state.counts)
        commit(written, drafted_nodes, drafted.depths, verified, self.branching)
        self.peers.check(drafted, every, verified, state.left)
        lap("compaction")
        return Stepped(drafted, raw_logits, logits, verified)

    def _drafted(
        self, state: Sequences, cache: RowCache | None, reach: Reach, lap: Lap, asked: StepProcessors | None
    ) -> Drafted:
        """The tree that each sequence drafts."""
        roots = root_rows(state.noise, state.lengths)
        draft = self.draft if self.draft is None or asked is None else ProcessedDraft(self.draft, asked, lap)
        if isinstance(self.tree, Growth):
            assert draft is not None
            assert cache is not None
            return grow_tree(
                draft,
                cache,
                self.tree,
                state,
                reach=reach,
                root_rows=roots,
                rules=self.rules,
                lap=lap,
            )
        races = self.rules.verification == "race"
        noise_rows = race_rows(roots, self.tree.every.depths) if races else node_rows(roots, self.tree.whole_numbers)
        if draft is None or cache is None or not self.tree.levels:
            return root_alone(state, noise_rows, self.tree)
        return draft_tree(
            draft,
            cache,
            self.tree,
            state,
            reach=reach,
            noise_rows=noise_rows,
            rules=self.rules,
            lap=lap,
        )


def new_step(plan: StepPlan, depth: int) -> Step:
    """The step of a plan that drafts the top `depth` levels of its tree: fewer than all near the end of a text."""
    top: DeviceTree | Growth
    if isinstance(plan.tree, Growth) and depth > 0:
        top = replace(plan.tree, depth=depth)
        if top.confidence is not None:
            top.confidence.lines(top.width, plan.target.device)  # now: a capture copies nothing from the host
    else:
        whole = plan.tree if isinstance(plan.tree, TokenTree) else TokenTree([-1])
        top = device_tree(whole, depth, plan.target.device, (plan.draft or NO_DRAFT).laws)
    return Step(
        target=plan.target,
        draft=plan.draft,
        tree=top,
        branching=plan.branching,
        most_levels=plan.depth,
        rules=plan.rules,
        peers=plan.peers,
    )
