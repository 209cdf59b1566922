"""Draw a token tree as SVG: levels from left to right, siblings in draw order from top to bottom.

A node's area and the width of the edge to it grow with the node's probability of being accepted; its colour shows the
logarithm of that. Subtrees are placed as close to each other as possible. For each subtree the layout keeps how far it
reaches up and down on every level below its root (its contours, Reingold and Tilford 1981). Each sibling is placed just
below the contours of those before it, and the parent halfway between its first and its last child. This takes O(nodes *
depth) time and memory.

The colours and the grey of the labels can be read on light and on dark backgrounds.
"""

import math
from collections.abc import Sequence
from html import escape
from itertools import zip_longest

from torch import Tensor

from heavypath.speculative.trees.tree import TokenTree

LARGEST = 13.0  # radius of a node of probability 1
SMALLEST = 2.2  # radius at probability 0
PLAIN = 5.0  # radius without probabilities
GAP = 4.0  # between neighbours on a level
LEVEL = 64.0  # distance between levels
LETTER = 6.4  # the width of a letter
LINE = 13.0  # the height of a line of text
MARGIN = 16.0  # around the drawing
LONGEST = 14  # letters of a label; a longer one is cut off, and shown in full when the pointer is over the node
DECADES = 3  # the powers of ten that the colours span
COLOURS = (107, 132, 172), (176, 92, 158), (242, 136, 56)  # at 10^-DECADES, half way between, and at 1
GREY = "#7c828b"


def tree_svg(
    tree: TokenTree, labels: Sequence[str] | None = None, probabilities: Sequence[float] | Tensor | None = None
) -> str:
    """A drawing of the tree as SVG, in a string.

    labels: a string for each node, such as its token
    probabilities: each node's probability of being accepted, 1 for the root, as `node_probabilities` returns them.
        Their sum, the expected tokens of a step, is written below the drawing

    Raises ValueError for another number of labels or probabilities, and for probabilities outside [0, 1].
    """
    nodes = len(tree)
    chances = None if probabilities is None else [float(chance) for chance in probabilities]
    for name, values in ("labels", labels), ("probabilities", chances):
        if values is not None and len(values) != nodes:
            raise ValueError(f"{name} must hold one for each of {nodes} nodes, got {len(values)}")
    if chances is not None and not all(0 <= chance <= 1 for chance in chances):
        raise ValueError(f"probabilities must lie in [0, 1], got {chances}")
    texts = None if labels is None else [_printable(label) for label in labels]

    parents = tree.parents.tolist()
    ranks = tree.ranks.tolist()
    depths = tree.depths.tolist()
    radii = [PLAIN] * nodes if chances is None else [max(SMALLEST, LARGEST * math.sqrt(chance)) for chance in chances]
    above = [radius + (LINE if texts and texts[node] else 0) for node, radius in enumerate(radii)]
    ys = layout(parents, ranks, above, radii)
    shift = MARGIN - min(y - reach for y, reach in zip(ys, above, strict=True))
    ys = [y + shift for y in ys]
    letters = max((min(len(text), LONGEST) for text in texts or ()), default=0) * LETTER
    level = max(LEVEL, letters + 2 * GAP)
    left = MARGIN + max(radii[0], letters / 2)
    xs = [left + level * depth for depth in depths]

    caption = f"{nodes} nodes, depth {tree.depth}" if nodes > 1 else "1 node"
    if chances is not None:
        caption = f"{sum(chances):.2f} tokens expected a step · {caption}"
    bottom = max(y + radius for y, radius in zip(ys, radii, strict=True)) + MARGIN
    width = max(max(xs) + left, 2 * MARGIN + LETTER * len(caption), 0 if chances is None else 2 * MARGIN + 280)
    height = bottom + 2 * LINE + (0 if chances is None else 2 * LINE)

    edges = []
    circles = []
    captions = []
    for node in range(nodes):
        x = xs[node]
        y = ys[node]
        chance = None if chances is None else chances[node]
        said = f"node {node}, rank {ranks[node]}" if node else "root"
        said += "" if chance is None else f", accepted with probability {chance:.4g}"
        said += f": {texts[node]}" if texts and texts[node] else ""
        circles.append(
            f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{radii[node]:.2f}" fill="{_colour(chance)}">'
            f"<title>{escape(said)}</title></circle>"
        )
        if node:
            from_x = xs[parents[node]]
            from_y = ys[parents[node]]
            middle = x - level / 2
            edges.append(
                f'<path d="M{from_x:.2f} {from_y:.2f}C{middle:.2f} {from_y:.2f} {middle:.2f} {y:.2f} {x:.2f} {y:.2f}"'
                f' stroke="{_colour(chance)}" stroke-width="{1.2 if chance is None else 0.8 + 6 * chance:.2f}"/>'
            )
        if texts and texts[node]:
            text = texts[node] if len(texts[node]) <= LONGEST else texts[node][: LONGEST - 1] + "…"
            captions.append(f'<text x="{x:.2f}" y="{y - radii[node] - 3:.2f}">{escape(text)}</text>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}"'
            f' viewBox="0 0 {width:.0f} {height:.0f}" role="img" font-family="system-ui, sans-serif" font-size="11">',
            f"<title>{escape(caption)}</title>",
            '<g fill="none" stroke-opacity="0.7">',
            *edges,
            "</g>",
            "<g>",
            *circles,
            "</g>",
            f'<g fill="{GREY}" text-anchor="middle" xml:space="preserve">',
            *captions,
            "</g>",
            f'<text x="{MARGIN}" y="{bottom + LINE:.2f}" fill="{GREY}" font-size="12">{escape(caption)}</text>',
            *([] if chances is None else _legend(bottom + 2 * LINE)),
            "</svg>\n",
        ]
    )


def _printable(label: str) -> str:
    """The label with control characters, which XML cannot contain, as Python escapes."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in label)


def layout(parents: list[int], ranks: list[int], above: list[float], below: list[float]) -> list[float]:
    """Place nodes so that subtrees do not overlap. Returns the vertical position of each node, downwards; 0 for node 0.

    parents, ranks: of each node; parents come before children
    above, below: how far the drawing of each node reaches up and down from its position
    """
    children: list[list[int]] = [[] for _ in parents]
    for node in range(1, len(parents)):
        children[parents[node]].append(node)
    place = [0.0] * len(parents)  # relative to the parent
    # How far each subtree reaches up and down, level by level, relative to its root.
    tops: list[list[float]] = [[]] * len(parents)
    bottoms: list[list[float]] = [[]] * len(parents)
    for node in reversed(range(len(parents))):
        siblings = sorted(children[node], key=ranks.__getitem__)
        top: list[float] = []
        bottom: list[float] = []
        for child in siblings:
            place[child] = max((end - begin + GAP for end, begin in zip(bottom, tops[child], strict=False)), default=0)
            bottom = [
                first if last is None else place[child] + last for first, last in zip_longest(bottom, bottoms[child])
            ]
            top += [place[child] + begin for begin in tops[child][len(top) :]]
            tops[child], bottoms[child] = [], []
        middle = (place[siblings[0]] + place[siblings[-1]]) / 2 if siblings else 0
        for child in siblings:
            place[child] -= middle
        tops[node] = [-above[node], *(begin - middle for begin in top)]
        bottoms[node] = [below[node], *(end - middle for end in bottom)]
    for node in range(1, len(parents)):
        place[node] += place[parents[node]]
    return place


def _colour(chance: float | None) -> str:
    scale = 0.5 if chance is None else 1 + math.log10(max(chance, 10**-DECADES)) / DECADES
    start, share = (0, 2 * scale) if scale < 0.5 else (1, 2 * scale - 1)
    red, green, blue = (
        round(one + share * (other - one)) for one, other in zip(COLOURS[start], COLOURS[start + 1], strict=True)
    )
    return f"#{red:02x}{green:02x}{blue:02x}"


def _legend(y: float) -> list[str]:
    stops = (f'<stop offset="{place}" stop-color="{_colour(10 ** (DECADES * (place - 1)))}"/>' for place in (0, 0.5, 1))
    return [
        f'<linearGradient id="probability">{"".join(stops)}</linearGradient>',
        f'<rect x="{MARGIN}" y="{y - 1:.2f}" width="120" height="7" rx="3.5" fill="url(#probability)"/>',
        f'<g fill="{GREY}">',
        f'<text x="{MARGIN}" y="{y + LINE + 5:.2f}">{10**-DECADES:g}</text>',
        f'<text x="{MARGIN + 120}" y="{y + LINE + 5:.2f}" text-anchor="end">1</text>',
        f'<text x="{MARGIN + 130}" y="{y + 6:.2f}">probability of acceptance</text>',
        "</g>",
    ]
