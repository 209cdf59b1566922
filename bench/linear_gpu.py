"""How fast a GPU multiplies a few rows by a weight, of the speed at which it copies memory.

    python bench/linear_gpu.py [--json FILE]

Products as a layer of Llama-2-7B has them in bfloat16, by torch.nn.functional.linear, which has cuBLAS do it: of keys,
queries and values at once, of attention's output, of gate and up at once, and of down. A CUDA graph has products with
several weights, one behind the other, which the second cache cannot hold together; so each weight comes from memory.

us        a product, of the graph's median
TB/s      bytes of the weight in that time: rows and results are small beside it
of copy   that over the bytes a second, read and written, of a large copy

Without a GPU the products run one by one, without a graph.
"""

from collections.abc import Iterable
from itertools import product
from statistics import median

import torch
from common import DEVICE, argument_parser, environment
from rich.console import Console
from rich.table import Table
from timing import alternated, captured, copy_bandwidth, gpu_milliseconds, kept
from torch.nn.functional import linear

SHAPES = ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008))
ROWS = (1, 33, 64, 128, 256)
BYTES = 600_000_000  # of all weights of a shape, ten times the second cache of an H200


@torch.inference_mode()
def measured(shape: tuple[int, int], rows: int, bytes_of_all: int, copied: float) -> dict:
    """A row of results. copied: bytes a second of a copy"""
    count = max(2, -(-bytes_of_all // (2 * shape[0] * shape[1])))
    weights = [torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(count)]
    hidden = torch.randn(rows, shape[1], dtype=torch.bfloat16, device=DEVICE)

    def run() -> None:
        for weight in weights:
            linear(hidden, weight)

    on_gpu = DEVICE == "cuda"
    milliseconds = gpu_milliseconds(captured(run)) if on_gpu else median(alternated({"linear": run}, 0.05)["linear"])
    speed = count * weights[0].nbytes / milliseconds * 1e3
    return {
        "weight": f"{shape[0]} x {shape[1]}",
        "rows": rows,
        "weights": count,
        "microseconds": milliseconds / count * 1e3,
        "terabytes_a_second": speed / 1e12,
        "of_copy": speed / copied,
    }


def as_table(rows: Iterable[dict]) -> Table:
    table = Table("weight", "rows", "us", "TB/s", "of copy", box=None, pad_edge=False)
    for row in rows:
        speeds = f"{row['terabytes_a_second']:.3f}", f"{row['of_copy']:.3f}"
        table.add_row(row["weight"], f"{row['rows']}", f"{row['microseconds']:.1f}", *speeds)
    return table


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    torch.set_num_threads(arguments.threads)
    shapes, rows, size = (((96, 64),), (1, 33), 100_000) if arguments.miniature else (SHAPES, ROWS, BYTES)
    copied = copy_bandwidth(arguments.miniature)
    facts = environment() | {"copy_terabytes_a_second": copied / 1e12}
    print(f"{facts['device']}: a copy reads and writes {copied / 1e12:.3f} TB/s")
    measuring = (measured(*case, size, copied) for case in product(shapes, rows))
    Console(highlight=False, width=120).print(as_table(kept(measuring, facts, arguments)))


if __name__ == "__main__":
    main()
