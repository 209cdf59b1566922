"""Draft a static tree's tokens level by level, one draft forward per level."""

from dataclasses import dataclass

import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.tree_attention import prepared_attention
from heavypath.speculative.llama import KeyValueCache, LlamaForward
from heavypath.speculative.methods import Method
from heavypath.speculative.sequences import Sequences
from heavypath.speculative.tree import TokenTree


@dataclass(frozen=True)
class Level:
    """The nodes of one depth that have children, and those children.

    nodes:    LongTensor[n]
    mask:     bool [n, N], which of the tree's nodes they see; at depth 0 the token before the root has a row of its
              own, the first
    children: LongTensor[m]; parent: LongTensor[m] into nodes; rank: LongTensor[m]; width: the most children of a node
    """

    nodes: Tensor
    mask: Tensor
    children: Tensor
    parent: Tensor
    rank: Tensor
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
        sees = mask[nodes] if level else torch.cat([torch.zeros_like(mask[:1]), mask[:1]])
        levels.append(
            Level(
                nodes=nodes.to(device),
                mask=sees.to(device),
                children=children.to(device),
                parent=parent.to(device),
                rank=rank.to(device),
                width=int(rank.max()) + 1,
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


def draft_tree(
    draft: LlamaForward,
    cache: KeyValueCache,
    shape: Shape,
    sequences: Sequences,
    visible_rows: int,
    rows: Tensor,
    method: Method,
    filters: Filters,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Tokens LongTensor[B, N], -1 for an absent node, and draft logits [B, N, V] after each node, zeros for leaves.

    A node is absent where the draft's support ran out, or deeper than its sequence can still emit, whatever the rest of
    the batch drafts. visible_rows: cache rows that hold the longest prefix and its tree. rows: LongTensor[B, N], noise
    rows.

    The token before the root is fed along with it: it may have been an accepted leaf, which no draft forward has seen.
    """
    root, lengths = sequences.root, sequences.lengths
    batch, nodes = len(root), len(shape)
    tokens = torch.full((batch, nodes), -1, device=root.device)
    tokens[:, 0] = root
    logits = torch.zeros(batch, nodes, draft.vocab_size, device=root.device)
    likeliest = method.draw == "top_k" or filters.temperature == 0
    drawing = (filters._replace(temperature=0.0) if likeliest else filters)._asdict()
    for depth, level in enumerate(shape.levels):
        if depth == 0:
            inputs = torch.stack([sequences.previous, root], 1)
            positions = cache_rows = torch.stack([lengths - 1, lengths], 1)
        else:
            inputs = tokens[:, level.nodes].clamp(min=0)
            positions = (lengths + depth)[:, None].expand_as(inputs)
            cache_rows = lengths[:, None] + level.nodes
        attend = prepared_attention(
            prefix_length=lengths, rows=visible_rows, dtype=draft.dtype, ancestor_mask=level.mask
        )
        after = draft(inputs, positions, cache_rows, cache, attend)[:, -len(level.nodes) :]
        drawn = gumbel_topk(
            after,
            level.width,
            **drawing,
            seed=seed,
            rows=rows[:, level.nodes],
            replacement=method.draw == "with_replacement" and not likeliest,
            uniform_fill=method.fill and not likeliest,
        )
        tokens[:, level.children] = drawn.tokens[:, level.parent, level.rank]
        logits[:, level.nodes] = after
    return tokens.where(shape.depths <= sequences.room[:, None], -1), logits
