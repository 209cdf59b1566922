"""One step of decoding a batch, as a function of its state alone.

    draft a tree level by level -> target forward on all its nodes -> verify -> compact both caches -> commit

Everything that a step reads or writes besides its own intermediate tensors lies in a `Workspace`, and on a GPU it asks
the host nothing: run again, it does the next step. So it can be captured as a CUDA graph and replayed.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from heavypath.kernels.cache_compaction import compact_unchecked
from heavypath.kernels.commit import State, commit
from heavypath.kernels.filtering import Filters
from heavypath.kernels.nodes import Nodes, Verified
from heavypath.kernels.noise import Noise
from heavypath.kernels.verification import DRAFT_AWARE, verify_unchecked
from heavypath.speculative.decoding.drafting import Drafted, Lap, Shape, check_distributions, draft_tree, root_alone
from heavypath.speculative.decoding.growing import Growth, grow_tree
from heavypath.speculative.decoding.processing import Processing
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.drafts.drafts import Cache, Draft
from heavypath.speculative.methods import Method
from heavypath.speculative.models.caches import KeyValueCache
from heavypath.speculative.models.forward import Forward, TreeMask


class Stepped(NamedTuple):
    """What a step did: the trees, the target's logits [B, N, V] after their nodes, and what was accepted of them."""

    drafted: Drafted
    logits: Tensor
    verified: Verified


@dataclass(frozen=True, eq=False)
class Step:
    """What a step does with any batch.

    tree: of fixed shape, or how trees grow; branching: the most children of a node of the whole tree, of which this may
    be the top. verify: `method` of `verify_tree`. value_temperature: as `grow_tree`'s.
    """

    target: Forward
    draft: Draft | None
    method: Method
    tree: Shape | Growth
    branching: int
    verify: str
    filters: Filters
    draft_filters: Filters
    value_temperature: float
    processing: Processing | None

    def __call__(
        self, state: Sequences, target_cache: KeyValueCache, draft_cache: Cache | None, visible: int, lap: Lap
    ) -> Stepped:
        """Do it. visible: cache rows that hold the longest prefix, or more."""
        drafted = self._drafted(state, draft_cache, visible, lap)
        lengths, nodes = state.lengths, drafted.tokens.shape[1]
        mask = TreeMask(prefix_length=lengths, rows=visible + nodes, subtree_end=drafted.subtree_end)
        rows = lengths[:, None] + torch.arange(nodes, device=lengths.device)
        positions = lengths[:, None] + drafted.depths
        logits = self.target(drafted.tokens.clamp(min=0), positions, rows, target_cache, mask)
        check_distributions("target", logits, state, drafted.depths)
        lap("target")
        if self.processing is not None:
            logits = self.processing(logits, drafted, state)
        needs_draft = drafted.logits is not None and self.verify in DRAFT_AWARE
        tree = Nodes(drafted.tokens, drafted.parents, drafted.ranks)
        verified = verify_unchecked(
            tree,
            logits,
            drafted.logits if needs_draft else None,
            method=self.verify,
            max_depth=min(self.depth, nodes - 1),
            target_filters=self.filters,
            draft_filters=self.draft_filters,
            noise=Noise(state.seed, drafted.rows),
        )
        lap("verification")
        if draft_cache is not None and nodes > 1:
            path, rows = verified.path, drafted.draft_rows
            rows = path if rows is None else rows.gather(1, path.clamp(min=0))
            moved = verified.length
            compact_unchecked([target_cache.keys, target_cache.values], path=path, length=moved, prefix_length=lengths)
            compact_unchecked([draft_cache.keys, draft_cache.values], path=rows, length=moved, prefix_length=lengths)
        written = State(state.numbers, state.output, state.stops, state.seen, state.counts)
        commit(written, tree, drafted.depths, verified, self.branching)
        lap("compaction")
        return Stepped(drafted, logits, verified)

    @property
    def depth(self) -> int:
        """Levels of the tree."""
        return self.tree.depth if isinstance(self.tree, Growth) else len(self.tree.levels)

    def _drafted(self, state: Sequences, cache: Cache | None, visible: int, lap: Lap) -> Drafted:
        """The tree that each sequence drafts.

        Noise rows are (sequence, root position, node), never used twice. A race keys its noise by (sequence, the node's
        own position), so that it does not depend on the tree.
        """
        first_row = state.noise | (state.lengths << 12)
        if isinstance(self.tree, Growth):
            assert self.draft is not None
            assert cache is not None
            options = self.draft_filters, self.value_temperature, lap
            return grow_tree(self.draft, cache, self.tree, state, visible, first_row, *options)
        rows = first_row[:, None] + (self.tree.depths << 12 if self.verify == "race" else self.tree.kept)
        if self.draft is None or cache is None or not self.tree.levels:
            return root_alone(state, rows, self.tree)
        return draft_tree(
            self.draft, cache, self.tree, state, visible, rows,
            self.method.draw, self.method.fill, self.draft_filters, lap,
        )  # fmt: skip
