"""Three ways to multiply a few rows by a weight on a CPU, in fp32: what `speculative/models/llama.py` chooses between.

    python bench/linear.py [--threads 1] [--json bench/results/linear-cpu.json]

linear   torch.nn.functional.linear, which calls MKL: rows @ weight.T
columns  the same product as weight @ rows.T, with a single row doubled
oneDNN   the operator that torch.compile uses for linear layers

Each product uses another weight, and all of them together fill 120 MB, so that weights come from memory. Times are
medians of rounds in which all ways take turns, in microseconds for one weight; ratios are the time of linear over that
of the others.
"""

import time
from statistics import median

import torch
from common import argument_parser, environment, write_results
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear

SHAPES = ((320, 320), (640, 640), (1024, 320), (896, 896), (2048, 2048), (4096, 4096), (11008, 4096), (32000, 2048))
ROWS = (1, 2, 3, 5, 8, 64)
ROUNDS = 9


def columns(rows: Tensor, weight: Tensor) -> Tensor:
    few = rows if len(rows) > 1 else rows.repeat(2, 1)
    return torch.mm(weight, few.t()).t()[: len(rows)]


def one_dnn(rows: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")


WAYS = {"linear": linear, "columns": columns, "oneDNN": one_dnn}


@torch.inference_mode()
def timed(shape: tuple[int, int], count: int) -> dict[str, float]:
    """Microseconds that each way takes for one weight of this shape and so many rows."""
    weights = [torch.randn(shape) for _ in range(max(1, 120_000_000 // (4 * shape[0] * shape[1])))]
    rows = torch.randn(count, shape[1])
    seconds = {name: [] for name in WAYS}
    for _ in range(ROUNDS + 1):  # the first is for warming up
        for name, way in WAYS.items():
            start = time.perf_counter()
            for weight in weights:
                way(rows, weight)
            seconds[name].append(time.perf_counter() - start)
    return {name: 1e6 * median(each[1:]) / len(weights) for name, each in seconds.items()}


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    torch.set_num_threads(arguments.threads)
    table = Table("weight", "rows", "linear, us", "columns", "oneDNN")
    figures = []
    for shape in SHAPES:
        for count in ROWS:
            microseconds = timed(shape, count)
            ratios = {name: microseconds["linear"] / each for name, each in microseconds.items()}
            figures.append({"weight": shape, "rows": count, "microseconds": microseconds})
            table.add_row(
                f"{shape[0]} x {shape[1]}", f"{count}", f"{microseconds['linear']:.0f}",
                f"{ratios['columns']:.2f}", f"{ratios['oneDNN']:.2f}",
            )  # fmt: skip
    Console().print(table)
    write_results(arguments.json, environment("cpu"), rows=figures)


if __name__ == "__main__":
    main()
