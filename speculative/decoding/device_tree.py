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
    laws:         LongTensor[l], where the distributions that are drawn from go among the tree's: one after each of the
                  n nodes, but after the root one of each of several drafts
    picked:       LongTensor[l], where these are among what several drafts say of the n nodes, one draft after the
                  other; None for one draft, whose distributions they all are
    children:     LongTensor[m]
    most_children: that any of these distributions has
    draws:        LongTensor[m]: child i is draw number `draws[i]` of the l * most_children that are made
    """

    given: CommonNodes
    mask: Tensor
    laws: Tensor
    picked: Tensor | None
    children: Tensor
    draws: Tensor
    most_children: int


@dataclass(frozen=True)
class DeviceTree:
    """The top levels of a static tree, N nodes in heavy-path order, on a device.

    every:         all nodes, with parents and depths
    ranks, subtree_end: LongTensor[N], as `TokenTree`'s
    whole_numbers: LongTensor[M], the nodes' numbers in the whole tree, which their noise rows are made of. Where D
                   drafts draft a tree, M - N = D - 1 numbers follow, above all of these, for the distributions after
                   the root of all drafts but the first
    levels:        what is drafted at each depth, the root's children first
    laws:          LongTensor[N], which of the M distributions each node is drawn from; None for a single draft, where
                   it is the one after its parent
    """

    every: CommonNodes
    ranks: Tensor
    subtree_end: Tensor
    whole_numbers: Tensor
    levels: tuple[TreeLevel, ...]
    laws: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ranks)


def device_tree(whole: TokenTree, depth: int, device: torch.device, drafts: int = 1) -> DeviceTree:
    """The top `depth` levels of a tree, on a device.

    Of several drafts, child j of the root is drawn by draft j mod `drafts`, as are all nodes below it.
    """
    tree, whole_numbers = whole.truncated(depth)
    mask, size, levels = tree.mask(), len(tree), []
    further = drafts - 1 if tree.depth else 0
    draft = ((mask & (tree.depths == 1)) * (tree.ranks % drafts)).sum(1)  # that of the root's child above each node
    for level in range(tree.depth):
        children = (tree.depths == level + 1).nonzero()[:, 0]
        nodes, parent = tree.parents[children].unique(return_inverse=True)
        laws, law, draw = nodes, parent, tree.ranks[children]
        picked = draft[nodes] * len(nodes) + torch.arange(len(nodes), device="cpu")
        if level == 0:
            laws = torch.cat([nodes, size + torch.arange(further, device="cpu")])
            law, draw, picked = draw % drafts, draw // drafts, torch.arange(drafts, device="cpu")
        most_children = int(draw.max()) + 1
        levels.append(
            TreeLevel(
                given=CommonNodes(nodes.to(device), tree.parents[nodes].to(device), tree.depths[nodes].to(device)),
                mask=mask[nodes].to(device),
                laws=laws.to(device),
                picked=picked.to(device) if further else None,
                children=children.to(device),
                draws=(law * most_children + draw).to(device),
                most_children=most_children,
            )
        )
    laws = tree.parents.where((tree.depths != 1) | (draft == 0), size - 1 + draft).clamp(min=0)
    return DeviceTree(
        every=CommonNodes(torch.arange(size, device=device), tree.parents.to(device), tree.depths.to(device)),
        ranks=tree.ranks.to(device),
        subtree_end=tree.subtree_end.to(device),
        whole_numbers=torch.cat([whole_numbers, len(whole) + torch.arange(further, device="cpu")]).to(device),
        levels=tuple(levels),
        laws=laws.to(device) if further else None,
    )
