"""A static tree as the tensors that a step needs, on the device where it runs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from heavypath.kernels.trees.levels import CommonNodes
from heavypath.speculative.trees.tree import TokenTree


@dataclass(frozen=True)
class TreeLevel:
    """The n nodes of one depth that have children, and those m children.

    given:        the n nodes
    mask:         bool [n, N], which of the tree's nodes they see
    rows:         LongTensor[l], where the distributions that are drawn from go among the tree's: one after each of the
                  n nodes, but D after the root
    branches:     LongTensor[n], see `Feed`
    children:     LongTensor[m]
    most_children: that any of these distributions has
    draws:        LongTensor[m]: child i is draw number `draws[i]` of the l * most_children that are made
    """

    given: CommonNodes
    mask: Tensor
    rows: Tensor
    branches: Tensor
    children: Tensor
    draws: Tensor
    most_children: int


@dataclass(frozen=True)
class DeviceTree:
    """The top levels of a static tree, N nodes in heavy-path order, on a device.

    every:         all nodes, with parents and depths
    ranks, subtree_end: LongTensor[N], as `TokenTree`'s
    whole_numbers: LongTensor[N + D - 1], the nodes' numbers in the whole tree, which their noise rows are made of. For
                   the others of a draft's D distributions after the root D - 1 larger numbers follow
    row_depths:    LongTensor[N + D - 1], the depths of the nodes and, 0, of the root for the others
    levels:        what is drafted at each depth, the root's children first
    """

    every: CommonNodes
    ranks: Tensor
    subtree_end: Tensor
    whole_numbers: Tensor
    row_depths: Tensor
    levels: tuple[TreeLevel, ...]

    def __len__(self) -> int:
        return len(self.ranks)


def device_tree(whole: TokenTree, depth: int, device: torch.device, laws: int = 1) -> DeviceTree:
    """The top `depth` levels of a tree, on a device. Child j of the root is drawn from distribution j mod `laws`."""
    tree, whole_numbers = whole.truncated(depth)
    mask, size, levels = tree.mask(), len(tree), []
    further = size + torch.arange(laws - 1 if tree.depth else 0, device="cpu")
    branches = ((mask & (tree.depths == 1)) * tree.ranks).sum(1)
    for level in range(tree.depth):
        children = (tree.depths == level + 1).nonzero()[:, 0]
        nodes, parent = tree.parents[children].unique(return_inverse=True)
        rows, law, draw = nodes, parent, tree.ranks[children]
        if level == 0:
            rows, law, draw = torch.cat([nodes, further]), draw % laws, draw // laws
        most_children = int(draw.max()) + 1
        levels.append(
            TreeLevel(
                given=CommonNodes(nodes.to(device), tree.parents[nodes].to(device), tree.depths[nodes].to(device)),
                mask=mask[nodes].to(device),
                rows=rows.to(device),
                branches=branches[nodes].to(device),
                children=children.to(device),
                draws=(law * most_children + draw).to(device),
                most_children=most_children,
            )
        )
    return DeviceTree(
        every=CommonNodes(torch.arange(size, device=device), tree.parents.to(device), tree.depths.to(device)),
        ranks=tree.ranks.to(device),
        subtree_end=tree.subtree_end.to(device),
        whole_numbers=torch.cat([whole_numbers, further - size + len(whole)]).to(device),
        row_depths=torch.cat([tree.depths, 0 * further]).to(device),
        levels=tuple(levels),
    )
