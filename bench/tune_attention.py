"""Which tiles, and which fewest rows of a part of the prefix, make tree attention fastest on this GPU.

    python bench/tune_attention.py [--heads 32/8 32/32] [--nodes 60 8 1] [--prefix 128 300 1000 8000] [--json FILE]

A row for each shape, heads of 128 columns in bfloat16, and each choice:

rows   MIN_SPLIT of kernels/attention/kernel.py: a prefix with more rows has several parts, each with its own program
tiles  block of queries, block of keys, warps and stages, as `tiles_for` of kernels/attention/launch.py chooses; "usual"
       is what it chooses now
us     of one launch, of 32 in a CUDA graph that take turns in caches of their own: keys come from memory, as in a pass
gain   the time of the usual choice over this one's

At the end it prints the choice with the best geometric mean of the gains over all shapes. Without a GPU only
--miniature runs, by PyTorch, whose time does not depend on the choice.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import torch
from common import (
    DEVICE,
    Row,
    Run,
    argument_parser,
    captured,
    environment,
    gpu_seconds,
    options_of,
    random_tree,
    report,
    timed,
)

from heavypath.kernels.attention import kernel, launch
from heavypath.kernels.attention.launch import Tiles
from heavypath.kernels.tree_attention import tree_attention

LAYERS = 32  # launches in a graph, each with a cache of its own
HEAD_DIM = 128
FEWEST = (64, 128, 256)
TILES = (Tiles(64, 64, 4, 3), Tiles(64, 32, 4, 4), Tiles(128, 64, 8, 3))  # besides the usual ones
USUAL_TILES: Any = launch.tiles_for


def attention_of(heads: str, nodes: int, prefix: int, cache_rows: int) -> Run:
    """Attention of a tree of `nodes` nodes after `prefix` rows, in each of LAYERS caches."""
    query_heads, key_heads = map(int, heads.split("/"))
    end = random_tree(nodes).reordered("heavy_path")[0].subtree_end.to(DEVICE)
    length = torch.tensor(prefix, device=DEVICE)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    query = torch.randn(1, nodes, query_heads, HEAD_DIM, device=DEVICE, dtype=dtype).transpose(1, 2)
    keys, values = torch.randn(2, LAYERS, 1, key_heads, cache_rows, HEAD_DIM, device=DEVICE, dtype=dtype)

    def run() -> None:
        for key, value in zip(keys, values, strict=True):
            tree_attention(query, key, value, prefix_length=length, subtree_end=end)

    return run


def chosen(fewest: int, tiles: Tiles | None) -> None:
    """Have later launches use these, and the usual tiles if None is given."""
    launch.MIN_SPLIT = fewest
    launch.tiles_for = USUAL_TILES if tiles is None else lambda *_: tiles


def rows_of(given: argparse.Namespace) -> Iterator[Row]:
    """One row of results for each shape and choice; the usual one comes first."""
    for heads, nodes, prefix in product(given.heads, given.nodes, given.prefix):
        group = int(heads.split("/")[0]) // int(heads.split("/")[1])
        tiles = [None] if nodes * group <= 16 else [None, *(each for each in TILES if each.block_m <= 64 or group > 1)]
        choices = [(kernel.MIN_SPLIT, None), *product(FEWEST, tiles)]
        usual = 0.0
        for number, (fewest, each) in enumerate(dict.fromkeys(choices)):
            chosen(fewest, each)
            # As long as those of a workspace. A launch is planned once for each length, so each choice has its own.
            cache_rows = -(-(prefix + nodes) // 1024) * 1024 + 8 * number
            run = attention_of(heads, nodes, prefix, cache_rows)
            seconds = gpu_seconds(captured(run)) if DEVICE == "cuda" else timed(run)[0]
            usual = usual or seconds
            yield {
                "heads": heads,
                "nodes": nodes,
                "prefix": prefix,
                "rows": fewest,
                "tiles": "usual" if each is None else "/".join(map(str, each)),
                "us": round(1e6 * seconds / LAYERS, 2),
                "gain": round(usual / seconds, 3),
            }
    chosen(kernel.MIN_SPLIT, None)


def best_choice(rows: Sequence[Row]) -> tuple[int, str]:
    """The choice that all shapes were measured with, and whose geometric mean of gains is the best."""
    gains: dict[tuple[int, str], list[float]] = defaultdict(list)
    for row in rows:
        gains[row["rows"], row["tiles"]].append(row["gain"])
    most = max(map(len, gains.values()))
    means = {choice: prod(every) ** (1 / most) for choice, every in gains.items() if len(every) == most}
    return max(means, key=lambda choice: means[choice])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print a row for each shape and choice."""
    parser = argument_parser(__doc__)
    parser.add_argument("--heads", nargs="+", default=["32/8", "32/32"], help="query heads / key heads")
    parser.add_argument("--nodes", nargs="+", type=int, default=[60, 8, 1])
    parser.add_argument("--prefix", nargs="+", type=int, default=[128, 300, 1000, 8000], help="rows of the prefix")
    given = options_of(parser, argv, heads=["4/2"], nodes=[3], prefix=[16])
    if DEVICE != "cuda" and not given.miniature:
        parser.error("this needs a GPU; without one there is --miniature")
    kept: list[Row] = []
    with torch.inference_mode():
        measured = (kept.append(row) or row for row in rows_of(given))
        report(measured, environment(DEVICE, given, "heads", "nodes", "prefix"), given.json)
    fewest, tiles = best_choice(kept)
    print(f"best for all: MIN_SPLIT {fewest}, tiles {tiles}; now {kernel.MIN_SPLIT}, usual")


if __name__ == "__main__":
    main()
