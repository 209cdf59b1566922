"""Helpers of tests/kernels/test_tree_attention.py and its neighbours."""

import math

import torch
import tree_cases
from devices import DEVICE

from heavypath.kernels.attention.masks import pack_ancestors
from heavypath.speculative.trees.tree import TokenTree


def oracle(query, key, value, lengths, mask, scale=None, softcap=None, window=None, first_row=None, depths=None):
    """[B, Hq, Q, D] in fp64; mask bool [B, Q, N]; depths [N], where not all nodes ask. What sees nothing is zero."""
    queries, head_dim = query.shape[2:]
    nodes, group = mask.shape[-1], query.shape[1] // key.shape[1]
    outs = []
    for b, length in enumerate(int(length) for length in lengths):
        visible = torch.cat([mask.new_ones(queries, length), mask[b]], 1)
        if first_row is not None:
            visible[:, : first_row[b]] = False
        if window is not None:
            own = mask[b].sum(-1) - 1
            below = length + (own if depths is None else depths)
            position = torch.cat([torch.arange(length, device=mask.device), below])
            visible &= (length + own)[:, None] - position < window
        rows = visible.any(0)  # what nobody sees may hold anything
        keys, values = (x[b, :, : length + nodes][:, rows].double().repeat_interleave(group, 0) for x in (key, value))
        scores = query[b].double() @ keys.mT * (head_dim**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~visible[:, rows], -math.inf).softmax(-1)
        outs.append((weights @ values).masked_fill(~visible.any(1)[:, None], 0))
    return torch.stack(outs)


def random_tree(nodes: int, seed: int = 0, order: str = "heavy_path") -> TokenTree:
    return tree_cases.random_tree(nodes, seed).reordered(order)[0]


def inputs(batch, heads, kv_heads, nodes, rows, head_dim, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads, nodes, head_dim, generator=generator)
    key, value = torch.randn(2, batch, kv_heads, rows, head_dim, generator=generator)
    return query.to(DEVICE, dtype), key.to(DEVICE, dtype), value.to(DEVICE, dtype)


def masks(tree_or_trees):
    """The ways to say what the nodes of one tree for all, or of a tree for each sequence, see."""
    if isinstance(tree_or_trees, TokenTree):
        mask = tree_or_trees.mask().to(DEVICE)
        ends = tree_or_trees.subtree_end.to(DEVICE) if tree_or_trees.is_depth_first else mask.new_empty(0)
    else:
        ends = torch.stack([tree.subtree_end for tree in tree_or_trees]).to(DEVICE)
        mask = torch.stack([tree.mask() for tree in tree_or_trees]).to(DEVICE)
    return [
        {"subtree_end": ends},
        {"subtree_end": ends.int()},
        {"ancestor_mask": mask},
        {"ancestor_mask": pack_ancestors(mask)},
    ]
