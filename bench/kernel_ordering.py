"""How long trees take to make, order and measure: on the host, and on a GPU that has drafted them.

    OMP_NUM_THREADS=1 python -m pytest bench/kernel_ordering.py -o addopts= --benchmark-columns=median,iqr,rounds

Every round on the host works on a tree that has computed nothing yet. The bar is 0.2 ms for 1,024 nodes on one core.
On a GPU the table times a launch and the wait for it; extra_info in --benchmark-json has the kernel's own time, the
median of triton.testing.do_bench, which empties the L2 cache before every run.
"""

import pytest
import torch
import triton

from heavypath.kernels.ordering import heavy_path_order
from heavypath.speculative import TokenTree

SHAPES = pytest.mark.parametrize("shape", ["random", "chain", "star"])
WORK = {
    "breadth_first": lambda tree: tree.reordered("breadth_first"),
    "depth_first": lambda tree: tree.reordered("depth_first"),
    "heavy_path": lambda tree: tree.reordered("heavy_path"),
    "subtree_end": lambda tree: tree.subtree_end,
    "subtree_size": lambda tree: tree.subtree_size,
    "depths": lambda tree: tree.depths,
    "occupied_blocks": lambda tree: tree.occupied_blocks(32),
    "mask": lambda tree: tree.mask(),
}


def parents_of(shape: str, nodes: int) -> torch.Tensor:
    node = torch.arange(nodes)
    uniform = torch.rand(nodes, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    above = {"random": (uniform * node).long(), "chain": node - 1, "star": torch.zeros_like(node)}[shape]
    return above.where(node > 0, -1)


@SHAPES
@pytest.mark.parametrize("given", ["list", "tensor"])
def test_constructor(benchmark, shape, given):
    parents = parents_of(shape, 1024)
    benchmark(TokenTree, parents.tolist() if given == "list" else parents)


@SHAPES
@pytest.mark.parametrize("work", WORK)
def test_host(benchmark, shape, work):
    tree = TokenTree(parents_of(shape, 1024)).reordered("heavy_path")[0]
    parents, ranks = tree.parents, tree.ranks
    benchmark.pedantic(WORK[work], setup=lambda: ((TokenTree(parents, ranks),), {}), rounds=500, warmup_rounds=20)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@SHAPES
@pytest.mark.parametrize("ranked", [True, False], ids=["ranks", "no ranks"])
@pytest.mark.parametrize(("batch", "nodes"), [(1, 64), (1, 256), (1, 1024), (1, 2048), (64, 256)])
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_device(benchmark, shape, ranked, batch, nodes, impl):
    tree = TokenTree(parents_of(shape, nodes))
    parents, ranks = (field.cuda().repeat(batch, 1) for field in (tree.parents, tree.ranks))

    def launch():
        return heavy_path_order(parents, ranks if ranked else None, impl=impl)

    def launch_and_wait():
        launch()
        torch.cuda.synchronize()

    expected = tree.reordered("heavy_path")[1]
    assert torch.equal(launch().permutation.cpu(), expected.expand(batch, nodes))
    benchmark(launch_and_wait)
    benchmark.extra_info["kernel_microseconds"] = 1000 * triton.testing.do_bench(launch, return_mode="median")
