"""A drafted tree, and what static and growing trees have in common while they are drafted."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from heavypath.kernels.native.library import library
from heavypath.kernels.native.recording import ask, do, refuse
from heavypath.kernels.native.sampling import below_infinity
from heavypath.kernels.nodes import Nodes
from heavypath.kernels.step_kernels import step_kernels
from heavypath.kernels.trees.levels import Fed
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.drafts.draft import Draft, Feed
from heavypath.speculative.models.caches import RowCache
from heavypath.speculative.models.forward import host_can_read

Lap = Callable[[str], object]  # called with the name of a phase when it ends


def no_lap(phase: str) -> None:
    """Nobody times the phases."""


class Reach(NamedTuple):
    """The host's knowledge of how far a batch's texts reach, where it does not know their lengths.

    visible_rows: cache rows that hold the longest prefix, or more
    news:         how many of a text's last tokens may be new since the last step, the root among them
    trims:        whether trees may be cut to the nodes that they have; ranks' must be of one size even if they differ
    """

    visible_rows: int
    news: int
    trims: bool = True


class Drafted(NamedTuple):
    """Each sequence's tree of N nodes, in depth-first order. What all sequences share is [N] instead of [B, N].

    tokens:      LongTensor[B, N], -1 for an absent node
    parents, ranks, depths, subtree_end: LongTensor[N] or [B, N], as `TokenTree`'s
    fed:         the nodes as the target is given them
    draft_rows:  LongTensor[B, N], the node's row in the draft's cache after the prefix; None where it is the node's
                 own number
    logits:      [B, N, V], the draft's after each node, undefined after leaves; None for a root alone. Of a draft of D
                 `laws` [B, N + D - 1, V]: the others after the root follow
    """

    tokens: Tensor
    parents: Tensor
    ranks: Tensor
    depths: Tensor
    subtree_end: Tensor
    fed: Fed
    draft_rows: Tensor | None
    logits: Tensor | None

    @property
    def nodes(self) -> Nodes:
        """The trees as a verification is told of them."""
        return Nodes(self.tokens, self.parents, self.ranks)

    @property
    def noise_rows(self) -> Tensor:
        """LongTensor[B, N], see `noise_rows`."""
        return self.fed.noise_rows

    @property
    def given(self) -> "Given":
        """The trees as the target is given them."""
        return Given(self.fed.tokens, self.fed.positions, self.fed.cache_rows, self.subtree_end)


class Shape(Protocol):
    """The trees that a method drafts: one static tree, or how trees grow; it is hashable.

    depth: its levels; branching: the most children of a node; cache_rows: that it takes; its length: nodes, at most
    grows: whether its nodes depend on what is drafted
    """

    @property
    def grows(self) -> bool: ...  # noqa: D102
    @property
    def depth(self) -> int: ...  # noqa: D102
    @property
    def branching(self) -> int: ...  # noqa: D102
    @property
    def cache_rows(self) -> int: ...  # noqa: D102
    def __len__(self) -> int: ...


class Drafter(Protocol):
    """Drafts a tree for each sequence. depth: its levels."""

    @property
    def depth(self) -> int: ...  # noqa: D102

    def __call__(
        self, draft: Draft | None, cache: RowCache | None, state: Sequences, reach: Reach, lap: Lap
    ) -> Drafted:
        """The trees. A node is absent where its draft proposes nothing more, and after the end of its text."""
        ...


class Given(NamedTuple):
    """The nodes of a pass of the target: LongTensor[B, N] each; subtree_end may be [N], which all sequences share.

    They are those of the drafted trees, and after them any that a `LogitChange` adds, as more subtrees of the root.
    """

    tokens: Tensor
    positions: Tensor
    cache_rows: Tensor
    subtree_end: Tensor


def root_feed(state: Sequences, reach: Reach, nodes: int, levels: int) -> Feed:
    """The first feed of a step: the root, and the token before it.

    That token may have been an accepted leaf, which the draft has not been given yet. In a text of one token there is
    none before the root: then the root itself is given twice.

    nodes: of the tree so far, for the columns of the mask; at least 2, since there are as many queries
    levels: that are drafted in this step
    """
    first = step_kernels(state.root.device).first_nodes(state.previous, state.root, state.lengths, nodes)
    return Feed(
        tokens=first.tokens,
        positions=first.cache_rows,
        cache_rows=first.cache_rows,
        parent_rows=first.parent_rows,
        prefix_lengths=state.lengths,
        visible_rows=reach.visible_rows + nodes,
        ancestor_mask=first.ancestor_mask,
        news=reach.news,
        levels=levels,
    )


def feed_of(
    fed: Fed, state: Sequences, visible_rows: int, mask: Tensor, level: int, branches: Tensor | None = None
) -> Feed:
    """The feed of a level below the root. visible_rows, mask, level, branches: as in `Feed`."""
    return Feed(
        tokens=fed.tokens,
        positions=fed.positions,
        cache_rows=fed.cache_rows,
        parent_rows=fed.parent_rows,
        prefix_lengths=state.lengths,
        visible_rows=visible_rows,
        ancestor_mask=mask,
        level=level,
        branches=branches,
    )


def any_drafted(tokens: Tensor) -> bool:
    """True if there is any among drawn tokens, of which those below 0 are absent; waits for the device."""
    return ask(lambda: bool((tokens >= 0).any()))


def check_distributions(whose: str, logits: Tensor, state: Sequences, depths: int | Tensor) -> None:
    """Raise ValueError for logits with NaN or +inf. On a GPU nothing is checked here, since asking would stop it.

    logits: [B, n, any]; or keys of draws from them, which are NaN where the logits are no distribution
    depths: of the n nodes, an int, [n] or [B, n]
    """
    if not host_can_read(logits.device):
        return
    if logits.dtype == torch.float32 and logits.is_contiguous() and library() is not None:
        do(partial(_check_natively, whose, logits, state, depths))
        return
    refuse("check_distributions")
    if not logits.float().numpy().max() < torch.inf:  # true for NaN, too; NumPy has no bfloat16
        raise _no_distribution(whose, logits, state, depths)


def _check_natively(whose: str, logits: Tensor, state: Sequences, depths: int | Tensor) -> None:
    if not below_infinity(logits):
        raise _no_distribution(whose, logits, state, depths)


def _no_distribution(whose: str, logits: Tensor, state: Sequences, depths: int | Tensor) -> ValueError:
    largest = logits.amax(-1)
    slot, column = (largest.isnan() | (largest == torch.inf)).nonzero()[0].tolist()
    position = (state.lengths[:, None] + depths).expand_as(largest)[slot, column]
    where = f"position {int(position)} of sequence {int(state.member[slot])}"
    why = "; numbers that are too large for float16 need bfloat16 or float32" if logits.dtype == torch.float16 else ""
    return ValueError(f"the {whose}'s logits after {where} hold NaN or +inf{why}")
