"""Draft a static tree's tokens level by level, one draft forward per level."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.tree_attention import attention_bias
from heavypath.speculative.llama import KeyValueCache, LlamaForward
from heavypath.speculative.methods import Method
from heavypath.speculative.tree import TokenTree


@dataclass(frozen=True)
class Level:
    """The nodes of one depth that have children, and those children.

    nodes:     LongTensor[n]
    ancestors: bool [n, N], which of the tree's nodes they see
    children:  LongTensor[m], parent: LongTensor[m] into nodes, rank: LongTensor[m]; width: the most children of one
    """

    nodes: Tensor
    ancestors: Tensor
    children: Tensor
    parent: Tensor
    rank: Tensor
    width: int


@dataclass(frozen=True)
class Shape:
    """A tree with what each step needs of it; `kept` are its nodes' numbers in the whole tree, which key their noise."""

    tree: TokenTree
    kept: Tensor
    mask: Tensor
    levels: tuple[Level, ...]


@lru_cache(maxsize=256)
def tree_shape(whole: TokenTree, depth: int, device: torch.device) -> Shape:
    """The top `depth` levels of a tree, on a device."""
    tree, kept = whole.truncated(depth)
    mask = tree.mask()
    levels = []
    for level in range(tree.depth):
        children = (tree.depths == level + 1).nonzero()[:, 0]
        nodes, parent = tree.parents[children].unique(return_inverse=True)
        rank = tree.ranks[children]
        on_device = (part.to(device) for part in (nodes, mask[nodes], children, parent, rank))
        levels.append(Level(*on_device, width=int(rank.max()) + 1))
    return Shape(tree, kept.to(device), mask.to(device), tuple(levels))


def draft_tree(
    draft: LlamaForward,
    cache: KeyValueCache,
    shape: Shape,
    root: Tensor,
    previous: Tensor,
    lengths: Tensor,
    rows: Tensor,
    method: Method,
    filters: Filters,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Tokens LongTensor[B, N], -1 where the draft's support ran out, and the draft's logits [B, N, V] after each node.

    root: LongTensor[B], the last committed token, not in the cache. previous: LongTensor[B], the token before it, whose
    cache row lengths - 1 is (re)written: it may have been an accepted leaf, which no draft forward has seen.
    lengths: LongTensor[B] tokens before the root. rows: LongTensor[B, N] noise rows. Leaves' logits are zeros.
    """
    batch, nodes = len(root), len(shape.tree)
    tokens = torch.full((batch, nodes), -1, device=root.device)
    tokens[:, 0] = root
    logits = torch.zeros(batch, nodes, draft.vocab_size, device=root.device)
    visible = int(lengths.max()) + nodes
    for depth, level in enumerate(shape.levels):
        inputs = tokens[:, level.nodes].clamp(min=0)
        positions = (lengths + depth)[:, None].expand_as(inputs)
        cache_rows = lengths[:, None] + level.nodes
        ancestors = level.ancestors
        if depth == 0:
            inputs = torch.stack([previous, root], 1)
            cache_rows = positions = lengths[:, None] + torch.tensor([-1, 0], device=root.device)
            ancestors = torch.cat([torch.zeros_like(ancestors), ancestors])
        bias = attention_bias(ancestors, lengths, visible, draft.dtype)
        after = draft(inputs, positions, cache_rows, cache, bias)[:, -len(level.nodes) :]
        drawn = gumbel_topk(
            after,
            level.width,
            **(filters._replace(temperature=0.0) if method.draw == "top_k" else filters)._asdict(),
            seed=seed,
            rows=rows[:, level.nodes],
            replacement=method.draw == "with_replacement" and filters.temperature > 0,
            uniform_fill=method.fill and filters.temperature > 0,
        )
        tokens[:, level.children] = drawn.tokens[:, level.parent, level.rank]
        logits[:, level.nodes] = after
    return tokens, logits
