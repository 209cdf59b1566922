"""Where the kernels' implementations run, and what several kernels' tests share."""

import pytest
import torch

from heavypath.kernels.native.library import library

needs_compiler = pytest.mark.skipif(
    library() is None or torch.cuda.is_available(), reason="needs a C++ compiler, and no GPU"
)
NATIVE = pytest.param("native", marks=needs_compiler)


def captured(function):
    """A CUDA graph of a call that never waits for the device, and what the call gave."""
    function()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        function()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = function()
    return graph, given


def parents_of(shape, nodes):
    """The parents of a tree of a shape."""
    node = torch.arange(nodes)
    above = {
        "random": (torch.rand(nodes) * node).long(),
        "young": node - 1 - (torch.rand(nodes) * node.clamp(max=4)).long(),
        "chain": node - 1,
        "star": torch.zeros_like(node),
        "binary": (node - 1) // 2,
    }[shape]
    return above.where(node > 0, -1)


def same(found, expected, within=3e-6) -> bool:
    """Whether the same tokens are drawn, with the same numbers but for rounding."""
    return torch.equal(found.tokens, expected.tokens) and all(
        torch.allclose(a, b, atol=within, rtol=within, equal_nan=True)
        for a, b in zip(found[1:], expected[1:], strict=True)
    )
