"""How long it takes to move the accepted rows of a cache together.

    python -m pytest bench/kernels/bench_compaction.py --benchmark-only [--benchmark-json FILE]

bfloat16, heads of 128, paths of up to 16: so many accepted nodes of a tree of 64 move, of which none is in its place
before. A CPU has only PyTorch, with 2 layers, a GPU 32. Bytes are those that must move, read once and written once.
PyTorch waits for the host and cannot be captured.
"""

import itertools
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from common import DEVICE, problems_of

from heavypath.kernels.cache_compaction import compact_cache

HEAD_DIM, ROWS, NODES, PLACES = 128, 576, 64, 17
LAYERS = 32 if DEVICE == "cuda" else 2


class Case(NamedTuple):
    """Heads of a layer, sequences, and the accepted nodes of each."""

    heads: int
    batch: int
    accepted: int

    def __str__(self) -> str:
        return f"{self.heads} heads, batch {self.batch}, {self.accepted} accepted"

    def runs_here(self) -> bool:
        return True


CASES = [Case(*each) for each in product((8, 32), (1, 16), (1, 4, 16))]
MINIATURE = [Case(2, 1, 4)]
WAYS = {"heavypath": "triton", "PyTorch, eager": "torch"}


def moves(case: Case, seed: int) -> dict[str, torch.Tensor]:
    """path [batch, PLACES], length [batch] and prefix_length [batch], as compact_cache takes them."""
    generator = torch.Generator().manual_seed(seed)
    path = torch.full((case.batch, PLACES), -1)
    for row in path:
        row[0] = 0
        row[1 : case.accepted + 1] = torch.randperm(NODES - 2, generator=generator)[: case.accepted].sort().values + 2
    prefix = torch.randint(0, ROWS - NODES, (case.batch,), generator=generator)
    lengths = torch.full((case.batch,), case.accepted)
    return {"path": path.to(DEVICE), "length": lengths.to(DEVICE), "prefix_length": prefix.to(DEVICE)}


def test_compaction(case, way, timed):
    shape = case.batch, case.heads, ROWS, HEAD_DIM
    keys, values = ([torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(LAYERS)] for _ in "kv")
    impl = WAYS[way]
    seeds = itertools.count()
    moved = 2 * case.batch * case.accepted * LAYERS * 2 * case.heads * HEAD_DIM * keys[0].element_size()
    there = DEVICE == "cuda" or impl == "torch"
    every = problems_of(lambda: moves(case, next(seeds)), moved)  # other rows of the same cache
    runs = [partial(compact_cache, keys, values, **places, impl=impl) for places in every]
    timed(*(runs if there else []), read=moved)
