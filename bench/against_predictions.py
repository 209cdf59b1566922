"""What was measured beside what was predicted: figures of OUTDIR's result files and those of predictions.json.

    python bench/against_predictions.py OUTDIR [--only large]

A prediction names the result file (`file`, without .json), the row (`where`: values of its fields), the figure in it
(`field`, with dots for what lies deeper, and `times` a factor into the `unit`; or `kernels`, a regular expression over
the names of a profiled step's kernels, whose times are added), what it should be on each GPU (`predicted`), and how
that comes about (`from`). A `bar` is what it must not exceed. What has not been measured is not shown.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PREDICTIONS = Path(__file__).parent / "predictions.json"


def row_of(rows: list[dict[str, Any]], where: dict[str, Any]) -> dict[str, Any] | None:
    """The first row with these values."""
    return next((row for row in rows if all(row.get(name) == value for name, value in where.items())), None)


def figure_of(row: dict[str, Any], prediction: dict[str, Any]) -> float | None:
    """The figure that was predicted, in the unit that the file has; None if it is missing."""
    if "kernels" in prediction:
        named = [
            kernel for kernel in row.get("kernels") or [] if re.search(prediction["kernels"], kernel["name"], re.I)
        ]
        return sum(kernel["microseconds"] for kernel in named) if named else None
    found: Any = row
    for name in prediction["field"].split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return None if found is None else float(found) * prediction.get("times", 1)


def predicted_on(device: str, prediction: dict[str, Any]) -> tuple[str, float]:
    """The name of the GPU whose figure is shown, and the figure: the device's own, or else the first."""
    values: dict[str, float] = prediction["predicted"]
    name = next((name for name in values if name in device), next(iter(values)))
    return name, values[name]


def compared(folder: Path, predictions: list[dict[str, Any]]) -> list[list[str]]:
    """A line of the table for each figure that was measured."""
    lines = []
    for prediction in predictions:
        path = folder / f"{prediction['file']}.json"
        if not path.exists():
            continue
        results = json.loads(path.read_text())
        row = row_of(results["rows"], prediction["where"])
        measured = None if row is None else figure_of(row, prediction)
        if measured is None:
            continue
        name, value = predicted_on(results["environment"]["device"], prediction)
        what = ", ".join(str(each) for each in prediction["where"].values())
        bar = prediction.get("bar")
        beyond = "" if bar is None else f"{bar:g}" + (" missed" if measured > bar else "")
        field = prediction.get("field") or f"kernels {prediction['kernels']}"
        figures = f"{measured:.3g} {prediction['unit']}", f"{value:.3g} ({name})", f"{measured / value:.2f}"
        lines.append([f"{prediction['file']}: {what}: {field}", *figures, beyond, prediction["from"]])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="OUTDIR")
    parser.add_argument("--only", help="the figures of one file")
    arguments = parser.parse_args()
    predictions = json.loads(PREDICTIONS.read_text())["figures"]
    lines = compared(arguments.folder, [each for each in predictions if arguments.only in (None, each["file"])])
    table = Table("figure", "measured", "predicted", "ratio", "bar", "predicted from", box=None, pad_edge=False)
    for line in lines:
        table.add_row(*line)
    Console(highlight=False, width=200).print(table if lines else "nothing measured that was predicted")


if __name__ == "__main__":
    main()
