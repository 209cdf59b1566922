"""How fast a CPU multiplies a few rows by a weight, of the bytes of the weight that it can read in that time.

    python bench/linear.py [--threads 1] [--dtype float32] [--json bench/results/linear-cpu.json]

linear     torch.nn.functional.linear: MKL in fp32, oneDNN in bf16, from the weight as it is
oneDNN     the operator that torch.compile uses for linear layers, from the weight as it is
reordered  the same from a copy of the weight in blocks of oneDNN's own form, as `speculative/models/linear.py` does it
together   that for all layers with one input at once (three of a third of the rows each)
read       the weight is read, by a dot product with itself, and nothing else is done

Each product uses another weight, and all of them together fill 200 MB, so that weights come from memory. GB/s are
medians of rounds in which all ways take turns.
"""

import time
from statistics import median

import torch
from common import argument_parser, environment, until_stopped, write_results
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import linear

from heavypath.speculative.models import linear as ours

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
def speeds(shape: tuple[int, int], dtype: torch.dtype, bytes_of_all: int) -> list[dict]:
    """GB/s of each way for each number of rows."""
    count = max(1, bytes_of_all // (shape[0] * shape[1] * dtype.itemsize))
    with torch.inference_mode(False):
        weights = [torch.randn(shape).to(dtype) for _ in range(count)]
        linears = ours.Linears("weights", [torch.empty(ours.FROM_MEMORY + 1)])
        reordered = [linears.together([_layer(weight)]) for weight in weights]
        together = [linears.together(split_in_three(weight)) for weight in weights]
    flat = [weight.view(-1).view(torch.float32) for weight in weights]
    found = []
    for rows in ROWS:
        hidden = torch.randn(rows, shape[1]).to(dtype)
        ways = {
            "linear": lambda hidden=hidden: [linear(hidden, weight) for weight in weights],
            "oneDNN": lambda hidden=hidden: [one_dnn(hidden, weight) for weight in weights],
            "reordered": lambda hidden=hidden: [product(hidden) for product in reordered],
            "together": lambda hidden=hidden: [product(hidden) for product in together],
            "read": lambda: [torch.dot(each, each) for each in flat],
        }
        seconds = {name: [] for name in ways}
        for _ in range(ROUNDS + 1):  # the first is for warming up
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                seconds[name].append(time.perf_counter() - start)
        size = count * weights[0].nbytes
        found.append({"rows": rows} | {name: size / median(each[1:]) / 1e9 for name, each in seconds.items()})
    return found


def _layer(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
    layer.weight = nn.Parameter(weight)
    return layer


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: both")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shapes, size = (SHAPES[1:2], 1_000_000) if arguments.miniature else (SHAPES, BYTES)
    console, figures = Console(stderr=True), []
    table = Table("type", "weight", "rows", "linear, GB/s", "oneDNN", "reordered", "together", "read", "of it")
    cases = [(dtype, shape) for dtype in arguments.dtype or DTYPES for shape in shapes]
    with until_stopped():
        for dtype, shape in track(cases, "products", console=console):
            for row in speeds(shape, DTYPES[dtype], size):
                figures.append({"dtype": dtype, "weight": shape} | row)
                cells = [f"{row[name]:.1f}" for name in ("linear", "oneDNN", "reordered", "together", "read")]
                share = f"{row['reordered'] / row['read']:.2f}"
                table.add_row(dtype, f"{shape[0]} x {shape[1]}", f"{row['rows']}", *cells, share)
            write_results(arguments.json, environment("cpu"), rows=figures)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
