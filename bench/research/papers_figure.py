"""The figure of docs/papers.md: six of the papers' figures from the results of parts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import beside  # noqa: F401
from common import figure_of, made

# Okabe and Ito's palette, which colour-blind readers tell apart.
COLORS = ("#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "0.4", "black")
Rows = Sequence[Mapping[str, Any]]


def draw(results: Mapping[str, Any], folder: Path) -> None:
    """Draw papers-book.png in the folder."""
    figure = figure_of(11, 6.4)
    grown, proved, compared, bounded, drawn, sized = figure.subplots(2, 3).flatten()
    lines(grown, results["sequoia-growth"]["rows"], "nodes", ("best", "sequences", "binary", "4-ary", "chain"))
    lines(proved, results["sequoia-theorem"]["rows"], "nodes", ("upper", "best tree", "k* tree", "lower"))
    for place, way in enumerate(("best", "sequences")):
        rows = [row for row in results["sequoia-scaling"]["rows"] if row["way"] == way]
        values, errors = [row["tokens"] for row in rows], [row["error"] for row in rows]
        compared.errorbar([row["nodes"] for row in rows], values, errors, color=COLORS[place], marker="o", label=way)
    rows = [row for row in results["sequoia-bounded"]["rows"] if "measured" in row["costs"]]
    lines(bounded, rows, "nodes", ("speedup", "speedup unbounded"))
    lines(drawn, results["dyspec-probabilities"]["rows"], "draft", ("accepted", "target"))
    for place, row in enumerate(results["dyspec-thresholds"]["rows"]):
        nodes, expected = zip(*row["steps"], strict=True)
        sized.scatter(nodes, expected, s=8, color=COLORS[place], label=f"threshold {row['threshold']:g}")
    titles = {
        grown: "Sequoia, figure 1: tokens",
        proved: "Sequoia, theorem 3.6",
        compared: "Sequoia, figure 4, left",
        bounded: "Sequoia, figure 7, on this CPU",
        drawn: "DySpec, figure 2",
        sized: "DySpec, figure 5: steps",
    }
    for axes, title in titles.items():
        axes.set_title(title, fontsize=10)
        if axes is drawn:
            axes.set_xlabel("the draft's probability")
        else:
            axes.set_xscale("log", base=2)
            axes.set_xlabel("nodes")
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    figure.savefig(made(folder / "papers-book.png"), dpi=100)


def lines(axes: Any, rows: Rows, along: str, names: Sequence[str]) -> None:
    """A line for each field, over another one."""
    for name, color in zip(names, COLORS, strict=False):
        chosen = [row for row in rows if name in row]
        axes.plot([row[along] for row in chosen], [row[name] for row in chosen], color=color, marker=".", label=name)
