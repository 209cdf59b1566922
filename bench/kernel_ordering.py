"""How long trees take to make, to order and to measure: on the host, and on a GPU that has drafted them.

    OMP_NUM_THREADS=1 python bench/kernel_ordering.py [--json FILE]

On the host, trees of 1,024 nodes: every round works on a tree that has computed nothing yet. The bar is 0.2 ms on one
core. On a GPU, heavy_path_order of trees that are in its memory already: "us" is an eager launch and the wait for it,
"kernel" the median of triton.testing.do_bench, which empties the L2 cache before every run. The quartiles are those of
the rounds.
"""

from collections.abc import Iterator
from itertools import chain

import torch
from common import DEVICE, argument_parser, environment
from rich.console import Console
from rich.table import Table
from timing import gpu_milliseconds, kept, microseconds

from heavypath.kernels.ordering import heavy_path_order
from heavypath.speculative import TokenTree

SHAPES = ("random", "chain", "star")
NODES = 1024
ON_A_GPU = ((1, 64), (1, 256), (1, 1024), (1, 2048), (64, 256))  # batch and nodes
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
    """Parents [nodes] of a random recursive tree, of a chain, or of a root with all other nodes as its children."""
    node = torch.arange(nodes)
    uniform = torch.rand(nodes, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    above = {"random": (uniform * node).long(), "chain": node - 1, "star": torch.zeros_like(node)}[shape]
    return above.where(node > 0, -1)


def on_the_host(nodes: int = NODES) -> Iterator[dict]:
    for shape in SHAPES:
        parents = parents_of(shape, nodes)
        for given, values in (("a list", parents.tolist()), ("a tensor", parents)):
            yield {"case": f"{shape}: made from {given}"} | microseconds(TokenTree, lambda values=values: (values,))
        ordered = TokenTree(parents).reordered("heavy_path")[0]
        for name, work in WORK.items():
            fresh = lambda tree=ordered: (TokenTree(tree.parents, tree.ranks),)  # noqa: E731
            yield {"case": f"{shape}: {name}"} | microseconds(work, fresh)


def cases(miniature: bool) -> list[tuple[int, bool]]:
    """Nodes, and whether the children have ranks: what differs in what is compiled."""
    return (
        [(5, True)] if miniature else [(nodes, ranked) for nodes in (64, 256, 1024, 2048) for ranked in (True, False)]
    )


def warm_up(case: tuple[int, bool]) -> None:
    """Compile the kernel for a case."""
    nodes, ranked = case
    parents = parents_of("chain", nodes).to(DEVICE)
    heavy_path_order(parents, torch.zeros_like(parents) if ranked else None)


def on_a_gpu(shapes: tuple[tuple[int, int], ...] = ON_A_GPU) -> Iterator[dict]:
    for impl in ("triton", "torch"):
        for batch, nodes in shapes:
            for shape in SHAPES:
                tree = TokenTree(parents_of(shape, nodes))
                expected = tree.reordered("heavy_path")[1].expand(batch, nodes)
                parents, ranks = (field.cuda().repeat(batch, 1) for field in (tree.parents, tree.ranks))
                for given in (ranks, None):
                    ranked = "" if given is None else ", ranked"
                    yield {"case": f"{impl}: {shape}, {batch} x {nodes}{ranked}"} | timed(
                        parents, given, impl, expected
                    )


def timed(parents: torch.Tensor, ranks: torch.Tensor | None, impl: str, expected: torch.Tensor) -> dict:
    """The times of heavy_path_order on a GPU, whose permutation must be the expected one."""

    def launch():
        return heavy_path_order(parents, ranks, impl=impl)

    def launch_and_wait():
        launch()
        torch.cuda.synchronize()

    assert torch.equal(launch().permutation.cpu(), expected)
    return microseconds(launch_and_wait) | {"kernel_microseconds": 1e3 * gpu_milliseconds(launch)}


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    torch.set_num_threads(arguments.threads)
    on_host, shapes = (on_the_host(5), ((2, 5),)) if arguments.miniature else (on_the_host(), ON_A_GPU)
    rows = kept(chain(on_a_gpu(shapes) if DEVICE == "cuda" else (), on_host), environment(), arguments)
    table = Table("case", "us", "quartiles", "rounds", "kernel, us", box=None, pad_edge=False)
    for row in rows:
        low, high = row["quartiles"]
        kernel = f"{row['kernel_microseconds']:.1f}" if "kernel_microseconds" in row else ""
        table.add_row(row["case"], f"{row['microseconds']:.1f}", f"{low:.1f} - {high:.1f}", str(row["rounds"]), kernel)
    Console(highlight=False, width=120).print(table)


if __name__ == "__main__":
    main()
