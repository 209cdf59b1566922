"""Which tiles, and which fewest rows of a part of the prefix, make tree attention fastest on this GPU.

    python bench/tune_attention.py [--heads 32/8 32/32] [--nodes 60 8 1] [--prefix 128 300 1000 8000] [--json FILE]

A row for each shape, heads of 128 columns in bfloat16, and each choice:

rows   MIN_SPLIT of kernels/attention/kernel.py: a prefix with more rows has several parts, each with its own program
tiles  block of queries, block of keys, warps and stages, as `tiles_for` of kernels/attention/launch.py chooses; "usual"
       is what it chooses now
us     of one launch, of 32 or more in a CUDA graph that take turns in caches of their own. Together they read more than
       the second cache holds: keys come from memory, as in a pass
gain   the time of the usual choice over this one's

At the end it prints the choice with the best geometric mean of the gains over all shapes. A shape that some tiles are
not tried with, because it has few rows or no groups of heads, counts with its usual ones. Without a GPU only
--miniature runs, by PyTorch, whose time does not depend on the choice.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from common import (
    COLD,
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

LAYERS = 32  # the fewest launches in a graph, each with a cache of its own
HEAD_DIM = 128
FEWEST = (64, 128, 256)
TILES = (Tiles(64, 64, 4, 3), Tiles(64, 32, 4, 4), Tiles(128, 64, 8, 3))  # besides the usual ones
USUAL_TILES: Any = launch.tiles_for


class Attention(NamedTuple):
    """Attention of a tree in each of some caches; run: all of these launches; launches: how many."""

    run: Run
    launches: int


def caches_of(nbytes: int) -> int:
    """How many caches take turns, where a launch reads so many bytes of its own."""
    return LAYERS if DEVICE == "cpu" else max(LAYERS, -(-COLD // nbytes))


def attention_of(heads: str, nodes: int, prefix: int, number: int) -> Attention:
    """Attention of a tree of `nodes` nodes after `prefix` rows, in caches as long as those of a workspace.

    number: of the choice. A launch is planned once for equal shapes and strides, so each choice has other strides
    """
    query_heads, key_heads = map(int, heads.split("/"))
    end = random_tree(nodes).reordered("heavy_path")[0].subtree_end.to(DEVICE)
    length = torch.tensor(prefix, device=DEVICE)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    query = torch.randn(1, nodes, query_heads, HEAD_DIM, device=DEVICE, dtype=dtype).transpose(1, 2)
    count = caches_of(2 * key_heads * (prefix + nodes) * HEAD_DIM * dtype.itemsize)
    cache_rows = -(-(prefix + nodes) // 1024) * 1024
    room = torch.randn(2, count, 1, key_heads, cache_rows + 8 * number, HEAD_DIM, device=DEVICE, dtype=dtype)
    keys, values = room[..., :cache_rows, :]

    def run() -> None:
        for key, value in zip(keys, values, strict=True):
            tree_attention(query, key, value, prefix_length=length, subtree_end=end)

    return Attention(run, count)


def chosen(fewest: int, tiles: Tiles | None) -> None:
    """Have later launches use these, and the usual tiles if None is given."""
    launch.MIN_SPLIT = fewest
    launch.tiles_for = USUAL_TILES if tiles is None else lambda *_: tiles


def rows_of(given: argparse.Namespace) -> Iterator[Row]:
    """One row of results for each shape and choice; the usual one comes first."""
    for heads, nodes, prefix in product(given.heads, given.nodes, given.prefix):
        group = int(heads.split("/")[0]) // int(heads.split("/")[1])
        tiles = [None] if nodes * group <= 16 else [None, *(each for each in TILES if each.block_m <= 64 or group > 1)]
        choices = [(kernel.MIN_SPLIT, None), *((fewest, each) for each, fewest in product(tiles, FEWEST))]
        usual = 0.0
        for number, (fewest, each) in enumerate(dict.fromkeys(choices)):
            chosen(fewest, each)
            attention = attention_of(heads, nodes, prefix, number)
            seconds = gpu_seconds(captured(attention.run)) if DEVICE == "cuda" else timed(attention.run)[0]
            usual = usual or seconds
            yield {
                "heads": heads,
                "nodes": nodes,
                "prefix": prefix,
                "rows": fewest,
                "tiles": "usual" if each is None else "/".join(map(str, each)),
                "us": round(1e6 * seconds / attention.launches, 2),
                "gain": round(usual / seconds, 3),
            }
    chosen(kernel.MIN_SPLIT, None)


def best_choice(rows: Sequence[Row]) -> tuple[int, str] | None:
    """The choice whose geometric mean of gains over all shapes is the best; None if no shape has all usual tiles.

    A shape that has no gain of a choice counts with the usual tiles and as many rows.
    """
    of_shapes: dict[tuple[str, int, int], dict[tuple[int, str], float]] = defaultdict(dict)
    for row in rows:
        of_shapes[row["heads"], row["nodes"], row["prefix"]][row["rows"], row["tiles"]] = row["gain"]
    whole = [gains for gains in of_shapes.values() if all((fewest, "usual") in gains for fewest in FEWEST)]

    def mean(choice: tuple[int, str]) -> float:
        fewest, _ = choice
        gains = [of_shape.get(choice, of_shape[fewest, "usual"]) for of_shape in whole]
        return prod(gains) ** (1 / len(gains))

    choices = dict.fromkeys(choice for of_shape in whole for choice in of_shape)
    return max(choices, key=mean, default=None)


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
    best = best_choice(kept)
    if best is not None:
        print(f"best for all: MIN_SPLIT {best[0]}, tiles {best[1]}; now {kernel.MIN_SPLIT}, usual")


if __name__ == "__main__":
    main()
