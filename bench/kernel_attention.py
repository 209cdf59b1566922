"""Tree attention against sdpa with a dense mask, FlexAttention and FlashInfer, and against the hardware's roofs.

    python bench/kernel_attention.py [--only verification] [--json FILE] [--plot FILE]
    python -m pytest bench/kernel_attention.py -o addopts=      # the same shapes under pytest-benchmark

verification  N = 64 / 128 / 256 nodes, 2k / 8k / 32k prefix rows, 32/32, 32/8 and 64/8 heads of 128, bfloat16
order         DySpec's table 5: random trees of N = 256 .. 2,048 nodes, 64 heads of 128, no prefix; nodes as they were
              inserted, under the kernel's general mask, against heavy-path order; with occupied 32 x 32 blocks
demo          the shipped pair's float32 shapes: 10/5 heads of 32, in one call, and in the 8 layers of a forward pass,
              whose mask is made once

Without a GPU the shapes of `demo` are timed and the blocks of `order` counted. On a GPU each time is the median of
triton.testing.do_bench, which empties the L2 cache before every run; on a CPU, the median of alternating runs. Bytes
and FLOPs are what the problem needs at least: queries, visible keys and values, and outputs once; 4 D FLOPs for each
visible pair of a query and a key. Both roofs, copying and multiplying matrices, are measured in the same run. For sdpa
and FlashInfer the dense mask, for FlexAttention its block mask, and sdpa's repeated keys are made beforehand, untimed.
On a GPU each is captured in a CUDA graph: the time is the kernels' own. "eager" is heavypath called from Python.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from rich.console import Console
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

from heavypath.kernels.tree_attention import (
    attend,
    interval_mask,
    pack_ancestors,
    prepared_attention,
    tree_attention,
)
from heavypath.speculative import TokenTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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


def random_tree(nodes: int, seed: int = 0) -> TokenTree:
    """A random recursive tree: each node's parent is uniform over the nodes before it."""
    generator = torch.Generator().manual_seed(seed)
    return TokenTree([-1, *(int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, nodes))])


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
        """As many layers as the case has."""

        def layers() -> None:
            for _ in range(self.case.layers):
                layer()

        return layer if self.case.layers == 1 else layers

    def general_mask(self) -> Callable[[], object] | None:
        """The kernel's other path, on the order of insertion: it skips empty blocks too."""
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
            return None  # compiling takes it ten seconds a shape, and below 128 queries it has no kernel for groups
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        prefix, nodes = self.case.prefix, self.case.nodes

        def visible(_batch, _head, query, key):
            node = (key - prefix).clamp(0, nodes - 1)
            return (key < prefix) | ((node <= query) & (query < self.end[node]))

        block_mask = create_block_mask(visible, None, None, nodes, prefix + nodes, device=DEVICE)
        torch._dynamo.reset()  # else it gives up compiling after eight shapes
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


def milliseconds(runs: dict[str, Callable[[], object]], seconds: float = 0.5) -> dict[str, float]:
    """The median time of each."""
    if DEVICE == "cuda":
        return {name: gpu_milliseconds(run) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds * len(runs) or len(times["heavypath"]) < 5:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def gpu_milliseconds(run: Callable[[], object]) -> float:
    return triton.testing.do_bench(run, warmup=25, rep=100, return_mode="median")


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """The same as a CUDA graph; warmed up first, which compiles it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def measured_roofs(dtype: torch.dtype) -> tuple[float, float]:
    """Bytes copied (read and written) and FLOPs of a matrix product, a second."""
    side, numbers = (8192, 1 << 29) if DEVICE == "cuda" else (1024, 1 << 25)
    source = torch.zeros(numbers, dtype=torch.bfloat16, device=DEVICE)
    target = torch.empty_like(source)
    left = torch.randn(side, side, device=DEVICE).to(dtype)
    times = milliseconds({"heavypath": lambda: target.copy_(source), "product": lambda: left @ left})
    return 2 * source.nbytes / times["heavypath"] * 1e3, 2 * side**3 / times["product"] * 1e3


def measured(case: Case, roofs: tuple[float, float]) -> dict:
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
            row["milliseconds"], row["failed"] = {}, {}
            for name, way in problem.contenders().items():
                try:
                    run = way()
                    if run is not None:
                        row["milliseconds"][name] = gpu_milliseconds(captured(run))
                except Exception as error:  # a peer that cannot do a shape leaves the others their figures
                    if name == "heavypath":
                        raise
                    row["failed"][name] = f"{type(error).__name__}: {error}"[:300]
            row["eager_milliseconds"] = gpu_milliseconds(problem.heavypath())
        else:
            ways = problem.contenders().items()
            row["milliseconds"] = milliseconds({name: run for name, way in ways if (run := way()) is not None})
    ours = row["milliseconds"]["heavypath"]
    roof = max(row["bytes"] / roofs[0], row["flops"] / roofs[1]) * 1e3
    row["roof_milliseconds"], row["fraction_of_roof"] = roof, roof / ours
    row["ratio"] = {name: value / ours for name, value in row["milliseconds"].items() if name != "heavypath"}
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


def draw_plot(rows: list[dict], path: Path) -> None:
    """Times of all contenders, a group of bars for each case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if "milliseconds" in row]
    names = list(dict.fromkeys(name for row in rows for name in row["milliseconds"]))
    figure, axes = pyplot.subplots(figsize=(10, 1 + 0.32 * len(rows)), layout="constrained")
    for place, name in enumerate(names):
        timed = [
            (index, row["milliseconds"][name] * 1e3) for index, row in enumerate(rows) if name in row["milliseconds"]
        ]
        heights = [index + 0.8 * (place / len(names) - 0.5) for index, _ in timed]
        axes.barh(heights, [value for _, value in timed], 0.8 / len(names), align="edge", label=name)
    axes.plot(
        [row["roof_milliseconds"] * 1e3 for row in rows], range(len(rows)), "k|", markersize=9, label="nearer roof"
    )
    axes.set(xscale="log", xlabel="microseconds", yticks=range(len(rows)), yticklabels=[row["case"] for row in rows])
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("verification", "order", "demo"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="needs matplotlib")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console(highlight=False, width=140)
    tables = [arguments.only] if arguments.only else ["verification", "order", "demo"]
    if DEVICE == "cpu":
        console.print("No GPU here: the shapes of the demo are timed and blocks counted.")
        tables = [name for name in tables if name != "verification"]
    roofs = {dtype: measured_roofs(dtype) for dtype in (torch.bfloat16, torch.float32)}
    facts = {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor() or platform.machine(),
        "threads": arguments.threads,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "bytes_a_second": roofs[torch.bfloat16][0],
        "flops_a_second": {str(dtype).removeprefix("torch."): roof[1] for dtype, roof in roofs.items()},
    }
    cases = [case for case in CASES if case.table in tables and (DEVICE == "cpu" or case.layers == 1)]
    rows = []
    with console.status("") as status:
        for case in cases:
            status.update(str(case))
            rows.append(measured(case, roofs[case.dtype]))
            if arguments.json is not None:  # after every case: nothing is lost if it is stopped
                arguments.json.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1) + "\n")
    console.print(as_table(rows))
    if arguments.plot is not None:
        draw_plot(rows, arguments.plot)


def pytest_generate_tests(metafunc) -> None:
    cases = [case for case in CASES if DEVICE == "cuda" or case.table == "demo"]
    metafunc.parametrize("case", cases, ids=str)


def test_attention(case, benchmark):
    with torch.inference_mode():
        run = Problem(case).heavypath()

        def finished() -> None:
            run()
            if DEVICE == "cuda":
                torch.cuda.synchronize()

        benchmark(finished)


if __name__ == "__main__":
    main()
