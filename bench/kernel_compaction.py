"""How long it takes to move the accepted rows of a cache of 32 layers together.

    OMP_NUM_THREADS=1 python -m pytest bench/kernel_compaction.py -o addopts= --benchmark-columns=median,iqr,rounds

bf16, heads of 128, paths of up to 16; `accepted` nodes of a tree of 64 move, and none is in place. On a GPU the table
times an eager launch and the wait for it. extra_info in --benchmark-json has the time on the device, the median of
triton.testing.do_bench, which empties the L2 cache before every run: of a CUDA graph for the kernel, as in a decoder,
and of eager PyTorch, which waits for the host and cannot be captured. It also has the bytes that must move, each read
once and written once, and their quotient. On a CPU there is only PyTorch, with 2 layers.
"""

import pytest
import torch
import triton

from heavypath.kernels.cache_compaction import compact_cache

HEAD_DIM, ROWS, NODES, PLACES = 128, 576, 64, 17


def problem(layers: int, heads: int, batch: int, accepted: int, device: str) -> tuple[list[torch.Tensor], ...]:
    """Keys, values and (path, length, prefix_length)."""
    keys, values = (
        [torch.zeros(batch, heads, ROWS, HEAD_DIM, dtype=torch.bfloat16, device=device) for _ in range(layers)]
        for _ in range(2)
    )
    generator = torch.Generator().manual_seed(0)
    path = torch.full((batch, PLACES), -1)
    for row in path:
        row[0] = 0
        row[1 : accepted + 1] = torch.randperm(NODES - 2, generator=generator)[:accepted].sort().values + 2
    length = torch.full((batch,), accepted)
    prefix_length = torch.randint(0, ROWS - NODES, (batch,), generator=generator)
    return keys, values, [tensor.to(device) for tensor in (path, length, prefix_length)]


@pytest.mark.parametrize("accepted", [1, 4, 16])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("heads", [8, 32])
def test_host(benchmark, heads, batch, accepted):
    keys, values, where = problem(2, heads, batch, accepted, "cpu")
    benchmark(compact_cache, keys, values, *where, impl="torch")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("accepted", [1, 4, 16])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("heads", [8, 32])
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_device(benchmark, heads, batch, accepted, impl):
    keys, values, where = problem(32, heads, batch, accepted, "cuda")

    def launch():
        compact_cache(keys, values, *where, impl=impl)

    def launch_and_wait():
        launch()
        torch.cuda.synchronize()

    benchmark(launch_and_wait)
    timed = launch
    if impl == "triton":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        timed = graph.replay
    seconds = triton.testing.do_bench(timed, return_mode="median") / 1000
    moved = 2 * batch * accepted * sum(2 * heads * HEAD_DIM * key.element_size() for key in keys)
    benchmark.extra_info |= {
        "device_microseconds": 1e6 * seconds,
        "bytes": moved,
        "gigabytes_per_second": moved / seconds / 1e9,
    }
