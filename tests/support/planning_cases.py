"""Helpers of tests/options/test_planning.py and its neighbours."""

import math
from functools import cache

import torch

from heavypath.speculative import TokenTree


@cache
def every_tree(size: int) -> list[TokenTree]:
    """All ordered trees of `size` nodes."""

    def grow(parents):
        if len(parents) == size:
            yield parents
            return
        # In preorder the next node hangs below the last one or one of its ancestors.
        node = len(parents) - 1
        while node >= 0:
            yield from grow([*parents, node])
            node = parents[node]

    return [TokenTree(parents) for parents in grow([-1])]


@cache
def paths_of(tree: TokenTree) -> list[tuple[int, ...]]:
    """The child indices that lead to each node."""
    paths = [()]
    for parent, rank in list(zip(tree.parents.tolist(), tree.ranks.tolist(), strict=True))[1:]:
        paths.append((*paths[parent], rank))
    return paths


def yielded(tree: TokenTree, acceptance) -> float:
    """expected_tokens, a path at a time."""
    rows = None if callable(acceptance) else torch.as_tensor(acceptance).tolist()

    def rate(path):
        row = acceptance(path[:-1]) if rows is None else rows[len(path) - 1] if isinstance(rows[0], list) else rows
        return row[path[-1]]

    return sum(math.prod(rate(path[:end]) for end in range(1, len(path) + 1)) for path in paths_of(tree))


def random_rates(*shape: int, seed: int, falling: bool = False, zeros: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.rand(shape, generator=generator, dtype=torch.float64)
    raw = raw * (torch.rand(shape, generator=generator) >= zeros)
    raw = raw / raw.sum(-1, keepdim=True).clamp(min=1e-9) * torch.rand(shape[:-1], generator=generator)[..., None]
    return raw.sort(-1, descending=True).values if falling else raw
