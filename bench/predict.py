"""What should a GPU take, by arithmetic; and what it took beside that, once it has been measured. No GPU is needed.

    python bench/predict.py step [--json FILE]           # a step, and what of it
    python bench/predict.py verification [--json FILE]   # deciding about a tree: predict_verification.py
    python bench/predict.py filters [--json FILE]        # the cuts of top-k and top-p: predict_filters.py
    python bench/predict.py against OUTDIR [--only large]   # what gpu.sh measured beside predictions.json

A step of a static tree at batch 1 is a chain of kernels, each of which waits for the one before:

    product of few rows      weight bytes / bandwidth + PRODUCT     every weight is read once
    any other kernel         SMALL                                  a launch in a graph, and what it does
    draw of a level          + DRAW, verification + DECIDE          what these take beyond a small kernel

`before` is a layer as PyTorch's operations make it, with seven products and fourteen other kernels. `now` is with
joined products and fused kernels, as tests/kernels/test_layer_kernels.py and tests/core/test_step.py count them. The
limit is the time to read the target's weights once.

A prediction names the result file (`file`, without .json), the row (`where`: values of its fields), the figure in it
(`field`, with dots for what lies deeper, and `times` a factor into the `unit`; or `kernels`, a regular expression over
the names of a profiled step's kernels, whose times are added), what it should be on each GPU (`predicted`), and how
that comes about (`from`). A `bar` is what it must not exceed. What has not been measured is not shown.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import predict_filters
import predict_verification
from assumed_gpu import H200
from common import Row, argument_parser, show, write_results

PREDICTIONS = Path(__file__).parent / "predictions.json"
BANDWIDTH = {"H200": 4.3e12, "H100": 3.0e12}  # bytes in a second of a copy: measured, and nine tenths of the data sheet
PRODUCT = 2.5e-6  # seconds of a product's start and end, in which it does not read at full speed
SMALL = 2e-6
DRAW, DECIDE = 5e-6, 12e-6  # at 32,000 tokens
BYTES = 2  # of a weight in bf16


class Model(NamedTuple):
    """The shape of a Llama with as many key heads as query heads."""

    layers: int
    hidden: int
    inner: int
    vocabulary: int = 32000

    @property
    def read_bytes(self) -> int:
        """Bytes of the weights that a pass reads: all but the token embedding."""
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.inner
        return BYTES * (self.layers * layer + self.hidden * self.vocabulary)


class Kernels(NamedTuple):
    """Products and other kernels of a layer, those beside the layers of either model, and of a step beside both."""

    products: int
    others: int
    target_ends: int
    draft_ends: int
    step: int


TARGET, DRAFT = Model(32, 4096, 11008), Model(2, 768, 3072)  # Llama-2-7B and llama-68m
LEVELS, NODES = 5, 32
WAYS = {"before": Kernels(7, 14, 3, 7, 78), "now": Kernels(4, 5, 2, 3, 23)}


def pass_seconds(model: Model, kernels: Kernels, ends: int, bandwidth: float) -> dict[str, float]:
    """A forward pass over few tokens, by what it spends its time on."""
    return {
        "reading weights": model.read_bytes / bandwidth,
        "starts of products": (model.layers * kernels.products + 1) * PRODUCT,
        "other kernels": (model.layers * kernels.others + ends) * SMALL,
    }


def step_seconds(kernels: Kernels, bandwidth: float) -> dict[str, float]:
    """A step, by what it spends its time on."""
    target = pass_seconds(TARGET, kernels, kernels.target_ends, bandwidth)
    draft = pass_seconds(DRAFT, kernels, kernels.draft_ends, bandwidth)
    parts = {f"target: {name}": seconds for name, seconds in target.items()}
    parts |= {f"draft: {name}": LEVELS * seconds for name, seconds in draft.items()}
    return parts | {
        "beside: launches": kernels.step * SMALL, "beside: drawing": LEVELS * DRAW, "beside: deciding": DECIDE,
    }  # fmt: skip


def step_rows() -> list[Row]:
    """Milliseconds of each part, and their sum over the limit, by GPU."""
    rows = []
    for gpu, bandwidth in BANDWIDTH.items():
        for way, kernels in WAYS.items():
            parts, limit = step_seconds(kernels, bandwidth), TARGET.read_bytes / bandwidth
            total = sum(parts.values())
            rest = sum(seconds for name, seconds in parts.items() if name.startswith("beside"))
            row = {"gpu": gpu, "kernels": way} | {name: 1e3 * seconds for name, seconds in parts.items()}
            rows.append(row | {"step_ms": 1e3 * total, "over_limit": total / limit, "beside": rest / total})
    return rows


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
        bar = prediction.get("bar")
        found.append({
            "figure": f"{prediction['file']}: {what}: {field}",
            "measured": f"{measured:.3g} {prediction['unit']}",
            "predicted": f"{values[name]:.3g} ({name})",
            "ratio": f"{measured / values[name]:.2f}",
            "bar": "" if bar is None else f"{bar:g}" + " missed" * (measured > bar),
            "predicted_from": prediction["from"],
        })  # fmt: skip
    return found


PARTS = {"step": step_rows, "verification": predict_verification.rows, "filters": predict_filters.rows}


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
        show(turned(found) if arguments.part == "step" else found, without=("first_pass", "shared_pass"))


if __name__ == "__main__":
    main()
