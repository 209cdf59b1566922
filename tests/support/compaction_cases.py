"""Helpers of tests/kernels/test_cache_compaction.py and its neighbours."""

import torch

from heavypath.kernels.cache_compaction import compact_cache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def assert_same_bits(got, expected):
    assert torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def on_device(*values):
    return [torch.as_tensor(value).to(DEVICE) for value in values]


def drawn(batch, nodes, places, prefix, garbage=-1):
    """Paths, lengths and prefixes of a ragged batch."""
    length = torch.randint(0, places, (batch,))
    path = torch.full((batch, places), garbage)
    path[:, 0] = 0
    for b in range(batch):
        path[b, 1 : length[b] + 1] = torch.randperm(nodes - 1)[: length[b]].sort().values + 1
    return on_device(path, length, torch.randint(0, prefix, (batch,)))


def loop(caches, path, length, prefix):
    for cache in caches:
        old = cache.clone()
        for b in range(len(path)):
            for j in range(1, int(length[b]) + 1):
                cache[b, :, prefix[b] + j] = old[b, :, prefix[b] + path[b, j]]


def assert_right(storage, problem, impl="triton", view=lambda tensor: tensor, function=compact_cache):
    """The caches are views of what is stored, all of which is looked at."""
    expected = [tensor.clone() for tensor in storage]
    loop(map(view, expected), *problem)
    caches = [*map(view, storage)]
    function(caches[::2], caches[1::2], *problem, impl=impl)
    for tensor, right in zip(storage, expected, strict=True):
        assert_same_bits(tensor, right)
