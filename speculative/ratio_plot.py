"""Draw a comparison: each prompt's ratio to transformers' generate, by method, with median and quartiles."""

from collections.abc import Sequence
from pathlib import Path

from heavypath.speculative.comparison import PLAIN, ComparedWay

GRAY, BLUE = "#9aa1ab", "#2b6cb8"


def check_can_plot() -> None:
    """Raise ImportError, with what to install, where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"a plot needs matplotlib: `pip install '.[figures]'` in a checkout ({error})") from None


def plot_ratios(rows: Sequence[ComparedWay], path: str | Path) -> None:
    """Draw the rows of `compare` into a file, a .png, .svg or .pdf.

    A dot is a prompt, the bar goes from the first quartile to the third, and the line in it is the median.

    Raises ImportError where matplotlib is missing, and ValueError for a kind of file that it does not know.
    """
    check_can_plot()
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.method != PLAIN][::-1]  # which has a ratio of 1 by definition
    figure = Figure(figsize=(8, 1.1 + 0.34 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(shown):
        low, high = row.ratio_quartiles
        axes.barh(place, high - low, 0.62, left=low, color=BLUE, alpha=0.3)
        axes.plot(2 * [row.ratio], [place - 0.31, place + 0.31], color=BLUE, linewidth=2)
        axes.plot(row.ratios, len(row.ratios) * [place], linestyle="", marker=".", color=GRAY, markersize=4)
    axes.set_yticks(range(len(shown)), [row.method for row in shown])
    axes.axvline(1, color=GRAY, linewidth=1)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"tokens/s over those of {PLAIN}: each prompt, median and quartiles")
    figure.savefig(path)
