"""A static tree as the tensors that a step needs, on the device where it runs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from heavypath.kernels.trees.levels import Chosen
from heavypath.speculative.trees.tree import TokenTree


@dataclass(frozen=True)
class Level:
    """The n nodes of one depth that have children, and those m children.

    given:        the n nodes
    mask:         bool [n, N], which of the tree's nodes they see
    children:     LongTensor[m]
    most_children: of any of these nodes
    draws:        LongTensor[m]: child i is draw number `draws[i]` of the n * most_children that are made
    """

    given: Chosen
    mask: Tensor
    children: Tensor
    draws: Tensor
    most_children: int


@dataclass(frozen=True)
class DeviceTree:
    """The top levels of a static tree, N nodes in heavy-path order, on a device.

    every:         all nodes, with parents and depths
    ranks, subtree_end: LongTensor[N], as `TokenTree`'s
    whole_numbers: LongTensor[N], the nodes' numbers in the whole tree, which their noise rows are made of
    levels:        what is drafted at each depth, the root's children first
    """

    every: Chosen
    ranks: Tensor
    subtree_end: Tensor
    whole_numbers: Tensor
    levels: tuple[Level, ...]

    def __len__(self) -> int:
        return len(self.ranks)


def device_tree(whole: TokenTree, depth: int, device: torch.device) -> DeviceTree:
    """The top `depth` levels of a tree, on a device."""
    tree, whole_numbers = whole.truncated(depth)
    mask = tree.mask()
    levels = []
    for level in range(tree.depth):
        children = (tree.depths == level + 1).nonzero()[:, 0]
        nodes, parent = tree.parents[children].unique(return_inverse=True)
        rank = tree.ranks[children]
        most_children = int(rank.max()) + 1
        levels.append(
            Level(
                given=Chosen(nodes.to(device), tree.parents[nodes].to(device), tree.depths[nodes].to(device)),
                mask=mask[nodes].to(device),
                children=children.to(device),
                draws=(parent * most_children + rank).to(device),
                most_children=most_children,
            )
        )
    return DeviceTree(
        every=Chosen(torch.arange(len(tree), device=device), tree.parents.to(device), tree.depths.to(device)),
        ranks=tree.ranks.to(device),
        subtree_end=tree.subtree_end.to(device),
        whole_numbers=whole_numbers.to(device),
        levels=tuple(levels),
    )
