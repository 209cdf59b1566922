"""Helpers of tests/kernels/test_ordering.py and its neighbours."""

import torch

from heavypath.kernels.ordering import Ordering


def assert_same(got, expected):
    for name, value, wanted in zip(Ordering._fields, got, expected, strict=True):
        assert value.dtype == torch.long
        assert value.tolist() == wanted.tolist(), name


def parents_of(shape, nodes):
    node = torch.arange(nodes)
    above = {
        "random": (torch.rand(nodes) * node).long(),
        "young": node - 1 - (torch.rand(nodes) * node.clamp(max=4)).long(),
        "chain": node - 1,
        "star": torch.zeros_like(node),
        "binary": (node - 1) // 2,
    }[shape]
    return above.where(node > 0, -1)


def shuffled_ranks(parents):
    """Random draw orders."""
    ranks = torch.zeros_like(parents)
    for parent in parents.unique():
        children = (parents == parent).nonzero()[:, 0]
        ranks[children] = torch.randperm(len(children))
    return ranks
