"""Drafted trees, and the interfaces and helpers that static and growing drafters share."""

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
from heavypath.kernels.trees.levels import NodeInputs
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.drafts.draft import Draft, Feed
from heavypath.speculative.models.caches import RowCache
from heavypath.speculative.models.forward import host_can_read

Lap = Callable[[str], object]  # called with the name of a phase when it ends


def no_lap(phase: str) -> None:
    """A `Lap` that does nothing, if no one times the phases."""


class Reach(NamedTuple):
    """Upper bounds that the host knows without reading device tensors.

    visible_rows: at least the cache rows of the longest prefix
    news:         at most how many of a sequence's last tokens, the root included, are new since the last step
    trims:        whether absent nodes may be removed; not with several ranks, whose trees must have one size
    """

    visible_rows: int
    news: int
    trims: bool = True


class Drafted(NamedTuple):
    """Each sequence's drafted tree of N nodes, in depth-first order. Fields that all sequences share are [N].

    tokens:      LongTensor[B, N], -1 for an absent node
    parents, ranks, depths, subtree_end: LongTensor[N] or [B, N], of each node its parent's number, its index among
                 siblings in draw order, its depth, and the number after its last descendant, as in `TokenTree`
    inputs:      the nodes' tokens, positions, cache rows and noise rows
    draft_rows:  LongTensor[B, N], each node's row in the draft's cache, counted from the end of the prefix; None if it
                 is the node's number
    logits:      [B, N, V], the draft's after each node, undefined after leaves; None for trees of only a root. With D
                 drafts (`Merge`) [B, N + D - 1, V]: D - 1 more rows, the logits of drafts 2 .. D after the root
    """

    tokens: Tensor
    parents: Tensor
    ranks: Tensor
    depths: Tensor
    subtree_end: Tensor
    inputs: NodeInputs
    draft_rows: Tensor | None
    logits: Tensor | None

    @property
    def nodes(self) -> Nodes:
        """The nodes as a verification takes them: tokens, parents and ranks."""
        return Nodes(self.tokens, self.parents, self.ranks)

    @property
    def noise_rows(self) -> Tensor:
        """Each node's row of random numbers, LongTensor[B, N], as `sequences` numbers them."""
        return self.inputs.noise_rows

    @property
    def target_inputs(self) -> "TargetInputs":
        """The nodes as the target's pass takes them: tokens, positions, cache rows and the tree."""
        inputs = self.inputs
        return TargetInputs(inputs.tokens, inputs.positions, inputs.cache_rows, self.subtree_end)


class Shape(Protocol):
    """The trees that a method drafts: a static `TokenTree`, or a `Growth`. Hashable; len() is the most nodes of a tree.

    depth: levels; branching: the most children of a node; cache_rows: rows that a tree takes in a cache
    grows: whether the shape depends on the draft's probabilities
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
    """Drafts a tree of `depth` levels for each sequence."""

    @property
    def depth(self) -> int: ...  # noqa: D102

    def __call__(self, draft: Draft, cache: RowCache, state: Sequences, reach: Reach, lap: Lap) -> Drafted:
        """Draft a tree for each sequence. Nodes are absent if the draft proposes too few tokens, and beyond the length.

        cache: the draft's; state: the batch; reach: what the host knows of lengths
        lap: called with the name of each phase when it ends
        """
        ...


class TargetInputs(NamedTuple):
    """The nodes of a pass of the target: LongTensor[B, N] each; subtree_end may be [N], shared by all sequences.

    First come the drafted nodes, then those that a `LogitChange` adds, as more subtrees of the root.
    """

    tokens: Tensor
    positions: Tensor
    cache_rows: Tensor
    subtree_end: Tensor


def root_feed(state: Sequences, reach: Reach, nodes: int, levels: int) -> Feed:
    """Return the first feed of a step: the token before the root, and the root.

    The token before may have been an accepted leaf, which the draft has not read yet. A sequence of one token has none
    before the root: then both are the root.

    state: the batch; reach: bounds of its lengths
    nodes: columns of the mask, which are nodes of the tree; at least 2, since there are 2 queries
    levels: levels that are drafted in this step
    """
    kernels = step_kernels(state.root.device)
    first = kernels.first_nodes(state.previous, state.root, state.lengths, nodes)
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
    inputs: NodeInputs, state: Sequences, visible_rows: int, mask: Tensor, level: int, branches: Tensor | None = None
) -> Feed:
    """Return the feed of a level below the root.

    inputs: the level's nodes; mask: the feed's ancestor_mask; visible_rows, level, branches: as in `Feed`
    """
    return Feed(
        tokens=inputs.tokens,
        positions=inputs.positions,
        cache_rows=inputs.cache_rows,
        parent_rows=inputs.parent_rows,
        prefix_lengths=state.lengths,
        visible_rows=visible_rows,
        ancestor_mask=mask,
        level=level,
        branches=branches,
    )


def any_drafted(tokens: Tensor) -> bool:
    """Whether any of the drawn tokens is present, which means that it is at least 0; waits for the device."""
    return ask(lambda: bool((tokens >= 0).any()))


def check_distributions(whose: str, logits: Tensor, state: Sequences, depths: int | Tensor) -> None:
    """Raise ValueError for logits with NaN or +inf. Does nothing on a GPU, where it would have to synchronise.

    whose:  "draft" or "target", for the message
    logits: [B, n, any]; or keys of draws from them, which are NaN if the logits give no distribution
    depths: depths of the n nodes: an int, [n] or [B, n]
    """
    if not host_can_read(logits.device):
        return
    if logits.dtype == torch.float32 and logits.is_contiguous() and library() is not None:
        do(partial(_check_natively, whose, logits, state, depths))
        return
    refuse("check_distributions")  # a recording would not run the rest again
    if not logits.float().numpy().max() < torch.inf:  # true for NaN, too; NumPy has no bfloat16
        raise _no_distribution(whose, logits, state, depths)


def _check_natively(whose: str, logits: Tensor, state: Sequences, depths: int | Tensor) -> None:
    if not below_infinity(logits):
        raise _no_distribution(whose, logits, state, depths)


def _no_distribution(whose: str, logits: Tensor, state: Sequences, depths: int | Tensor) -> ValueError:
    largest = logits.amax(-1)  # [B, n]
    is_wrong = largest.isnan() | (largest == torch.inf)
    slot, column = is_wrong.nonzero()[0].tolist()
    positions = (state.lengths[:, None] + depths).expand_as(largest)
    position = int(positions[slot, column])
    member = int(state.member[slot])
    where = f"position {position} of sequence {member}"
    why = ""
    if logits.dtype == torch.float16:
        why = "; numbers that are too large for float16 need bfloat16 or float32"
    return ValueError(f"the {whose}'s logits after {where} hold NaN or +inf{why}")
