"""What should a GPU take, by arithmetic; and what it took beside that, once it has been measured. No GPU is needed.

    python bench/predict.py step [--json FILE]           # a step, and what of it: predict_step.py
    python bench/predict.py block [--json FILE]          # a round of an 8B model with a block draft, there, too
    python bench/predict.py attention [--json FILE]      # tree attention: predict_attention.py
    python bench/predict.py verification [--json FILE]   # deciding about a tree: predict_verification.py
    python bench/predict.py filters [--json FILE]        # the cuts of top-k and top-p: predict_filters.py
    python bench/predict.py against OUTDIR [--only large]   # what gpu.sh measured beside predictions.json

A prediction names the result file (`file`, without .json), the row (`where`: values of its fields), the figure in it
(`field`, with dots for what lies deeper, and `times` a factor into the `unit`; or `kernels`, a regular expression over
the names of a profiled step's kernels, whose times are added), what it should be on each GPU (`predicted`), in
which `range`, and how that comes about (`from`). A `bar` is what it must not exceed. What has not been measured is not
shown.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import predict_attention
import predict_filters
import predict_step
import predict_verification
from assumed_gpu import H200
from common import Row, argument_parser, show, write_results

PREDICTIONS = Path(__file__).parent / "predictions.json"


def turned(rows: Sequence[Row]) -> list[Row]:
    """Columns as rows: few columns of many figures are read more easily."""
    return [{"ms": name} | {f"{row['gpu']}, {row['kernels']}": row[name] for row in rows} for name in [*rows[0]][2:]]


def rows_of(results: dict[str, Any]) -> list[Row]:
    """The rows of a file of results, or of pytest-benchmark, each with the device."""
    if "benchmarks" in results:
        return [each["extra_info"] for each in results["benchmarks"]]
    return [row | {"device": results["environment"]["device"]} for row in results["rows"]]


def figure_of(row: Row, prediction: dict[str, Any]) -> float | None:
    """The figure that was predicted, in the unit that the file has; None if it is missing."""
    if "kernels" in prediction:
        pattern = re.compile(prediction["kernels"], re.I)
        named = [each["microseconds"] for each in row.get("kernels") or [] if pattern.search(each["name"])]
        return sum(named) if named else None
    found: Any = row
    for name in prediction["field"].split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return None if found is None else float(found) * prediction.get("times", 1)


def compared(folder: Path, predictions: Sequence[dict[str, Any]]) -> list[Row]:
    """A row for each figure that was measured, beside the device's own prediction, or else the first."""
    found = []
    for prediction in predictions:
        path, where = folder / f"{prediction['file']}.json", prediction["where"]
        rows = rows_of(json.loads(path.read_text())) if path.exists() else []
        row = next((row for row in rows if all(row.get(name) == value for name, value in where.items())), None)
        measured = None if row is None else figure_of(row, prediction)
        if row is None or measured is None:
            continue
        values: dict[str, float] = prediction["predicted"]
        name = next((name for name in values if name in row["device"]), next(iter(values)))
        what = ", ".join(str(each) for each in where.values())
        field = prediction.get("field") or f"kernels {prediction['kernels']}"
        bar, bounds = prediction.get("bar"), prediction.get("range", {}).get(name)
        within = "" if bounds is None else ", {:.3g} to {:.3g}".format(*bounds)
        found.append({
            "figure": f"{prediction['file']}: {what}: {field}",
            "measured": f"{measured:.3g} {prediction['unit']}",
            "predicted": f"{values[name]:.3g} ({name}{within})",
            "ratio": f"{measured / values[name]:.2f}",
            "bar": "" if bar is None else f"{bar:g}" + " missed" * (measured > bar),
            "predicted_from": prediction["from"],
        })  # fmt: skip
    return found


PARTS = {
    "step": predict_step.rows,
    "block": predict_step.block_rows,
    "attention": predict_attention.rows,
    "verification": predict_verification.rows,
    "filters": predict_filters.rows,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser(__doc__, threads=False)
    parser.add_argument("part", choices=[*PARTS, "against"])
    parser.add_argument("folder", type=Path, nargs="?", metavar="OUTDIR", help="that gpu.sh has written to")
    parser.add_argument("--only", help="the figures of one file")
    arguments = parser.parse_args(argv)
    if (arguments.part == "against") != (arguments.folder is not None):
        parser.error("against needs OUTDIR, and nothing else does")
    if arguments.part == "against":
        predictions = json.loads(PREDICTIONS.read_text())["figures"]
        found = compared(arguments.folder, [each for each in predictions if arguments.only in (None, each["file"])])
        if not found:
            print("nothing measured that was predicted")
    else:
        found = PARTS[arguments.part]()
        write_results(arguments.json, {"assumed": H200._asdict()}, rows=found)
    if found:
        show(turned(found) if arguments.part in ("step", "block") else found, without=("first_pass", "shared_pass"))


if __name__ == "__main__":
    main()
