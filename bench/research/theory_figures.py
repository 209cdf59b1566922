"""The figures of theory.py: how its results are drawn."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

BLOCK = 32
PREFIXES = (0, 128, 512, 2048, 8192, 32768)
ORDERS = ("insertion", "depth_first", "heavy_path")
# Curves, by name.
BEST, SEQUENCES, CHAIN, RACE = "best tree", "k sequences", "chain", "best tree, race"
SPECINFER, BATCH = "<1, 1, 3, 1, ...>", "batch"
# Okabe and Ito's palette, which colour-blind readers tell apart.
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
RED, PURPLE, BLACK = "#D55E00", "#CC79A7", "#000000"
SHAPES = {
    BEST: (BLUE, "best tree (Sequoia)"), "binary": (GREEN, "full binary"), "4-ary": (PURPLE, "full 4-ary"),
    SEQUENCES: (ORANGE, "k sequences, best k"), SPECINFER: (SKY, "SpecInfer's 1, 1, 3, 1, ..."), CHAIN: (RED, "chain"),
    BATCH: (BLACK, "batch"),
}  # fmt: skip
LIMITS = {
    RACE: (BLUE, "best tree"), "paper": (PURPLE, "(log |V| + log n) / H"), "leaves": (RED, "leaf entropy"),
    "merged": (SKY, "ERSD, lemma 4.2"), "renewal": (GREEN, "renewal"), "moments": (ORANGE, "moments"),
    "slope": (BLACK, "log n / H"),
}  # fmt: skip
DECODED = {
    BEST: (BLUE, "o", "best tree, recursive rejection"), RACE: (GREEN, "s", "best tree, race"),
    SEQUENCES: (ORANGE, "^", "k sequences"), CHAIN: (RED, "D", "chain"),
}  # fmt: skip


def draw_figures(results: dict, folder: Path) -> None:
    """Draw the results of theory.py's `measure`, each figure to theory-<name>.png in the folder."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    temperature = results["growth"]["temperature"]
    for name, draw in FIGURES.items():
        result = results[name]
        rows, columns = (2, 2) if name == "growth" else (1, 1 if name == "decoding" else len(result))
        figure, panels = pyplot.subplots(
            rows, columns, figsize=(1.5 + 4.8 * columns, 0.8 + 4.2 * rows), squeeze=False, layout="constrained"
        )
        title, across, up = draw(panels, result)
        figure.suptitle(f"{title}: the demo pair" + f" at temperature {temperature}" * (name in ("growth", "decoding")))
        for axes in panels.flat:
            axes.set(xlabel=across, ylabel=up)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(fontsize=8, frameon=False)
        figure.savefig(folder / f"theory-{name}.png", dpi=100)
        pyplot.close(figure)


Said = tuple[str, str, str]  # the title, and the labels of the axes


def by_temperature(panels: Any, result: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    for axes, (name, found) in zip(panels[0], result.items(), strict=True):
        axes.set_title(name if name[0].isalpha() else f"temperature {name}", fontsize=11)
        yield axes, found


def size_axis(axes: Any, sizes: Sequence[int]) -> None:
    shown = [size for size in sizes if math.log2(size) % 1 == 0]
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [f"{size:,}" for size in shown], fontsize=8)


def draw_growth(panels: Any, result: dict) -> Said:
    """Above: what trees yield, and bounds (dashed: what shapes stay below). Below: what twice the nodes bring."""
    for column, (looks, curves) in enumerate(((SHAPES, result["shapes"]), (LIMITS, result["limits"]))):
        above, below = panels[:, column]
        for name, (colour, text) in looks.items():
            curve, gains = curves[name], result["marginals"][name]
            look = {"color": colour, "linewidth": 2.4 if name in (BEST, RACE) else 1.6, "label": text}
            above.plot(list(curve), list(curve.values()), **look)
            if looks is SHAPES or name in (RACE, "merged", "slope"):
                below.plot(list(gains), list(gains.values()), **look)
            if looks is SHAPES and name in result["caps"]:
                above.hlines(result["caps"][name], 2, max(curve), colour, "--", linewidth=0.8)
        above.set_title(f"races: bounds on every tree; H = {result['entropy']:.2f} bits" if column else "shapes")
        below.set_title("what twice the nodes bring" + ", in the end 1 / H" * column)
        for axes in (above, below):
            size_axis(axes, list(result["shapes"][BEST]))
    return "What a tree of n nodes yields", "nodes of the tree, root included", "tokens per target forward"


def draw_decoding(panels: Any, result: dict[str, list[dict]]) -> Said:
    axes = panels[0, 0]
    for name, (colour, marker, text) in DECODED.items():
        nodes, expected, decoded = ([row[key] for row in result[name]] for key in ("nodes", "expected", "decoded"))
        errors = [2 * row["standard_error"] for row in result[name]]
        axes.plot(nodes, expected, color=colour, linewidth=1.6)
        axes.errorbar(nodes, decoded, errors, linestyle="none", color=colour, marker=marker, capsize=2, label=text)
    size_axis(axes, [row["nodes"] for row in result[BEST]])
    said = "Expected (lines) and decoded (marks, two standard errors)"
    return said, "nodes of the tree, root included", "tokens per target forward"


def draw_draft_probability(panels: Any, result: dict[str, list[dict]]) -> Said:
    for axes, rows in by_temperature(panels, result):
        draft = [row["draft"] for row in rows]
        axes.bar(draft, [row["share"] for row in rows], width=0.06, color="0.75", label="share of draws")
        quartiles = [row["low"] for row in rows], [row["high"] for row in rows]
        axes.fill_between(draft, *quartiles, color=SKY, alpha=0.35, linewidth=0, label="middle half")
        axes.plot(draft, [row["acceptance"] for row in rows], color=BLUE, marker="o", label="mean")
        axes.plot([0, 1], [0, 1], color="0.3", linestyle=":", label="= draft probability")
    said = "A drawn token's acceptance by the probability that the draft gave it"
    return said, "draft probability", "probability of acceptance, min(1, P / Q)"


def prefix_blocks(nodes: int, prefix: int) -> int:
    """Blocks between the nodes and a prefix, all full: they are the same in any order."""
    return math.ceil(nodes / BLOCK) * math.ceil(prefix / BLOCK)


def draw_blocks(panels: Any, result: dict[str, dict]) -> Said:
    places = range(len(PREFIXES))
    for axes, tree in by_temperature(panels, result):
        prefix = [prefix_blocks(tree["nodes"], rows) for rows in PREFIXES]
        axes.plot(places[1:], prefix[1:], color="0.5", linestyle=":", label="prefix alone")
        for order, colour in zip(ORDERS, (RED, ORANGE, BLUE), strict=True):
            total = [tree["tree"][order] + each for each in prefix]
            label = f"{order.replace('_', '-')}: {total[0]:,.0f} without a prefix"
            axes.plot(places, total, color=colour, marker="o", label=label)
        axes.set_yscale("log")
        axes.set_xticks(places, [f"{rows:,}" for rows in PREFIXES])
    said = "Node order saves blocks of the tree, which a long prefix outweighs"
    return said, "rows of the prefix", f"occupied {BLOCK} x {BLOCK} blocks, tree and prefix"


def draw_races(panels: Any, result: dict[str, dict]) -> Said:
    line = [place / 100 for place in range(101)]
    for axes, found in by_temperature(panels, result):
        points, mean = found["points"], found["mean"]
        axes.plot(line, line, color=BLACK, label=f"any coupling: 1 - TV, mean {mean['overlap']:.3f}")
        bound = [each / (2 - each) for each in line]
        axes.plot(line, bound, color=RED, label=f"(1 - TV) / (1 + TV); the bound's mean {mean['bound']:.3f}")
        look = {"s": 9, "color": BLUE, "alpha": 0.45, "label": f"race, mean {mean['race']:.3f}"}
        axes.scatter(points["overlap"], points["race"], **look)
    said = "One child: what it costs a race not to know the other law (points: positions)"
    return said, "draws accepted by greedy rejection, 1 - TV", "race's acceptance, exact"


def draw_entropy(panels: Any, result: dict[str, dict[str, list[float]]]) -> Said:
    kinds = {"finer": (PURPLE, "bound from E[log K]"), "index": (ORANGE, "H of index K, repeats counted"),
             "place": (BLUE, "H of place, distinct children")}  # fmt: skip
    high = 1.2 * max(max(points["divergence"]) for points in result.values())
    line = [0.01 * (high / 0.01) ** (place / 100) for place in range(101)]
    for axes, points in by_temperature(panels, result):
        axes.plot(line, line, color=BLACK, label="D, least for K")
        axes.plot(line, [each + math.log2(each + 2) + 2 for each in line], color=RED, label="D + log2(D + 2) + 2")
        for key, (colour, label) in kinds.items():
            axes.scatter(points["divergence"], points[key], s=20, color=colour, alpha=0.6, label=label)
        axes.set(xscale="log", yscale="log", ylim=(0.01, 1.6 * high))
    said = "What the index of a race carries, and its bounds (points: positions)"
    return said, "divergence D of target from draft, bits", "entropy, bits"


FIGURES = {
    "growth": draw_growth, "decoding": draw_decoding, "draft-probability": draw_draft_probability,
    "blocks": draw_blocks, "races": draw_races, "entropy": draw_entropy,
}  # fmt: skip
