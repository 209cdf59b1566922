"""Inputs of a model's passes over a tree: the step's first two nodes, then each drawn level, then all nodes.

A node i of a tree whose prefix has `length` tokens has the inputs

    token[i], or 0 if it is absent        position = length + depth[i]
    cache row = length + i                parent's row = length + parent[i]         noise row, which is given

In PyTorch operations this is a dozen launches a level on a few numbers each. The kernels are in `levels_kernel`.

If siblings are independent draws, two of them may have the same token, and then the same path of tokens. The logits
after both must be equal, because verification treats the children of both as draws from one distribution. So with

    text[i]    the first node of the level whose path from the root has the same tokens as node i's

`alike` returns for each node of a level the node whose logits to use.
"""

# pyright: reportArgumentType=false, reportReturnType=false

from typing import NamedTuple

import torch
from torch import Tensor

from heavypath.kernels.implementation import check_rows, choose_impl, operator
from heavypath.kernels.step_kernels import copy_rows, kernels_by


class NodeInputs(NamedTuple):
    """n nodes of each sequence as input of a forward pass and of a draw after it; LongTensor[B, n] each.

    tokens:      0 for an absent node
    positions:   in the sequence
    cache_rows:  the cache row of each node
    parent_rows: the cache row of each node's parent; for the root it is undefined if all nodes are given
    noise_rows:  the noise row of each node, from which its random numbers come
    """

    tokens: Tensor
    positions: Tensor
    cache_rows: Tensor
    parent_rows: Tensor
    noise_rows: Tensor

    @classmethod
    def of(
        cls, lengths: Tensor, tokens: Tensor, depths: Tensor, nodes: Tensor, parents: Tensor, noise_rows: Tensor
    ) -> "NodeInputs":
        """Compute the formula at the top; lengths LongTensor[B], tokens and noise_rows [B, n], others [B, n] or [n]."""
        before = lengths[:, None]
        return cls(tokens.clamp(min=0), before + depths, before + nodes, before + parents, noise_rows)


class First(NamedTuple):
    """A step's first two nodes: the token before the root, and the root.

    tokens, cache_rows, parent_rows: LongTensor[B, 2]; cache rows equal positions; a parent's row may be -1
    ancestor_mask: bool [B, 2, M], which of the tree's first M nodes they see
    """

    tokens: Tensor
    cache_rows: Tensor
    parent_rows: Tensor
    ancestor_mask: Tensor


class CommonNodes(NamedTuple):
    """n nodes of trees that all have one shape; LongTensor[n] each: node numbers, parents and depths."""

    nodes: Tensor
    parents: Tensor
    depths: Tensor


class Scored(NamedTuple):
    """Logits after some of a tree's nodes, to be stored among those of all nodes.

    logits, of_trees: [B, n, V] and [B, N, V] of one dtype; of_trees is written in place
    rows: LongTensor[n]: the logits i are stored in row rows[i]
    """

    logits: Tensor
    of_trees: Tensor
    rows: Tensor


class Drawn(NamedTuple):
    """The draws for a level: node children[i] of a tree gets token draws[i] of that tree's D tokens.

    tokens:   LongTensor[B, D]
    children: LongTensor[m]
    draws:    LongTensor[m]
    scored:   the logits from which the tokens were drawn, to be stored; None to store none
    """

    tokens: Tensor
    children: Tensor
    draws: Tensor
    scored: Scored | None = None


class Trees(NamedTuple):
    """Trees of N nodes, all of one shape, while they are drafted.

    tokens:     LongTensor[B, N], of the nodes placed so far; -1 for an absent node
    roots:      LongTensor[B], the tokens of the roots, which are placed first
    noise_rows: LongTensor[B, N]
    lengths:    LongTensor[B], tokens before the root
    left:       LongTensor[B], tokens that a sequence may still write; at depth `left` and deeper all nodes are absent
    texts:      LongTensor[B, N], text[i] of the formula at the top, filled level by level; None if siblings differ
    """

    tokens: Tensor
    roots: Tensor
    noise_rows: Tensor
    lengths: Tensor
    left: Tensor
    texts: Tensor | None


def first_nodes(previous: Tensor, root: Tensor, lengths: Tensor, nodes: int) -> First:
    """Return a step's first two nodes. All LongTensor[B]: the token before the root, the root, and its cache row.

    A sequence of one token has none before the root: then both nodes are the root.

    nodes: columns of the mask
    """
    cache_rows = (lengths[:, None] + torch.arange(-1, 1, device=lengths.device)).clamp_(min=0)
    tree_rows = lengths[:, None] + torch.arange(nodes, device=lengths.device)
    return First(
        tokens=torch.stack([previous, root], 1),
        cache_rows=cache_rows,
        parent_rows=cache_rows - 1,
        ancestor_mask=cache_rows[..., None] == tree_rows[:, None],
    )


@operator
def place(
    trees: Trees, drawn: Drawn | None, given: CommonNodes, *, whole: bool = False, impl: str = "auto"
) -> NodeInputs:
    """Write drawn tokens into trees.tokens, in place, and gather the nodes of the model's next pass.

    drawn: None for trees of only the root
    given: the nodes of the next pass: those of one depth, or all nodes
    whole: whether they are all nodes; then those too deep for their sequence become absent
    impl:  see `implementation`; "triton" is one launch. Only the device is checked, and that tensors which are changed
           have contiguous rows, unless impl is "torch"
    """
    impl = choose_impl("place", impl, trees.tokens, native=True)
    check_rows(impl, {"trees.tokens": trees.tokens})
    if drawn is not None and drawn.scored is not None:
        check_rows(impl, {"of_trees": drawn.scored.of_trees})
    return kernels_by(impl).place(trees, drawn, given, whole)


def alike(trees: Trees, given: CommonNodes) -> Tensor:
    """For each node of a level return the index in the level of the first node with the same path: LongTensor[B, n].

    Extends trees.texts to the level, in place.
    """
    assert trees.texts is not None
    above = trees.texts.index_select(1, given.parents)
    token = trees.tokens.index_select(1, given.nodes)
    same = (above[:, :, None] == above[:, None]) & (token[:, :, None] == token[:, None])  # [B, n, n]
    first = same.int().argmax(-1)
    trees.texts.index_copy_(1, given.nodes, given.nodes[first])
    return first


def place_by_torch(trees: Trees, drawn: Drawn | None, given: CommonNodes, whole: bool) -> NodeInputs:
    """Compute `place` in PyTorch."""
    tokens = trees.tokens
    tokens[:, 0] = trees.roots
    if drawn is not None:
        if drawn.scored is not None:
            copy_rows(drawn.scored.logits, drawn.scored.of_trees, drawn.scored.rows)
        tokens.index_copy_(1, drawn.children, drawn.tokens.index_select(1, drawn.draws))
    if whole:
        absent = given.depths > (trees.left[:, None] - 1).clamp(min=0)
        here = tokens.masked_fill_(absent, -1)
        noise_rows = trees.noise_rows
    else:
        here = tokens.index_select(1, given.nodes)
        noise_rows = trees.noise_rows.index_select(1, given.nodes)
    return NodeInputs.of(trees.lengths, here, given.depths, given.nodes, given.parents, noise_rows)
