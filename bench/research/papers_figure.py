"""The figures of docs/papers.md: seven of the papers' figures from the results of parts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import beside  # noqa: F401
from common import figure_of, made

# Okabe and Ito's palette, which colour-blind readers tell apart.
COLORS = ("#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "0.4", "black")
Rows = Sequence[Mapping[str, Any]]
LABELS = {
    "without replacement": "without replacement (Sequoia, RSD, DySpec)",
    "with replacement": "with replacement (SpecInfer)",
    "k-seq": "k-seq (SpecTr)",
    "race": "race (ERSD)",
    "least for i.i.d.": "least for i.i.d. children",
}


def draw(results: Mapping[str, Any], folder: Path) -> None:
    """Draw papers-book.png and rejection.png in the folder."""
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
    draw_rejection(results["rejection"]["temperature"], folder / "rejection.png")


def lines(axes: Any, rows: Rows, along: str, names: Sequence[str]) -> None:
    """A line for each field, over another one."""
    for name, color in zip(names, COLORS, strict=False):
        chosen = [row for row in rows if name in row]
        axes.plot([row[along] for row in chosen], [row[name] for row in chosen], color=color, marker=".", label=name)


def draw_rejection(results: Mapping[str, Any], path: Path) -> None:
    """One panel for each temperature, both axes logarithmic."""
    figure = figure_of(3.9 * len(results), 4.6)
    panels = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for axes, (temperature, result) in zip(panels, results.items(), strict=True):
        for place, (name, method) in enumerate(result["methods"].items()):
            rate = method["rejection"]
            look = {"color": f"C{place}", "linewidth": 2.4 if name == "without replacement" else 1.5}
            if name == "least for i.i.d.":
                look = {"color": "0.45", "linestyle": (0, (4, 2)), "linewidth": 1.2}
            axes.plot(range(1, len(rate) + 1), rate, label=LABELS.get(name, name), **look)
        law = result["methods"]["without replacement"]["power_law"]
        if law["exponent"] is not None:
            fitted = [law["factor"] * count ** -law["exponent"] for count in range(1, len(rate) + 1)]
            axes.plot(range(1, len(rate) + 1), fitted, "k:", label="power law of Sequoia's")
            text = f"{law['factor']:.2f} $k^{{-{law['exponent']:.2f}}}$,  $r^2$ = {law['r_squared']:.3f}"
            axes.text(0.04, 0.04, text, transform=axes.transAxes)
        axes.set(xscale="log", yscale="log", title=f"temperature {temperature}", xlabel="children k")
        axes.set_xticks(ticks := [2**power for power in range(len(rate).bit_length())], [str(tick) for tick in ticks])
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("rejection rate: none of k accepted")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle("How often all k children are rejected, on the shipped demo pair")
    figure.savefig(made(path), dpi=100)
