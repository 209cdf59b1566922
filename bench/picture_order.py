"""The picture of node orders: one tree, its ancestor mask and the blocks that hold any of it, in two orders."""

from pathlib import Path

import torch
from common import random_tree
from svg import Drawing
from torch import Tensor

from heavypath.speculative import TokenTree

NODES, BLOCK = 96, 8
CELL, GAP, MARGIN = 4.0, 32.0, 26.0  # side of a pair of nodes; between the two halves; around them
SIDE = NODES * CELL
TOP, TREE = 58.0, 116.0  # above the trees, and their height
SAID = {
    "insertion": (
        "A column is a node. The rows that",
        "see it are its subtree, which is",
        "scattered over later rows.",
    ),
    "heavy_path": (
        "In depth-first order a subtree is",
        "one interval: its end, an integer",
        "for each node, is the whole mask.",
    ),
}


def draw(path: Path) -> None:
    """Draw it to this file."""
    inserted = random_tree(NODES)
    heavy = inserted.reordered("heavy_path")[0]
    width, height = 2 * MARGIN + 2 * SIDE + GAP, TOP + TREE + 16 + SIDE + 46
    drawing = Drawing(width, height, "One tree and its ancestor mask, in insertion order and in heavy-path order")
    half(drawing, MARGIN, inserted, "Insertion order", SAID["insertion"])
    half(drawing, MARGIN + SIDE + GAP, heavy, "Heavy-path order", SAID["heavy_path"])
    legend(drawing, height - 17)
    drawing.save(path)


def half(drawing: Drawing, left: float, tree: TokenTree, name: str, said: tuple[str, ...]) -> None:
    """The tree, each node over its column of the mask; the mask, and its blocks that are not empty."""
    occupied, blocks = tree.occupied_blocks(BLOCK), (NODES // BLOCK) * (NODES // BLOCK + 1) // 2
    drawing.text(left, 35, name, size=18, style="bold")
    drawing.text(
        left + SIDE, 35, f"{occupied} of {blocks} blocks", size=18, anchor="end", style="bold", colour="target"
    )
    path = set(heavy_path(tree))
    draw_tree(drawing, left, tree, path)
    draw_mask(drawing, left, TOP + TREE + 16, tree.mask(), path)
    for line, words in enumerate(said):
        drawing.text(left + SIDE - 12, TOP + TREE + 16 + 26 + 20 * line, words, size=14, anchor="end", colour="dim")


def draw_tree(drawing: Drawing, left: float, tree: TokenTree, path: set[int]) -> None:
    """From left to right the nodes by number, from top to bottom by depth."""
    parents, step = tree.parents.tolist(), (TREE - 8) / tree.depth
    at = [(left + (node + 0.5) * CELL, TOP + 4 + step * depth) for node, depth in enumerate(tree.depths.tolist())]

    def edge(node: int) -> str:
        (x, y), (above_x, above_y) = at[node], at[parents[node]]
        bend = min(8.0, x - above_x, step)
        return f"M{above_x:g} {above_y:.1f}H{x - bend:g}Q{x:g} {above_y:.1f} {x:g} {above_y + bend:.1f}V{y:.1f}"

    others = [node for node in range(1, NODES) if node not in path]
    drawing.path("".join(edge(node) for node in others), stroke="faint")
    drawing.path("".join(edge(node) for node in sorted(path - {0})), stroke="recovered", thickness=2)
    drawing.dots([at[node] for node in others], 1.9, "dim")
    drawing.dots([at[node] for node in sorted(path)], 2.6, "recovered")


def draw_mask(drawing: Drawing, left: float, top: float, mask: Tensor, path: set[int]) -> None:
    """mask bool [NODES, NODES]: what each row sees, column by column, on the blocks that hold any of it."""
    drawing.rect(left, top, SIDE, SIDE, fill="panel", stroke="edge")
    count, side = NODES // BLOCK, BLOCK * CELL
    blocks = mask.view(count, BLOCK, count, BLOCK).any(3).any(1).nonzero().tolist()
    drawing.path(
        "".join(
            f"M{left + column * side:g} {top + row * side:g}h{side:g}v{side:g}h{-side:g}z" for row, column in blocks
        ),
        fill="target-tint",
        stroke="target",
        thickness=0.7,
    )
    for colour, columns in (("target", set(range(NODES)) - path), ("recovered", path)):
        drawing.path(
            "".join(
                f"M{left + column * CELL + 0.5:g} {top + begin * CELL + 0.25:g}h{CELL - 1:g}"
                f"v{(end - begin) * CELL - 0.5:g}h{1 - CELL:g}z"
                for column in sorted(columns)
                for begin, end in runs(mask[:, column])
            ),
            fill=colour,
        )


def legend(drawing: Drawing, y: float) -> None:
    drawing.rect(MARGIN, y - 10, 12, 12, fill="target-tint", stroke="target", thickness=0.7)
    drawing.text(MARGIN + 20, y, f"{BLOCK} x {BLOCK} block that attention reads", size=14, colour="dim")
    middle = MARGIN + SIDE + GAP
    drawing.path(f"M{middle} {y - 4}h16", stroke="recovered", thickness=2)
    drawing.text(middle + 24, y, "heavy path: to the child with the largest subtree", size=14, colour="dim")


def heavy_path(tree: TokenTree) -> list[int]:
    """The nodes from the root down, always to the child with the largest subtree."""
    sizes, path = tree.subtree_size, [0]
    while True:
        children = (tree.parents == path[-1]).nonzero().flatten()
        if not len(children):
            return path
        path.append(int(children[sizes[children].argmax()]))


def runs(column: Tensor) -> list[tuple[int, int]]:
    """Begin and end of each run of true values."""
    padded = torch.cat([torch.zeros(1), column.float(), torch.zeros(1)]).diff()
    return list(
        zip((padded == 1).nonzero().flatten().tolist(), (padded == -1).nonzero().flatten().tolist(), strict=True)
    )
