"""How long it takes to move the accepted rows of a cache together.

    OMP_NUM_THREADS=1 python bench/kernel_compaction.py [--json FILE]

bfloat16, heads of 128, paths of up to 16: so many accepted nodes of a tree of 64 move, of which none is in its place
before. A CPU has only PyTorch, with 2 layers. On a GPU, with 32 layers, "us" is an eager launch and the wait for it.
"device" is the time on the device, the median of triton.testing.do_bench, which empties the L2 cache before every run:
of a CUDA graph for the kernel, as in a decoder, and of eager PyTorch, which waits for the host and cannot be captured.
GB/s are the bytes that must move, each read once and written once, over that time.
"""

from itertools import product

import torch
from common import DEVICE, argument_parser, environment
from rich.console import Console
from rich.table import Table
from timing import captured, gpu_milliseconds, kept, microseconds
from torch import Tensor

from heavypath.kernels.cache_compaction import compact_cache

HEAD_DIM, ROWS, NODES, PLACES = 128, 576, 64, 17
HEADS, BATCHES, ACCEPTED = (8, 32), (1, 16), (1, 4, 16)


def caches(layers: int, heads: int, batch: int) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values [batch, heads, ROWS, HEAD_DIM] of each layer."""
    shape = batch, heads, ROWS, HEAD_DIM
    keys, values = ([torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(layers)] for _ in range(2))
    return keys, values


def moves(batch: int, accepted: int) -> tuple[Tensor, Tensor, Tensor]:
    """path [batch, PLACES], length [batch] and prefix_length [batch], as compact_cache takes them."""
    generator = torch.Generator().manual_seed(0)
    path = torch.full((batch, PLACES), -1)
    for row in path:
        row[0] = 0
        row[1 : accepted + 1] = torch.randperm(NODES - 2, generator=generator)[:accepted].sort().values + 2
    prefix_length = torch.randint(0, ROWS - NODES, (batch,), generator=generator)
    return path.to(DEVICE), torch.full((batch,), accepted, device=DEVICE), prefix_length.to(DEVICE)


def measured(heads: int, batch: int, accepted: int, impl: str) -> dict:
    """A row of the table."""
    layers = 32 if DEVICE == "cuda" else 2
    keys, values = caches(layers, heads, batch)
    path, length, prefix_length = moves(batch, accepted)

    def launch() -> None:
        compact_cache(keys, values, path, length, prefix_length, impl=impl)

    def launch_and_wait() -> None:
        launch()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    row = {"impl": impl, "layers": layers, "heads": heads, "batch": batch, "accepted": accepted}
    row["bytes"] = 2 * batch * accepted * sum(2 * heads * HEAD_DIM * key.element_size() for key in keys)
    row |= microseconds(launch_and_wait)
    if DEVICE == "cuda":
        seconds = gpu_milliseconds(captured(launch) if impl == "triton" else launch) / 1e3
        row |= {"device_microseconds": 1e6 * seconds, "gigabytes_a_second": row["bytes"] / seconds / 1e9}
    return row


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    torch.set_num_threads(arguments.threads)
    impls = ("triton", "torch") if DEVICE == "cuda" else ("torch",)
    cases = [*product(HEADS, BATCHES, ACCEPTED, impls)]
    if arguments.miniature:
        cases = [(2, 1, 4, impl) for impl in impls]
    rows = kept((measured(*case) for case in cases), environment(), arguments)
    table = Table(*("case", "MB", "us", "quartiles", "rounds", "device, us", "GB/s"), box=None, pad_edge=False)
    for row in rows:
        low, high = row["quartiles"]
        table.add_row(
            "{impl}: {layers} layers, {heads} heads, batch {batch}, {accepted} accepted".format(**row),
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['microseconds']:.1f}",
            f"{low:.1f} - {high:.1f}",
            str(row["rounds"]),
            f"{row['device_microseconds']:.1f}" if "device_microseconds" in row else "",
            f"{row['gigabytes_a_second']:.0f}" if "gigabytes_a_second" in row else "",
        )
    Console(highlight=False, width=120).print(table)


if __name__ == "__main__":
    main()
