"""The tables and figures of papers.py.

Of each group and verifier the most tokens per forward have a star, if they are more than any other row's by over two
standard errors of the difference, sqrt(a^2 + b^2) of the rows' own; in many groups none is.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import beside  # noqa: F401
from common import Row, figure_of, made

OWN = "own"  # the rule of the method's paper
VERIFIERS = (OWN, "held", "traversal", "held_traversal")  # the columns of tokens per forward
# Okabe and Ito's palette, which colour-blind readers tell apart.
BLUE, GREEN, ORANGE, RED = "#0072B2", "#009E73", "#E69F00", "#D55E00"
COLORS = (BLUE, GREEN, ORANGE, RED)
FAMILIES = {"SD": ("o", RED), "SpecTr": ("^", ORANGE), "RSD-C": ("s", GREEN), "RSD-S": ("D", BLUE)}


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A line of the table for each cell."""
    lines = []
    for row in rows:
        group = [other for other in rows if other["group"] == row["group"]]
        line = {name: row[name] for name in ("group", "label", "nodes", "levels")}
        for verifier in VERIFIERS:
            line[verifier] = "-"
            if verifier in row["tokens"]:
                star = "*" * (best_of(group, verifier) is row)
                line[verifier] = f"{row['tokens'][verifier]:.2f} ± {row['standard_error'][verifier]:.2f}{star}"
        speed = "-" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:.0f}"
        lines.append(line | {"MBSU": f"{row['mbsu']:.2f}", "tokens/s": speed})
    return lines


def best_of(group: Sequence[Mapping[str, Any]], verifier: str) -> Mapping[str, Any] | None:
    """The row that has more tokens per forward than any other; None where noise leaves that open, and for one alone."""
    best, *others = sorted(
        (row for row in group if verifier in row["tokens"]), key=lambda row: -row["tokens"][verifier]
    )
    return best if others and all(is_more(best, other, verifier) for other in others) else None


def is_more(row: Mapping[str, Any], other: Mapping[str, Any], verifier: str) -> bool:
    """Whether a row has more tokens per forward than another, by over two standard errors of the difference.

    The error takes rows to be independent. They share their prompts, so it is rather too large.
    """
    error = math.hypot(*(each["standard_error"][verifier] for each in (row, other)))
    return row["tokens"][verifier] - other["tokens"][verifier] > 2 * error


def draw(
    results: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path, parts: Mapping[str, Any] | None = None
) -> None:
    """Draw the tables that have a figure and a row, each to papers-<table>.png in the folder.

    parts: all results of parts, for papers-book.png, where there are any
    """
    for name, drawn in FIGURES.items():
        if results.get(name):
            figure = figure_of(10.5, 4.4)
            drawn(figure, results[name])
            figure.savefig(made(folder / f"papers-{name}.png"), dpi=100)
    if parts:
        figure = figure_of(11, 6.4)
        draw_parts(figure, parts)
        figure.savefig(made(folder / "papers-book.png"), dpi=100)


Rows = Sequence[Mapping[str, Any]]


def draw_rsd(figure: Any, rows: Rows) -> None:
    """Every shape of each family, by group: by the papers' rules, and by traversal."""
    panels, groups = figure.subplots(1, 2, sharey=True), [*dict.fromkeys(row["group"] for row in rows)]
    titles = {OWN: "the papers' rules: rejection, K-SEQ for SpecTr", "traversal": "traversal"}
    for axes, (verifier, title) in zip(panels, titles.items(), strict=True):
        for place, (family, (marker, color)) in enumerate(FAMILIES.items()):
            chosen = [row for row in rows if row["label"].split()[0] == family and verifier in row["tokens"]]
            at = []
            for row in chosen:
                near = [other for other in chosen if other["group"] == row["group"]]
                aside = 0.21 * (place - 1.5) + 0.045 * (near.index(row) - (len(near) - 1) / 2)
                at.append(groups.index(row["group"]) + aside)
            tokens, errors = ([row[key][verifier] for row in chosen] for key in ("tokens", "standard_error"))
            axes.errorbar(
                at, tokens, errors, color=color, marker=marker, markersize=4.5, linestyle="none", label=family
            )
        axes.set_xticks(range(len(groups)), groups)
        axes.grid(axis="y", alpha=0.3)
        axes.set_title(title, fontsize=11)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(FAMILIES), fontsize=9)
    panels[0].set_ylabel("tokens per target forward")


def draw_robustness(figure: Any, rows: Rows) -> None:
    """One tree at several temperatures and top-p, by each method's own rule and by held traversal."""
    axes = figure.subplots(1, 2, sharey=True, width_ratios=(5, 3))
    cut = [row for row in rows if "top_p" in row]
    whole = [
        row | {"top_p": 1.0} for row in rows if cut and row not in cut and row["temperature"] == cut[0]["temperature"]
    ]
    panels = {"temperature": [row for row in rows if row not in cut], "top_p": [*cut, *whole]}
    colors = {"sequoia": BLUE, "specinfer": ORANGE, "top-k": GREEN}
    lines = [(OWN, method) for method in colors] + [("held_traversal", method) for method in ("sequoia", "specinfer")]
    for panel, (name, shown) in zip(axes, panels.items(), strict=True):
        places = sorted({row[name] for row in shown})
        for number, (verifier, method) in enumerate(lines):
            chosen = [row for row in shown if row["method"] == method and verifier in row["tokens"]]
            at = [places.index(row[name]) + 0.04 * (number - 2) for row in chosen]  # beside each other
            tokens, errors = ([row[key][verifier] for row in chosen] for key in ("tokens", "standard_error"))
            label, style = (method, "-") if verifier == OWN else (f"{method}, held traversal", "--")
            panel.errorbar(at, tokens, errors, linestyle=style, color=colors[method], marker="o", label=label)
        panel.set_xticks(range(len(places)), [f"{place:g}" for place in places])
        panel.grid(axis="y", alpha=0.3)
    axes[0].set(xlabel="temperature", ylabel="tokens per target forward", ylim=(1, None))
    axes[1].set(xlabel=f"top-p, at temperature {cut[0]['temperature']:g}" if cut else "top-p")
    axes[0].legend(fontsize=9, loc="lower left", ncols=2)
    figure.suptitle("One tree of 64 nodes, planned for T = 0.6")


def draw_specinfer(figure: Any, rows: Rows) -> None:
    """Tokens per forward by width and depth, by rejection and by held traversal, in one scale of colour."""
    panels = figure.subplots(1, 2, sharey=True)
    widths, depths = ([*dict.fromkeys(int(row[key].split()[1]) for row in rows)] for key in ("group", "label"))
    most = max(value for row in rows for value in row["tokens"].values())
    titles = {OWN: "multi-step speculative sampling", "held_traversal": "held traversal"}
    for axes, (verifier, title) in zip(panels, titles.items(), strict=True):
        grid = [[float("nan")] * len(depths) for _ in widths]
        for row in rows:
            up, along = widths.index(int(row["group"].split()[1])), depths.index(int(row["label"].split()[1]))
            value = grid[up][along] = row["tokens"][verifier]
            color = "white" if value < 1 + 0.6 * (most - 1) else "black"
            axes.text(along, up, f"{value:.2f}", ha="center", va="center", color=color)
        image = axes.imshow(grid, origin="lower", cmap="viridis", vmin=1, vmax=most, aspect="auto")
        axes.set_xticks(range(len(depths)), depths)
        axes.set_yticks(range(len(widths)), widths)
        axes.set_xlabel("depth: tokens of a sequence")
        axes.set_title(title, fontsize=11)
    panels[0].set_ylabel("width: sequences")
    figure.colorbar(image, ax=panels, label="tokens per target forward", shrink=0.9)


def draw_dyspec(figure: Any, rows: Rows) -> None:
    """The nodes of each step's tree, in falling order."""
    axes = figure.subplots()
    groups, labels = ([*dict.fromkeys(row[key] for row in rows)] for key in ("group", "label"))
    for row in rows:
        color, style = COLORS[labels.index(row["label"]) % len(COLORS)], ("-", "--")[groups.index(row["group"]) % 2]
        label = f"{row['group']}, {row['label']}: {row['tokens'][OWN]:.2f} tokens"
        axes.plot(sorted(row["drafted"], reverse=True), color=color, linestyle=style, label=label)
    axes.set(xlabel="steps, largest trees first", ylabel="drafted nodes", yscale="log")
    axes.set_title("DySpec's trees grow while a slot is worth more than a threshold", fontsize=11)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    axes.grid(alpha=0.3)


def draw_parts(figure: Any, parts: Mapping[str, Any]) -> None:
    """Six figures of the papers from the parts: computed, and measured without decoding."""
    grown, proved, robust, bounded, costs, drawn = figure.subplots(2, 3).flatten()
    lines(grown, parts["sequoia-growth"]["rows"], "nodes", ("best", "sequences", "binary", "4-ary", "chain"))
    lines(proved, parts["sequoia-theorem"]["rows"], "nodes", ("upper", "best tree", "k* tree", "lower"))
    rows = [row for row in parts["sequoia-robustness"]["rows"] if row["top_p"] is None]
    for name, color in (("over specinfer", BLUE), ("over top-k", GREEN)):
        values, errors = zip(*(row[name] for row in rows), strict=True)
        robust.errorbar([row["temperature"] for row in rows], values, errors, color=color, marker="o", label=name)
    rows = [row for row in parts["sequoia-bounded"]["rows"] if row["draft"] == "the paper's constants"]
    lines(bounded, rows, "nodes", ("speedup", "speedup unbounded"))
    for row, color in zip(parts["sequoia-verification"]["rows"], (*COLORS, "0.4", "0.7", "black"), strict=False):
        sizes = [name for name in row if name.isdigit()]
        label = f"{row['target']}, {row['device']}"
        costs.plot(list(map(int, sizes)), [row[name] for name in sizes], color=color, label=label)
    rows = parts["dyspec-probabilities"]["rows"]
    lines(drawn, rows, "draft", ("accepted", "target"))
    titles = {
        grown: "Sequoia, figure 1: tokens", proved: "theorem 3.6", robust: "figure 4: Sequoia's tokens less theirs",
        bounded: "figure 7: depth bounded or not", costs: "figure 8: t(n)", drawn: "DySpec, figure 2",
    }  # fmt: skip
    for axes, title in titles.items():
        axes.set_title(title, fontsize=10)
        axes.set_xscale(
            "linear" if axes in (robust, drawn) else "log", **({} if axes in (robust, drawn) else {"base": 2})
        )
        axes.set_xlabel({robust: "temperature", drawn: "the draft's probability"}.get(axes, "nodes"))
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    robust.axhline(0, color="0.5", linewidth=1)


def lines(axes: Any, rows: Rows, along: str, names: Sequence[str]) -> None:
    """A line for each field, over another one."""
    for name, color in zip(names, (*COLORS, "0.4"), strict=False):
        chosen = [row for row in rows if name in row]
        axes.plot([row[along] for row in chosen], [row[name] for row in chosen], color=color, marker=".", label=name)


FIGURES = {
    "rsd-1": draw_rsd, "rsd-2": draw_rsd, "robustness": draw_robustness, "specinfer": draw_specinfer,
    "dyspec": draw_dyspec,
}  # fmt: skip
