"""The figures of theory.py: how its results are drawn."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch

BLOCK = 32
PREFIXES = (0, 128, 512, 2048, 8192, 32768)
ORDERS = ("insertion", "depth_first", "heavy_path")
# Curves, by name.
BEST, SEQUENCES, CHAIN, RACE = "best tree", "k sequences", "chain", "best tree, race"
SPECINFER, BATCH = "<1, 1, 3, 1, ...>", "batch"
# Okabe and Ito's palette, which colour-blind readers tell apart.
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
RED, PURPLE, BLACK = "#D55E00", "#CC79A7", "#000000"


def draw_figures(results: dict, folder: Path) -> None:
    """Draw the results of theory.py's `measure`, each figure to theory-<name>.png in the folder."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    temperature = results["growth"]["temperature"]
    for name, figure in {
        "growth": draw_growth(pyplot, results["growth"]),
        "decoding": draw_decoding(pyplot, results["decoding"], temperature),
        "draft-probability": draw_draft_probability(pyplot, results["draft-probability"]),
        "blocks": draw_blocks(pyplot, results["blocks"]),
        "races": draw_races(pyplot, results["races"]),
        "entropy": draw_entropy(pyplot, results["entropy"]),
    }.items():
        figure.savefig(folder / f"theory-{name}.png", dpi=100)
        pyplot.close(figure)


def label_ends(axes, labels: Sequence[tuple[float, float, str, str]], *, gap: float) -> None:
    """Write labels (x, y, text, colour) to the right of their points, at least `gap` of the panel's height apart."""
    axes.figure.canvas.draw()  # settles the axes, which the transforms below depend on
    transform = axes.transData + axes.transAxes.inverted()
    points = [(*transform.transform((x, y)).tolist(), text, color) for x, y, text, color in labels]
    points.sort(key=lambda point: point[1])
    heights = spaced([float(point[1]) for point in points], gap)
    for (left, _, text, color), height in zip(points, heights, strict=True):
        axes.text(left + 0.015, height, text, transform=axes.transAxes, color=color, va="center", fontsize=9)


def spaced(heights: Sequence[float], gap: float) -> list[float]:
    """Rising heights moved apart until each is at least `gap` from the next, and no further than that takes."""
    moved = list(heights)
    for _ in range(200):
        for low in range(len(moved) - 1):
            lack = gap - (moved[low + 1] - moved[low])
            if lack > 0:
                moved[low] -= lack / 2
                moved[low + 1] += lack / 2
    return moved


def tidy(axes, **options) -> None:
    axes.set(**options)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def size_axis(axes, sizes: Sequence[int], room: float) -> None:
    """Put sizes on a logarithmic axis, with room for labels on the right."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(sizes) * 0.9, max(sizes) * max(4, max(sizes) / min(sizes)) ** room)
    shown = [size for size in sizes if math.log2(size) % 1 == 0]
    axes.set_xticks(shown, [f"{size:,}" for size in shown], fontsize=8)
    axes.minorticks_off()


def draw_growth(pyplot, result: dict):
    """Above: what trees yield, and bounds. Below: what twice the nodes bring, in the same colours."""
    figure, ((left, right), (left_below, right_below)) = pyplot.subplots(
        2, 2, figsize=(12.5, 8.6), layout="constrained", height_ratios=(5, 3.4)
    )
    sizes = list(result["shapes"][BEST])
    looks = {
        BEST: (BLUE, "best tree (Sequoia)"),
        "binary": (GREEN, "full binary"),
        "4-ary": (PURPLE, "full 4-ary"),
        SEQUENCES: (ORANGE, "k sequences, best k"),
        SPECINFER: (SKY, "SpecInfer's 1, 1, 3, 1, ..."),
        CHAIN: (RED, "chain"),
        BATCH: (BLACK, "batch"),
    }
    labels, ends = [], []
    for name, (color, text) in looks.items():
        curve, gains = result["shapes"][name], result["marginals"][name]
        look = {"color": color, "linewidth": 2.4 if name == BEST else 1.6}
        look |= {"marker": "o", "markersize": 4} if "ary" in name else {}
        left.plot(list(curve), list(curve.values()), **look)
        left_below.plot(list(gains), list(gains.values()), **look)
        end = max(curve) if name == BATCH else max(sizes)
        labels.append((end, [*curve.values()][-1], text, color))
        if name in result["caps"]:
            left.hlines(result["caps"][name], 2, end, color, "--", linewidth=0.8)
    tidy(left, ylabel="expected tokens per target forward", ylim=(1, None))
    left.set_title("shapes, and what they stay below (dashed); planned trees grow on", fontsize=11)
    left_below.set_title("shapes: what twice the nodes bring", fontsize=11)
    tidy(left_below, xlabel="nodes of the tree, root included", ylabel="tokens for each doubling", ylim=(0, None))

    looks = {
        RACE: (BLUE, "-", "best tree"),
        "paper": (PURPLE, "-", "(log |V| + log n) / H"),
        "leaves": (RED, "-", "leaf entropy"),
        "merged": (SKY, "-", "ERSD, lemma 4.2"),
        "renewal": (GREEN, "-", "renewal"),
        "moments": (ORANGE, "-", "moments"),
        "slope": (BLACK, ":", "log n / H"),
    }
    for name, (color, line, text) in looks.items():
        curve, gains = result["limits"][name], result["marginals"][name]
        look = {"color": color, "linestyle": line, "linewidth": 2.4 if name == RACE else 1.6}
        right.plot(list(curve), list(curve.values()), **look)
        if name in (RACE, "merged", "slope"):
            right_below.plot(list(gains), list(gains.values()), **look)
        ends.append((max(curve), [*curve.values()][-1], text, color))
    tidy(right, ylim=(0, None))
    right.set_title(f"races: upper bounds on every tree; H = {result['entropy']:.2f} bits", fontsize=11)
    right_below.set_title("races: what twice the nodes bring, in the end 1 / H", fontsize=11)
    tidy(right_below, xlabel="nodes of the tree, root included", ylim=(0, None))
    for axes in (left, right, left_below, right_below):
        size_axis(axes, sizes, 0.36)
    figure.suptitle(f"What a tree of n nodes yields: the demo pair at temperature {result['temperature']}")
    label_ends(left, labels, gap=0.05)
    label_ends(right, ends, gap=0.05)
    return figure


def draw_decoding(pyplot, result: dict[str, list[dict]], temperature: float):
    figure, axes = pyplot.subplots(figsize=(8.2, 5), layout="constrained")
    looks = {
        BEST: (BLUE, "o", -0.06, "best tree, recursive rejection"),
        RACE: (GREEN, "s", 0.06, "best tree, race"),
        SEQUENCES: (ORANGE, "^", 0.0, "k sequences"),
        CHAIN: (RED, "D", 0.12, "chain"),
    }
    labels = []
    for name, (color, marker, aside, text) in looks.items():
        rows = result[name]
        if rows:
            nodes, expected, decoded = ([row[key] for row in rows] for key in ("nodes", "expected", "decoded"))
            axes.plot(nodes, expected, color=color, linewidth=1.6)
            errors = [2 * row["standard_error"] for row in rows]
            beside = [size * 2**aside for size in nodes]
            look = {"color": color, "marker": marker, "markersize": 5, "elinewidth": 1, "capsize": 2}
            axes.errorbar(beside, decoded, errors, linestyle="none", **look)
            labels.append((nodes[-1] * 2**0.12, expected[-1], text, color))
    sizes = [2**power for power in range(1, 12) if 2**power <= max(row["nodes"] for row in result[BEST])]
    tidy(axes, xlabel="nodes of the tree, root included", ylabel="tokens per target forward")
    size_axis(axes, sizes, 0.42)
    axes.set_title(
        f"Expected (lines) and decoded (marks, two standard errors): the demo pair at temperature {temperature}",
        fontsize=11,
    )
    label_ends(axes, labels, gap=0.05)
    return figure


def draw_draft_probability(pyplot, result: dict[str, list[dict]]):
    figure, panels = pyplot.subplots(
        1, len(result), figsize=(5 * len(result), 4.6), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (temperature, rows) in zip(panels[0], result.items(), strict=True):
        draft, means, low, high, share = (
            [row[key] for row in rows] for key in ("draft", "acceptance", "low", "high", "share")
        )
        axes.bar(draft, share, width=0.06, color="0.75", zorder=1)
        axes.fill_between(draft, low, high, color=SKY, alpha=0.35, linewidth=0)
        axes.plot(draft, means, color=BLUE, marker="o", linewidth=2)
        axes.plot([0, 1], [0, 1], color="0.3", linestyle=":", linewidth=1.2)
        axes.text(0.15, 0.93, "middle half", color="#1f6f9f", fontsize=9)
        axes.text(0.15, 0.67, "mean", color=BLUE, fontsize=9, weight="bold")
        axes.text(0.43, 0.36, "= draft probability", color="0.25", fontsize=9)
        axes.text(0.15, 0.12, "share of draws", color="0.3", fontsize=9)
        tidy(axes, xlabel="probability that the draft gave the token", title=f"temperature {temperature}")
        axes.set(xlim=(0, 1), ylim=(0, 1.02))
    panels[0][0].set_ylabel("probability of acceptance, min(1, P / Q)")
    figure.suptitle("A drawn token's acceptance by the probability that the draft gave it: the demo pair", fontsize=12)
    return figure


def prefix_blocks(nodes: int, prefix: int) -> int:
    """Blocks between the nodes and a prefix, all full: they are the same in any order."""
    return math.ceil(nodes / BLOCK) * math.ceil(prefix / BLOCK)


def draw_blocks(pyplot, result: dict[str, dict]):
    figure, panels = pyplot.subplots(
        1, len(result), figsize=(5.6 * len(result), 4.8), sharey=True, squeeze=False, layout="constrained"
    )
    looks = {
        "insertion": (RED, "insertion"),
        "depth_first": (ORANGE, "depth-first"),
        "heavy_path": (BLUE, "heavy-path"),
    }
    places = range(len(PREFIXES))
    for axes, (name, tree) in zip(panels[0], result.items(), strict=True):
        prefix = [prefix_blocks(tree["nodes"], rows) for rows in PREFIXES]
        axes.plot(places[1:], prefix[1:], color="0.5", linestyle=":", linewidth=1.5)
        axes.annotate("prefix alone", (1, prefix[1]), (8, -8), textcoords="offset points", color="0.35", fontsize=9)
        for order, (color, label) in looks.items():
            total = [tree["tree"][order] + each for each in prefix]
            axes.plot(places, total, color=color, marker="o", markersize=4, linewidth=2)
            height = total[0] * {"insertion": 1.0, "depth_first": 1.15, "heavy_path": 0.9}[order]
            axes.text(-0.12, height, f"{label} {total[0]:,.0f}", color=color, fontsize=9, ha="right", va="center")
        for place, each in zip(places, prefix, strict=True):
            most, least = (tree["tree"][order] + each for order in ("insertion", "heavy_path"))
            options = {"textcoords": "offset points", "ha": "right", "fontsize": 9}
            axes.annotate(f"{most / least:.2f}x", (place, most), (4 if place < 2 else -2, 9), **options)
        tidy(axes, yscale="log", xlabel="prefix length, rows", title=f"{name}, {tree['nodes']:,} nodes")
        axes.set_xlim(-2.1, len(PREFIXES) - 0.6)
        axes.set_xticks(places, [f"{rows:,}" for rows in PREFIXES])
        axes.minorticks_off()
    panels[0][0].set_ylabel(f"occupied {BLOCK} x {BLOCK} blocks, tree and prefix")
    figure.suptitle(
        "Node order saves blocks of the tree, which a long prefix outweighs (factors: insertion / heavy-path)",
        fontsize=12,
    )
    return figure


def draw_races(pyplot, result: dict[str, dict]):
    figure, panels = pyplot.subplots(
        1, len(result), figsize=(5 * len(result), 5), sharey=True, squeeze=False, layout="constrained"
    )
    line = torch.linspace(0, 1, 101).tolist()
    for axes, (temperature, at) in zip(panels[0], result.items(), strict=True):
        axes.plot(line, line, color=BLACK, linewidth=1.3)
        axes.plot(line, [each / (2 - each) for each in line], color=RED, linewidth=1.6)
        axes.scatter(at["points"]["overlap"], at["points"]["race"], s=9, color=BLUE, alpha=0.45, linewidths=0)
        axes.text(0.38, 0.47, "any coupling: 1 - TV", rotation=45, ha="center", va="center", fontsize=9)
        axes.text(0.63, 0.36, "(1 - TV) / (1 + TV)", color=RED, fontsize=9)
        names = {"overlap": "1 - TV", "race": "race", "bound": "bound"}
        means = ", ".join(f"{text} {at['mean'][key]:.3f}" for key, text in names.items())
        axes.text(0.53, 0.03, f"means: {means}", fontsize=9, ha="center", transform=axes.transAxes)
        tidy(axes, xlabel="greedy rejection's acceptance, 1 - TV", title=f"temperature {temperature}")
        axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    panels[0][0].set_ylabel("race's acceptance, exact")
    figure.suptitle("One child: what it costs a race not to know the other law (a point is a position)", fontsize=12)
    return figure


def draw_entropy(pyplot, result: dict[str, dict[str, list[float]]]):
    figure, panels = pyplot.subplots(
        1, len(result), figsize=(5.6 * len(result), 5), sharey=True, squeeze=False, layout="constrained"
    )
    low, high = 0.01, 1.2 * max(max(points["divergence"]) for points in result.values())
    line = torch.logspace(math.log10(low), math.log10(high), 101).tolist()
    kinds = [
        ("finer", PURPLE, "D", "bound from E[log K]"),
        ("index", ORANGE, "^", "H of index K, repeats counted"),
        ("place", BLUE, "o", "H of place, distinct children"),
    ]
    for axes, (temperature, points) in zip(panels[0], result.items(), strict=True):
        axes.plot(line, line, color=BLACK, linewidth=1.3)
        axes.plot(line, [each + math.log2(each + 2) + 2 for each in line], color=RED, linewidth=1.6)
        for place, (key, color, marker, label) in enumerate(kinds):
            axes.scatter(points["divergence"], points[key], s=11, color=color, marker=marker, alpha=0.6, linewidths=0)
            axes.scatter(0.5, 0.17 - 0.055 * place, s=20, color=color, marker=marker, transform=axes.transAxes)
            axes.text(0.53, 0.17 - 0.055 * place, label, color=color, va="center", fontsize=9, transform=axes.transAxes)
        axes.text(low * 1.3, 3.45, "D + log2(D + 2) + 2", color=RED, fontsize=9)
        axes.text(low * 4.2, low * 3.0, "D, least for K", fontsize=9)
        tidy(axes, xlabel="divergence D of target from draft, bits", title=f"temperature {temperature}")
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, 1.6 * high))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
    panels[0][0].set_ylabel("entropy, bits")
    figure.suptitle("What the index of a race carries, and its bounds (points: positions)", fontsize=12)
    return figure
