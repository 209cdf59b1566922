"""Tree attention against scaled_dot_product_attention with a dense mask, FlexAttention and FlashInfer.

    python bench/kernel_attention.py [--only verification] [--json FILE] [--plot FILE]

verification  64 / 128 / 256 nodes, 2k / 8k / 32k prefix rows, 32/32, 32/8 and 64/8 heads of 128, bfloat16
order         the random trees of DySpec's table 5: 256 .. 2,048 nodes, 64 heads of 128, no prefix. The nodes in
              insertion order, under the kernel's general mask, against heavy-path order; with occupied 32 x 32 blocks
demo          the float32 shapes of the shipped pair: 10/5 heads of 32, in a single call and in the 8 layers of a
              forward pass, which make their mask once

Without a GPU the shapes of `demo` are timed and the blocks of `order` are counted. On a GPU each time is the median of
triton.testing.do_bench, which empties the L2 cache before every run; on a CPU it is the median of alternating runs, and
a ratio is the median of the ratios within a round.

Bytes and FLOPs are the least that the problem needs: queries, visible keys and values, and outputs once; 4 D FLOPs for
each visible pair of a query and a key. The roof is the later of the two, at the speeds of a large copy and of a large
matrix product, measured in the same run. What the peers need is made before and not timed: the dense mask of sdpa and
FlashInfer, the block mask of FlexAttention, the repeated keys of sdpa. On a GPU each contender is captured in a CUDA
graph, so that the time is the kernels' own; "eager" is heavypath called from Python.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from common import DEVICE, PICTURE, argument_parser, environment, random_tree
from rich.table import Table
from timing import alternated, compared, copy_bandwidth, gpu_milliseconds, in_graphs, matrix_flops, measure_cases
from torch.nn.functional import scaled_dot_product_attention

from heavypath.kernels.attention.masks import interval_mask, pack_ancestors
from heavypath.kernels.attention.prepared import prepared_attention
from heavypath.kernels.tree_attention import attend, tree_attention


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
        return self.layers == 1 if DEVICE == "cuda" else self.table != "verification"


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


MINIATURE = [Case("order", 8, 0, (2, 1), 16, torch.float32), Case("demo", 4, 32, (2, 1), 16, torch.float32)]


def cases(miniature: bool) -> list[Case]:
    """Those that run on this machine."""
    return MINIATURE if miniature else [case for case in CASES if case.runs_here()]


def warm_up(case: Case) -> None:
    """Compile what our kernel needs for a case."""
    with torch.inference_mode():
        problem = Problem(case)
        problem.heavypath()()
        if (general := problem.general_mask()) is not None:
            general()


class Problem:
    """The tensors of a case, and the ways to solve it."""

    def __init__(self, case: Case):
        self.case = case
        heads, kv_heads = case.heads
        self.inserted = random_tree(case.nodes)
        self.tree = self.inserted.reordered("heavy_path")[0]
        self.end = self.tree.subtree_end.to(DEVICE)
        rows = case.prefix + case.nodes
        generator = torch.Generator(DEVICE).manual_seed(0)
        draw = partial(torch.randn, generator=generator, device=DEVICE, dtype=case.dtype)
        self.query = draw(1, case.nodes, heads, case.head_dim).transpose(1, 2)
        # A cache with rows to spare, of which the visible ones are a view.
        self.cache = draw(2, 1, kv_heads, rows + 64, case.head_dim)
        self.key, self.value = self.cache[0][:, :, :rows], self.cache[1][:, :, :rows]

    def dense_mask(self) -> torch.Tensor:
        """bool [N, L + N]"""
        prefix = torch.ones(self.case.nodes, self.case.prefix, dtype=torch.bool, device=DEVICE)
        return torch.cat([prefix, interval_mask(self.end)], 1)

    def work(self) -> tuple[int, int]:
        """Bytes and FLOPs."""
        case, (heads, kv_heads) = self.case, self.case.heads
        numbers = 2 * kv_heads * (case.prefix + case.nodes) * case.head_dim + 2 * heads * case.nodes * case.head_dim
        pairs = case.nodes * case.prefix + int(self.tree.depths.sum()) + case.nodes
        return case.layers * numbers * case.dtype.itemsize, case.layers * 4 * case.head_dim * heads * pairs

    def heavypath(self) -> Callable[[], object]:
        if self.case.layers == 1:
            prefix = self.case.prefix
            return lambda: tree_attention(self.query, *self.cache.unbind(), prefix_length=prefix, subtree_end=self.end)
        lengths, rows = torch.tensor([self.case.prefix], device=DEVICE), self.key.shape[2]

        def layers() -> None:
            attention = prepared_attention(
                prefix_length=lengths, rows=rows, dtype=self.case.dtype, subtree_end=self.end
            )
            for _ in range(self.case.layers):
                attention(self.query, *self.cache.unbind(), self.case.head_dim**-0.5)

        return layers

    def _repeated(self, layer: Callable[[], object]) -> Callable[[], object]:
        """The layer, as often as the case has layers."""

        def layers() -> None:
            for _ in range(self.case.layers):
                layer()

        return layer if self.case.layers == 1 else layers

    def general_mask(self) -> Callable[[], object] | None:
        """The kernel's path for any mask, on the nodes in insertion order: it skips empty blocks, too."""
        if self.case.table != "order":
            return None
        packed = pack_ancestors(self.inserted.mask().to(DEVICE))
        return lambda: tree_attention(self.query, *self.cache.unbind(), prefix_length=0, ancestor_mask=packed)

    def sdpa(self) -> Callable[[], object]:
        group = self.case.heads[0] // self.case.heads[1]
        if DEVICE == "cpu" and self.case.layers > 1:

            def layers() -> None:
                mask = self.dense_mask()
                rows = self.key.shape[2]
                for _ in range(self.case.layers):
                    key, value = self.cache.unbind()
                    attend(self.query, key[:, :, :rows], value[:, :, :rows], mask)

            return layers
        mask = self.dense_mask()
        if DEVICE == "cpu":
            return lambda: attend(self.query, self.key, self.value, mask)
        key, value = (x.repeat_interleave(group, 1) for x in (self.key, self.value))
        return self._repeated(lambda: scaled_dot_product_attention(self.query, key, value, attn_mask=mask))

    def flex(self) -> Callable[[], object] | None:
        if DEVICE == "cpu" or self.case.table == "demo":
            return None
        if self.case.table == "verification" and (self.case.prefix != 8192 or self.case.nodes < 256):
            return None  # it compiles for ten seconds a shape, and has no kernel for groups below 128 queries
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        prefix, nodes = self.case.prefix, self.case.nodes

        def visible(_batch, _head, query, key):
            node = (key - prefix).clamp(0, nodes - 1)
            return (key < prefix) | ((node <= query) & (query < self.end[node]))

        block_mask = create_block_mask(visible, None, None, nodes, prefix + nodes, device=DEVICE)
        torch._dynamo.reset()  # otherwise it gives up compiling after eight shapes
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda: compiled(self.query, self.key, self.value, block_mask=block_mask, enable_gqa=True)

    def flashinfer(self) -> Callable[[], object] | None:
        if DEVICE == "cpu":
            return None
        try:
            import flashinfer
        except ImportError:
            return None
        query, key, value = (x[0].transpose(0, 1).contiguous() for x in (self.query, self.key, self.value))
        attention = flashinfer.single_prefill_with_kv_cache
        return self._repeated(partial(attention, query, key, value, custom_mask=self.dense_mask()))

    def contenders(self) -> dict[str, Callable[[], Callable[[], object] | None]]:
        return {
            "heavypath": self.heavypath,
            "general mask, as inserted": self.general_mask,
            "sdpa, dense mask": self.sdpa,
            "FlexAttention": self.flex,
            "FlashInfer": self.flashinfer,
        }


def measured(case: Case, facts: dict) -> dict:
    """One row of the table."""
    problem = Problem(case)
    row: dict = {"case": str(case)} | case._asdict() | {"dtype": str(case.dtype).removeprefix("torch.")}
    if case.table == "order":
        row["blocks"] = [tree.occupied_blocks(32) for tree in (problem.inserted, problem.tree)]
        if DEVICE == "cpu":
            return row
    row["bytes"], row["flops"] = problem.work()
    with torch.inference_mode():
        if DEVICE == "cuda":
            times, row["failed"] = in_graphs(problem.contenders(), budget=100)
            row["eager_milliseconds"] = gpu_milliseconds(problem.heavypath(), 100)
        else:
            runs = {name: run for name, way in problem.contenders().items() if (run := way()) is not None}
            times = alternated(runs, seconds=0.5 * len(runs))
    row |= compared(times)
    read, computed = row["bytes"] / facts["bytes_a_second"], row["flops"] / facts["flops_a_second"][row["dtype"]]
    row["roof_milliseconds"] = max(read, computed) * 1e3
    row["fraction_of_roof"] = row["roof_milliseconds"] / row["milliseconds"]["heavypath"]
    return row


def as_table(rows: list[dict]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("case", "us", "MB", "GFLOP", "of roof", "times as fast as"):
        table.add_column(heading, justify="left" if heading in ("case", "times as fast as") else "right")
    for row in rows:
        if "blocks" in row:
            row = row | {"case": f"{row['case']} blocks={row['blocks'][0]}->{row['blocks'][1]}"}
        if "milliseconds" not in row:
            table.add_row(row["case"], "", "", "", "", "not timed without a GPU")
            continue
        table.add_row(
            row["case"],
            f"{row['milliseconds']['heavypath'] * 1e3:.1f}",
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['flops'] / 1e9:.2f}",
            f"{row['fraction_of_roof']:.0%}",
            ", ".join(f"{name} {ratio:.2f}" for name, ratio in row["ratio"].items()),
        )
    return table


def main() -> None:
    parser = argument_parser(__doc__, plot=PICTURE)
    parser.add_argument("--only", choices=("verification", "order", "demo"), help="one of the tables")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if DEVICE == "cpu":
        print("No GPU here: the shapes of `demo` are timed, and the blocks of `order` are counted.")
    facts = environment() | {
        "bytes_a_second": copy_bandwidth(arguments.miniature),
        "flops_a_second": {
            name: matrix_flops(getattr(torch, name), arguments.miniature) for name in ("bfloat16", "float32")
        },
    }
    measure_cases(cases(arguments.miniature), measured, as_table, facts, arguments)


if __name__ == "__main__":
    main()
