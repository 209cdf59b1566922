"""Helpers of tests/core/test_tree.py and its neighbours."""

from random import Random

import torch

from heavypath.speculative import TokenTree


def random_tree(nodes: int, seed: int) -> TokenTree:
    generator = torch.Generator().manual_seed(seed)
    return TokenTree([-1, *(int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, nodes))])


def shuffled_ranks(parents: list[int], seed: int) -> list[int]:
    """Random draw orders."""
    random, ranks = Random(seed), [0] * len(parents)
    for parent in range(len(parents)):
        children = [node for node, above in enumerate(parents) if above == parent]
        random.shuffle(children)
        for rank, child in enumerate(children):
            ranks[child] = rank
    return ranks


def trees(nodes: int) -> dict[str, TokenTree]:
    """Of every shape that matters, with siblings drawn in index order and in other orders."""
    parents = {
        "random": random_tree(nodes, nodes).parents.tolist(),
        "chain": list(range(-1, nodes - 1)),
        "star": [-1] + [0] * (nodes - 1),
        "caterpillar": [-1, *(max(0, node - 2 + node % 2) for node in range(1, nodes))],
    }
    drawn = {f"{shape}, shuffled": TokenTree(above, shuffled_ranks(above, 1)) for shape, above in parents.items()}
    return {shape: TokenTree(above) for shape, above in parents.items()} | drawn
