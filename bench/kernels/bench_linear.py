"""How fast a few rows are multiplied by a weight, of the bytes of the weight that can be read in that time.

    python -m pytest bench/kernels/bench_linear.py --benchmark-only [-k float32] [--benchmark-json FILE]
    python bench/kernels/bench_linear.py FILE    # what a GPU's results add to kernels/layers/measured.py

linear     torch.nn.functional.linear: MKL in fp32, oneDNN in bf16, cuBLAS on a GPU, from the weight as it is
oneDNN     the operator that torch.compile uses for linear layers, from the weight as it is
reordered  the same from a copy of the weight in blocks of oneDNN's own form
heavypath  `heavypath.kernels.native`, from a copy in blocks, as the decoder does it
together   that for all layers with one input at once (three of a third of the rows each)
few rows   the Triton kernel `heavypath.kernels.layers.few_rows`, on a GPU and up to 128 rows
read       the weight is read, by a dot product with itself, and nothing else is done

Each product uses another weight, and all of them together fill 200 MB, 600 MB on a GPU, so that weights come from
memory: a time is that of one product. A GPU has `linear` and `few rows` alone, in bfloat16, with the shapes of
Llama-2-7B and Llama-3.1-8B: keys, queries and values at once, attention's output, gate and up at once, down, and the
vocabulary. Gate and up are also timed with silu behind them ("gated").
"""

import json
import sys
from collections import defaultdict
from functools import cache, cached_property, partial
from pathlib import Path
from pprint import pformat
from typing import NamedTuple

import torch

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))

from common import DEVICE
from torch import Tensor, nn
from torch.nn.functional import linear

from heavypath.kernels.layers.few_rows import few_rows_product
from heavypath.kernels.layers.gated import silu_product
from heavypath.speculative.models.linear import Linears

ON_A_CPU = ((160, 160), (320, 320), (1024, 320), (1280, 1280), (3456, 1280), (4096, 4096), (11008, 4096), (32000, 2048))
ON_A_GPU = (
    (12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008), (32000, 4096),
    (6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096),
)  # fmt: skip
GATES = ((22016, 4096), (28672, 4096))
BYTES = 600_000_000 if DEVICE == "cuda" else 200_000_000
MOST_ROWS = 64


class Case(NamedTuple):
    """Products of so many rows by weights of this shape, which fill so many bytes."""

    weight: tuple[int, int]
    rows: int
    dtype: torch.dtype
    nbytes: int = BYTES
    gated: bool = False

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{kind}, {self.weight[0]} x {self.weight[1]}{', gated' * self.gated}, {self.rows} rows"

    def runs_here(self) -> bool:
        return True


CASES = (
    [
        *(Case(weight, rows, torch.bfloat16) for weight in ON_A_GPU for rows in (1, 16, 33, 64, 128)),
        *(Case(weight, rows, torch.bfloat16, gated=True) for weight in GATES for rows in (1, 16, 33, 64)),
    ]
    if DEVICE == "cuda"
    else [
        Case(weight, rows, dtype)
        for dtype in (torch.float32, torch.bfloat16)
        for weight in ON_A_CPU
        for rows in (1, 2, 4, 5, 8, 16, MOST_ROWS)
    ]
)
MINIATURE = [Case((96, 64), rows, torch.bfloat16, 100_000, rows > 1) for rows in (1, 33)]


def layer_of(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
    layer.weight = nn.Parameter(weight)
    return layer


def one_dnn(rows: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")


class Products:
    """The weights of one shape, and what each way makes of them: a product for each weight, of the rows alone."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, nbytes: int):
        count = max(2 if nbytes else 1, -(-nbytes // (shape[0] * shape[1] * dtype.itemsize)))
        self.weights = [torch.randn(shape, device=DEVICE).to(dtype) for _ in range(count)]

    @cached_property
    def linears(self) -> Linears:
        return Linears("weights", self.weights)

    def linear(self) -> list:
        return [partial(linear, weight=weight) for weight in self.weights]

    def one_dnn(self) -> list:
        return [partial(one_dnn, weight=weight) for weight in self.weights]

    def reordered(self) -> list:
        try:
            copies = [torch.ops.mkldnn._reorder_linear_weight(weight, MOST_ROWS) for weight in self.weights]
        except RuntimeError:  # this CPU has no such form
            return []
        return [partial(one_dnn, weight=weight) for weight in copies]

    def native(self) -> list:
        return [self.linears.one(layer_of(weight)) for weight in self.weights]

    def together(self) -> list:
        parts = ([layer_of(part.contiguous()) for part in weight.tensor_split(3)] for weight in self.weights)
        return [self.linears.together(layers) for layers in parts]

    def few_rows(self) -> list:
        return [partial(few_rows_product, weight=weight, impl="triton") for weight in self.weights]

    def linear_and_silu(self) -> list:
        def gated(rows: Tensor, weight: Tensor) -> Tensor:
            return silu_product(*linear(rows, weight).chunk(2, -1))

        return [partial(gated, weight=weight) for weight in self.weights]

    def few_rows_gated(self) -> list:
        return [partial(few_rows_product, weight=weight, gated=True, impl="triton") for weight in self.weights]

    def read(self) -> list:
        flat = [weight.view(-1).view(torch.float32) for weight in self.weights]
        return [lambda rows, each=each: torch.dot(each, each) for each in flat]


WAYS = {
    "linear": Products.linear,
    "oneDNN": Products.one_dnn,
    "reordered": Products.reordered,
    "heavypath": Products.native,
    "together": Products.together,
    "few rows": Products.few_rows,
    "read": Products.read,
}
GATED = {"linear": Products.linear_and_silu, "few rows": Products.few_rows_gated}
products = cache(Products)


def test_products_of_few_rows(case, way, timed, benchmark):
    problem = products(case.weight, case.dtype, case.nbytes if benchmark.enabled else 0)
    make = (GATED if case.gated else WAYS).get(way)
    is_there = make is not None and (way in GATED if DEVICE == "cuda" else way != "few rows")
    there = make(problem) if is_there else []
    hidden = torch.randn(case.rows, case.weight[1], device=DEVICE).to(case.dtype)

    def run() -> None:
        for product in there:
            product(hidden)

    read = problem.weights[0].nbytes
    timed(run if there else None, read=read, count=len(problem.weights))


def faster(benchmarks: list[dict]) -> dict[str, dict[tuple[int, int, bool], tuple[int, int]]]:
    """What FASTER has of these results: for each weight the longest run of rows that "few rows" is faster with."""
    times: dict = defaultdict(lambda: defaultdict(dict))
    for facts in (each["extra_info"] for each in benchmarks):
        _, weight, *gated, rows = facts["case"].split(", ")
        shape = (*map(int, weight.split(" x ")), bool(gated))
        times[facts["device"], shape][int(rows.removesuffix(" rows"))][facts["way"]] = facts["microseconds"]
    found: dict = defaultdict(dict)
    for (device, shape), of in times.items():
        runs: list[list[int]] = [[]]
        for rows, each in sorted(of.items()):
            if each.get("few rows", float("inf")) < each["linear"]:
                runs[-1].append(rows)
            elif runs[-1]:
                runs.append([])
        longest = max(runs, key=len)
        if longest:
            found[device][shape] = longest[0], longest[-1]
    return dict(found)


if __name__ == "__main__":
    print("FASTER =", pformat(faster(json.loads(Path(sys.argv[1]).read_text())["benchmarks"]), width=100))
