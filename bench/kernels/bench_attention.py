"""Tree attention against scaled_dot_product_attention with a dense mask, FlexAttention and FlashInfer.

    python -m pytest bench/kernels/bench_attention.py --benchmark-only [-k demo] [--benchmark-json FILE]

verification  64 / 128 / 256 nodes, 2k / 8k / 32k prefix rows, 32/32, 32/8 and 64/8 heads of 128, bfloat16
order         the random trees of DySpec's table 5: 256 .. 2,048 nodes, 64 heads of 128, no prefix. The nodes in
              insertion order, under the kernel's general mask, against heavy-path order; with occupied 32 x 32 blocks
demo          the float32 shapes of the shipped pair: 10/5 heads of 32, in a single call and in the 8 layers of a
              forward pass, which make their mask once

A CPU times the shapes of `demo`, and counts the blocks of `order` on the smallest of its trees. Bytes and FLOPs are the
least that the problem needs: queries, visible keys and values, and outputs once; 4 D FLOPs for each visible pair of a
query and a key. What the peers need is made before and not timed: the dense mask of sdpa and FlashInfer, the block mask
of FlexAttention, the repeated keys of sdpa.
"""

from functools import lru_cache, partial
from typing import NamedTuple

import torch
from common import DEVICE, Run, problems_of, random_tree
from torch.nn.functional import scaled_dot_product_attention

from heavypath.kernels.attention.masks import interval_mask, pack_ancestors
from heavypath.kernels.attention.prepared import prepared_attention
from heavypath.kernels.tree_attention import tree_attention


class Case(NamedTuple):
    """A shape: heads are (query heads, key heads)."""

    table: str
    nodes: int
    prefix: int
    heads: tuple[int, int]
    head_dim: int
    dtype: torch.dtype
    layers: int = 1

    def __str__(self) -> str:
        layers = f" x {self.layers} layers" if self.layers > 1 else ""
        return f"{self.table} N={self.nodes} L={self.prefix} heads={self.heads[0]}/{self.heads[1]}{layers}"

    def runs_here(self) -> bool:
        """A GPU is left the layers of a whole forward pass, which is a CPU's concern, and a CPU the large shapes."""
        if DEVICE == "cuda":
            return self.layers == 1
        return self.table == "demo" or (self.table == "order" and self.nodes == 256)


CASES = [
    *(
        Case("verification", nodes, prefix, heads, 128, torch.bfloat16)
        for heads in ((32, 32), (32, 8), (64, 8))
        for prefix in (2048, 8192, 32768)
        for nodes in (64, 128, 256)
    ),
    *(Case("order", nodes, 0, (64, 64), 128, torch.bfloat16) for nodes in (256, 512, 1024, 2048)),
    *(
        Case("demo", nodes, prefix, (10, 5), 32, torch.float32, layers)
        for layers in (1, 8)
        for prefix in (64, 512)
        for nodes in (1, 8, 16, 32, 64)
    ),
]
MINIATURE = [Case("order", 8, 0, (2, 1), 16, torch.float32), Case("demo", 4, 32, (2, 1), 16, torch.float32, 2)]


class Problem:
    """The tensors of a case."""

    def __init__(self, case: Case):
        heads, kv_heads = case.heads
        self.case, self.inserted = case, random_tree(case.nodes)
        self.tree = self.inserted.reordered("heavy_path")[0]
        self.end = self.tree.subtree_end.to(DEVICE)
        self.rows = case.prefix + case.nodes
        generator = torch.Generator(DEVICE).manual_seed(0)
        draw = partial(torch.randn, generator=generator, device=DEVICE, dtype=case.dtype)
        self.query = draw(1, case.nodes, heads, case.head_dim).transpose(1, 2)
        # A cache with rows to spare, of which the visible ones are a view.
        self.cache = draw(2, 1, kv_heads, self.rows + 64, case.head_dim).unbind()
        self.key, self.value = (each[:, :, : self.rows] for each in self.cache)

    def dense_mask(self) -> torch.Tensor:
        """bool [N, L + N]"""
        prefix = torch.ones(self.case.nodes, self.case.prefix, dtype=torch.bool, device=DEVICE)
        return torch.cat([prefix, interval_mask(self.end)], 1)

    def work(self) -> tuple[int, int]:
        """Bytes and FLOPs."""
        case, (heads, kv_heads) = self.case, self.case.heads
        numbers = 2 * kv_heads * self.rows * case.head_dim + 2 * heads * case.nodes * case.head_dim
        pairs = case.nodes * case.prefix + int(self.tree.depths.sum()) + case.nodes
        return case.layers * numbers * case.dtype.itemsize, case.layers * 4 * case.head_dim * heads * pairs


def repeated(layer: Run, times: int) -> Run:
    """A layer, as often as a case has layers."""

    def layers() -> None:
        for _ in range(times):
            layer()

    return layer if times == 1 else layers


def heavypath(problem: Problem) -> Run:
    case, key_value = problem.case, problem.cache
    if case.layers == 1:
        places = {"prefix_length": case.prefix, "subtree_end": problem.end}
        return lambda: tree_attention(problem.query, *key_value, **places)
    places = {"prefix_length": torch.tensor([case.prefix], device=DEVICE), "subtree_end": problem.end}

    def layers() -> None:
        attention = prepared_attention(rows=problem.rows, dtype=case.dtype, **places)
        for _ in range(case.layers):
            attention(problem.query, *key_value, case.head_dim**-0.5)

    return layers


def eager(problem: Problem) -> Run | None:
    """As `heavypath`, called from Python."""
    return heavypath(problem) if DEVICE == "cuda" else None


def general_mask(problem: Problem) -> Run | None:
    """The kernel's path for any mask, on the nodes in insertion order: it skips empty blocks, too."""
    if problem.case.table != "order":
        return None
    packed = pack_ancestors(problem.inserted.mask().to(DEVICE))
    return lambda: tree_attention(problem.query, *problem.cache, prefix_length=0, ancestor_mask=packed)


def sdpa(problem: Problem) -> Run:
    mask, group = problem.dense_mask(), problem.case.heads[0] // problem.case.heads[1]
    key, value = (each.repeat_interleave(group, 1) for each in (problem.key, problem.value))
    attention = partial(scaled_dot_product_attention, problem.query, key, value, attn_mask=mask)
    return repeated(attention, problem.case.layers)


def flex(problem: Problem) -> Run | None:
    case = problem.case
    if DEVICE == "cpu" or case.table == "demo":
        return None
    if case.table == "verification" and (case.prefix != 8192 or case.nodes < 256):
        return None  # it compiles for ten seconds a shape, and has no kernel for groups below 128 queries
    compiled, block_mask = compiled_flex(case)
    return lambda: compiled(problem.query, problem.key, problem.value, block_mask=block_mask, enable_gqa=True)


@lru_cache(1)
def compiled_flex(case: Case) -> tuple[Run, object]:
    """FlexAttention compiled for a case, and its block mask, which all problems of the case share."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    end = Problem(case).end

    def visible(_batch, _head, query, key):
        node = (key - case.prefix).clamp(0, case.nodes - 1)
        return (key < case.prefix) | ((node <= query) & (query < end[node]))

    block_mask = create_block_mask(visible, None, None, case.nodes, case.prefix + case.nodes, device=DEVICE)
    torch._dynamo.reset()  # otherwise it gives up compiling after eight shapes
    return torch.compile(flex_attention, dynamic=False), block_mask


def flashinfer(problem: Problem) -> Run | None:
    if DEVICE == "cpu":
        return None
    try:
        import flashinfer
    except ImportError:
        return None
    tensors = problem.query, problem.key, problem.value
    query, key, value = (each[0].transpose(0, 1).contiguous() for each in tensors)
    call = partial(flashinfer.single_prefill_with_kv_cache, query, key, value, custom_mask=problem.dense_mask())
    return repeated(call, problem.case.layers)


WAYS = {
    "heavypath": heavypath,
    "heavypath, eager": eager,
    "general mask, as inserted": general_mask,
    "sdpa, dense mask": sdpa,
    "FlexAttention": flex,
    "FlashInfer": flashinfer,
}


def test_attention(case, way, timed):
    cache = 2 * case.heads[1] * (case.prefix + case.nodes) * case.head_dim * case.dtype.itemsize
    problem, *others = problems_of(partial(Problem, case), cache)
    trees = {"inserted": problem.inserted, "heavy path": problem.tree} if case.table == "order" else {}
    blocks = {f"blocks, {name}": tree.occupied_blocks(32) for name, tree in trees.items()}
    read, flops = problem.work()
    timed(*map(WAYS[way], [problem, *others]), read=read, flops=(flops, case.dtype), **blocks)
