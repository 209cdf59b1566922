"""How fast a CPU multiplies a few rows by a weight, of the bytes of the weight that it can read in that time.

    python bench/linear.py [--threads 1] [--dtype float32] [--templates] [--json bench/results/linear-cpu.json]

linear     torch.nn.functional.linear: MKL in fp32, oneDNN in bf16, from the weight as it is
oneDNN     the operator that torch.compile uses for linear layers, from the weight as it is
reordered  the same from a copy of the weight in blocks of oneDNN's own form
native     `heavypath.kernels.native`, from a copy in blocks, as the decoder does it
together   that for all layers with one input at once (three of a third of the rows each)
templates  torch.compile's own C++ templates from frozen weights, chosen by its autotuning; some minutes for each weight
read       the weight is read, by a dot product with itself, and nothing else is done

Each product uses another weight, and all of them together fill 200 MB, so that weights come from memory. GB/s are
medians of rounds in which all ways take turns.
"""

import time
from functools import partial
from statistics import median

import torch
from common import argument_parser, environment, until_stopped, write_results
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import linear

from heavypath.speculative.models.linear import Linears

SHAPES = ((160, 160), (320, 320), (1024, 320), (1280, 1280), (3456, 1280), (4096, 4096), (11008, 4096), (32000, 2048))
ROWS = (1, 2, 4, 5, 8, 16, 64)
ROUNDS = 7
BYTES = 200_000_000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def one_dnn(rows: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")


def split_in_three(weight: Tensor) -> list[nn.Linear]:
    """Three layers with one input, whose weights are together the given one."""
    layers = []
    for rows in weight.tensor_split(3):
        layers.append(nn.Linear(*rows.shape[::-1], bias=False, device="meta"))
        layers[-1].weight = nn.Parameter(rows.contiguous())
    return layers


@torch.inference_mode()
def speeds(shape: tuple[int, int], dtype: torch.dtype, bytes_of_all: int, templates: bool) -> list[dict]:
    """GB/s of each way for each number of rows."""
    count = max(1, bytes_of_all // (shape[0] * shape[1] * dtype.itemsize))
    with torch.inference_mode(False):
        weights = [torch.randn(shape).to(dtype) for _ in range(count)]
        linears = Linears("weights", weights)
        native = [linears.one(_layer(weight)) for weight in weights]
        together = [linears.together(split_in_three(weight)) for weight in weights]
    reordered = [torch.ops.mkldnn._reorder_linear_weight(weight, max(ROWS)) for weight in weights]
    flat = [weight.view(-1).view(torch.float32) for weight in weights]
    found = []
    for rows in ROWS:
        hidden = torch.randn(rows, shape[1]).to(dtype)
        ways = {
            "linear": lambda hidden=hidden: [linear(hidden, weight) for weight in weights],
            "oneDNN": lambda hidden=hidden: [one_dnn(hidden, weight) for weight in weights],
            "reordered": lambda hidden=hidden: [one_dnn(hidden, weight) for weight in reordered],
            "native": lambda hidden=hidden: [product(hidden) for product in native],
            "together": lambda hidden=hidden: [product(hidden) for product in together],
            "read": lambda: [torch.dot(each, each) for each in flat],
        }
        if templates:
            ways["templates"] = partial(compiled(weights, hidden), hidden)
        seconds = {name: [] for name in ways}
        for _ in range(ROUNDS + 1):  # the first is for warming up
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                seconds[name].append(time.perf_counter() - start)
        size = count * weights[0].nbytes
        found.append({"rows": rows} | {name: size / median(each[1:]) / 1e9 for name, each in seconds.items()})
    return found


def compiled(weights: list[Tensor], hidden: Tensor) -> nn.Module:
    """A module of all products, compiled for so many rows, with its weights frozen."""
    layers = nn.ModuleList(map(_layer, weights)).eval()

    class Products(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, rows: Tensor) -> list[Tensor]:
            return [layer(rows) for layer in self.layers]

    options = {"freezing": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
    torch.compiler.reset()
    made = torch.compile(Products(), options=options, dynamic=False)
    made(hidden)
    return made


def _layer(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
    layer.weight = nn.Parameter(weight)
    return layer


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: both")
    parser.add_argument("--templates", action="store_true", help="torch.compile's, too, for weights of 3456 x 1280")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shapes, size = (SHAPES[1:2], 1_000_000) if arguments.miniature else (SHAPES, BYTES)
    console, figures = Console(stderr=True), []
    names = ["linear", "oneDNN", "reordered", "native", "together", "templates", "read"]
    table = Table("type", "weight", "rows", *names, "native of read")
    cases = [(dtype, shape) for dtype in arguments.dtype or DTYPES for shape in shapes]
    with until_stopped():
        for dtype, shape in track(cases, "products", console=console):
            for row in speeds(shape, DTYPES[dtype], size, arguments.templates and shape == (3456, 1280)):
                figures.append({"dtype": dtype, "weight": shape} | row)
                cells = [f"{row[name]:.1f}" if name in row else "" for name in names]
                share = f"{row['native'] / row['read']:.2f}"
                table.add_row(dtype, f"{shape[0]} x {shape[1]}", f"{row['rows']}", *cells, share)
            write_results(arguments.json, environment("cpu"), rows=figures)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
