"""How long trees take to make, to order and to measure: on the host, and on a GPU that has drafted them.

    python -m pytest bench/kernels/bench_ordering.py --benchmark-only [--benchmark-json FILE]

On the host, trees of 1,024 nodes: every round works on a tree that has computed nothing yet. The bar is 0.2 ms on one
core. On a GPU, heavy_path_order of trees that are in its memory already.
"""

from typing import NamedTuple

import pytest
import torch
from common import DEVICE

from heavypath.kernels.ordering import heavy_path_order
from heavypath.speculative import TokenTree
from heavypath.speculative.trees.blocks import occupied_blocks

SHAPES = ("random", "chain", "star")
WORK = {
    "breadth_first": lambda tree: tree.reordered("breadth_first"),
    "depth_first": lambda tree: tree.reordered("depth_first"),
    "heavy_path": lambda tree: tree.reordered("heavy_path"),
    "subtree_end": lambda tree: tree.subtree_end,
    "subtree_size": lambda tree: tree.subtree_size,
    "depths": lambda tree: tree.depths,
    "occupied_blocks": lambda tree: occupied_blocks(tree, 32),
    "mask": lambda tree: tree.mask(),
    "made from a list": lambda tree: TokenTree(tree.parents.tolist()),
    "made from a tensor": lambda tree: TokenTree(tree.parents),
}


class Case(NamedTuple):
    """Trees on a GPU; ranked: whether their children have ranks."""

    shape: str
    batch: int
    nodes: int
    ranked: bool

    def __str__(self) -> str:
        return f"{self.shape}, {self.batch} x {self.nodes}{', ranked' * self.ranked}"

    def runs_here(self) -> bool:
        return DEVICE == "cuda"


CASES = [
    Case(shape, batch, nodes, ranked)
    for batch, nodes in ((1, 64), (1, 256), (1, 1024), (1, 2048), (64, 256))
    for shape in SHAPES
    for ranked in (True, False)
]
MINIATURE = [Case("random", 2, 5, True)]
WAYS = {"heavypath": "auto", "PyTorch, eager": "torch"}


def parents_of(shape: str, nodes: int) -> torch.Tensor:
    """Parents [nodes] of a random recursive tree, of a chain, or of a root with all other nodes as its children."""
    node = torch.arange(nodes)
    uniform = torch.rand(nodes, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    above = {"random": (uniform * node).long(), "chain": node - 1, "star": torch.zeros_like(node)}[shape]
    return above.where(node > 0, -1)


def test_ordering(case, way, timed):
    tree = TokenTree(parents_of(case.shape, case.nodes))
    parents, ranks = (field.to(DEVICE).repeat(case.batch, 1) for field in (tree.parents, tree.ranks))

    def run():
        return heavy_path_order(parents, ranks if case.ranked else None, impl=WAYS[way])

    assert torch.equal(run().permutation.cpu(), tree.reordered("heavy_path")[1].expand(case.batch, -1))
    timed(run)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("work", WORK)
def test_trees_on_the_host(work, shape, benchmark, request):
    parents = parents_of(shape, 5 if request.config.getoption("--miniature") else 1024)
    ordered = TokenTree(parents).reordered("heavy_path")[0]
    benchmark.group = f"host: {shape}"
    rounds = 5 if request.config.getoption("--miniature") else 200
    benchmark.pedantic(WORK[work], setup=lambda: ((TokenTree(ordered.parents, ordered.ranks),), {}), rounds=rounds)
