"""Draft a static tree's tokens level by level, one draft forward per level."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.kernels.noise import Noise
from heavypath.kernels.sampling import draw_unchecked
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.decoding.snapshots import host_sees
from heavypath.speculative.drafts.drafts import Cache, Draft, Feed
from heavypath.speculative.trees.tree import TokenTree

Lap = Callable[[str], object]  # what a step calls at the end of a phase, with its name


class Drafted(NamedTuple):
    """Each sequence's tree of N nodes, in depth-first order; where all have one shape, it is [N] instead of [B, N].

    tokens:      LongTensor[B, N], -1 for an absent node
    parents, ranks, depths, subtree_end: LongTensor[N] or [B, N], as `TokenTree`'s
    rows:        LongTensor[B, N], the nodes' noise
    draft_rows:  LongTensor[B, N], the nodes' rows in the draft's cache behind the prefix; None for their numbers
    logits:      fp32 [B, N, V], the draft's after each node, which leaves need not have; None for a root alone
    """

    tokens: Tensor
    parents: Tensor
    ranks: Tensor
    depths: Tensor
    subtree_end: Tensor
    rows: Tensor
    draft_rows: Tensor | None
    logits: Tensor | None


@dataclass(frozen=True)
class Level:
    """The nodes of one depth that have children, and those children.

    nodes:    LongTensor[n]; above: LongTensor[n], their parents
    mask:     bool [n, N], which of the tree's nodes they see
    children: LongTensor[m]; width: the most of a node; draws: LongTensor[m], which of n * width draws each is
    """

    nodes: Tensor
    above: Tensor
    mask: Tensor
    children: Tensor
    draws: Tensor
    width: int


@dataclass(frozen=True)
class Shape:
    """What a step needs of a tree, on a device.

    parents, ranks, depths: as the tree's; kept: LongTensor[N], the nodes' numbers in the whole tree, which key their
    noise; subtree_end: LongTensor[N], as the tree's.
    """

    parents: Tensor
    ranks: Tensor
    depths: Tensor
    kept: Tensor
    subtree_end: Tensor
    levels: tuple[Level, ...]

    def __len__(self) -> int:
        return len(self.parents)


def tree_shape(whole: TokenTree, depth: int, device: torch.device) -> Shape:
    """The top `depth` levels of a tree, on a device."""
    tree, kept = whole.truncated(depth)
    mask = tree.mask()
    levels = []
    for level in range(tree.depth):
        children = (tree.depths == level + 1).nonzero()[:, 0]
        nodes, parent = tree.parents[children].unique(return_inverse=True)
        rank = tree.ranks[children]
        width = int(rank.max()) + 1
        levels.append(
            Level(
                nodes=nodes.to(device),
                above=tree.parents[nodes].to(device),
                mask=mask[nodes].to(device),
                children=children.to(device),
                draws=(parent * width + rank).to(device),
                width=width,
            )
        )
    return Shape(
        parents=tree.parents.to(device),
        ranks=tree.ranks.to(device),
        depths=tree.depths.to(device),
        kept=kept.to(device),
        subtree_end=tree.subtree_end.to(device),
        levels=tuple(levels),
    )


def root_alone(sequences: Sequences, rows: Tensor, shape: Shape) -> Drafted:
    """The tree of no drafts; rows: LongTensor[B, 1]."""
    fields = shape.parents, shape.ranks, shape.depths, shape.subtree_end
    return Drafted(sequences.root[:, None].clone(), *fields, rows, None, None)  # the state goes on


def draft_tree(
    draft: Draft,
    cache: Cache,
    shape: Shape,
    sequences: Sequences,
    visible: int,
    rows: Tensor,
    draw: str,
    fill: bool,
    filters: Filters,
    lap: Lap,
) -> Drafted:
    """A static tree, drafted.

    visible: cache rows that hold the longest prefix; rows: LongTensor[B, N], the nodes' noise; draw, fill: as
    `Method`'s. A node is absent where the draft's support ran out, or deeper than its sequence can still emit, whatever
    the rest of the batch drafts.
    """
    root, lengths = sequences.root, sequences.lengths
    tokens = torch.full((len(root), len(shape)), -1, device=root.device)
    tokens[:, 0] = root
    logits = None
    drawing = filters if draw != "top_k" else filters._replace(temperature=0.0)
    for depth, level in enumerate(shape.levels):
        if depth == 0:
            feed = root_feed(sequences, visible, len(shape))
        else:
            feed = Feed(
                tokens=tokens.index_select(1, level.nodes).clamp(min=0),
                positions=(lengths + depth)[:, None].expand(-1, len(level.nodes)),
                rows=lengths[:, None] + level.nodes,
                parent_rows=lengths[:, None] + level.above,
                lengths=lengths,
                visible_rows=visible + len(shape),
                ancestor_mask=level.mask,
            )
        after = draft(feed, cache)[:, -len(level.nodes) :]
        lap("draft")
        children = draw_unchecked(
            after.flatten(0, 1),
            level.width,
            filters=drawing,
            noise=Noise(sequences.seed, rows.index_select(1, level.nodes).flatten()),
            replacement=draw == "with_replacement" and drawing.temperature > 0,
            uniform_fill=fill and draft.smooth,
        )
        check_distributions("draft", children.keys.view(*after.shape[:2], -1), sequences, depth)
        tokens.index_copy_(1, level.children, children.tokens.view(len(root), -1).index_select(1, level.draws))
        if logits is None:
            logits = after.new_empty(*tokens.shape, after.shape[-1])
        logits.index_copy_(1, level.nodes, after)
        lap("sampling")
    return Drafted(
        tokens=tokens.where(shape.depths <= sequences.room[:, None], -1),
        parents=shape.parents,
        ranks=shape.ranks,
        depths=shape.depths,
        subtree_end=shape.subtree_end,
        rows=rows,
        draft_rows=None,
        logits=logits,
    )


def root_feed(sequences: Sequences, visible: int, nodes: int) -> Feed:
    """The root and the token before it, which may have been an accepted leaf that the draft has not seen.

    A text of one token has none before it: there it is the root itself, fed twice alike.
    nodes: of the tree, at least 2: as many as ask.
    """
    lengths = sequences.lengths
    rows = (lengths[:, None] + torch.arange(-1, 1, device=lengths.device)).clamp_(min=0)
    tree_rows = lengths[:, None] + torch.arange(nodes, device=lengths.device)
    return Feed(
        tokens=torch.stack([sequences.previous, sequences.root], 1),
        positions=rows,
        rows=rows,
        parent_rows=rows - 1,
        lengths=lengths,
        visible_rows=visible + nodes,
        ancestor_mask=rows[..., None] == tree_rows[:, None],
    )


def check_distributions(whose: str, logits: Tensor, sequences: Sequences, depths: int | Tensor) -> None:
    """ValueError for logits that are no distribution, where asking does not stop a GPU.

    logits: [B, n, any], or keys of draws by them, which are NaN then; depths: of the n nodes, an int, [n] or [B, n].
    """
    if not host_sees(logits.device) or logits.numpy().max() < torch.inf:  # which NaN is not
        return
    largest = logits.amax(-1)
    slot, row = (largest.isnan() | (largest == torch.inf)).nonzero()[0].tolist()
    position = (sequences.lengths[:, None] + depths).expand_as(largest)[slot, row]
    where = f"position {int(position)} of sequence {int(sequences.member[slot])}"
    raise ValueError(f"the {whose}'s logits after {where} hold NaN or +inf")
