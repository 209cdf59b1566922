"""What docs/papers.md shows of results: fields and rows of each part, and verdicts."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import beside  # noqa: F401
import verdicts
from published import LEVEL, time_of
from verdicts import Found

RESULTS = Path(__file__).parents[1] / "results"


def found_in(source: str) -> Found:
    """The results of a part, or of another file. Raises KeyError for a part that has not been run."""
    other = RESULTS / f"{source}-cpu.json"
    if other.exists():
        content = json.loads(other.read_text(encoding="utf-8"))
        return content | content["environment"]
    every = json.loads((RESULTS / "papers-cpu.json").read_text(encoding="utf-8"))
    found = every[source]
    if source in ("sequoia-shapes", "sequoia-greedy-shapes"):
        return found | by_table_1(found, every["sequoia-chosen"], 0.6 if source == "sequoia-shapes" else 0.0)
    return found


def by_table_1(found: Found, chosen: Found, temperature: float) -> Found:
    """Tables 5 and 6: the speed-up of each cell by table 1's constants, and of the tree that they choose.

    Speed-ups are tokens / (t(n) + d c). The chosen tree has its expected tokens, the cells what they decoded.
    """
    rows = []
    for row in found["rows"]:
        cost = time_of(1 + row["width"] * row["depth"]) + row["depth"] * LEVEL
        rows.append(row | {"speedup": row["tokens"] / cost, "error": row["error"] / cost})
    (tree,) = (
        row["speedup"] for row in chosen["rows"] if "table 1" in row["costs"] and row["temperature"] == temperature
    )
    return {"rows": rows, "tree": tree}


def verdict_of(source: str, rule: str) -> str:
    """The verdict of a rule on results, in bold."""
    return f"**{verdicts.verdict(getattr(verdicts, rule)(found_in(source)))}**"


def judged(source: str, rule: str) -> str:
    """A rule in words, which is its docstring, and its verdict."""
    return f"{getattr(verdicts, rule).__doc__}: {verdict_of(source, rule)}"


def printed(value: Any) -> str:
    """A cell of a table of results: two decimals, and a value with its error where there are two."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " ± ".join(f"{each:.2f}" for each in value) if len(value) == 2 else ", ".join(map(printed, value))
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.3f}" if abs(value) < 0.1 else f"{value:.2f}"
    return f"{value:,.0f}" if isinstance(value, (int, float)) else str(value)


def every(row: Found) -> bool:
    return True


def behind(row: Found) -> bool:
    """Rows of what the first way is compared with."""
    return row["first over it"] is not None


def sized(*sizes: int) -> Callable[[Found], bool]:
    """Rows of these sizes."""
    return lambda row: row["nodes"] in sizes


def long(*lengths: int) -> Callable[[Found], bool]:
    """Rows of these lengths."""
    return lambda row: row["length"] in lengths


def shaped(*shapes: tuple[int, int]) -> Callable[[Found], bool]:
    """Rows of these widths and depths."""
    return lambda row: (row["width"], row["depth"]) in shapes


SHOWN: dict[str, tuple[Sequence[str], Callable[[Found], bool]]] = {  # of a part: the fields and rows on the page
    "sequoia-planned": (
        ("nodes", "at most", "levels", "children of the root", "expected"), lambda row: row["nodes"] in (8, 64, 256),
    ),
    "sequoia-growth": (("nodes", "best", "sequences", "binary", "4-ary", "chain"), sized(64, 1024)),
    "sequoia-theorem": (("nodes", "lower", "k*", "k* tree", "best tree", "upper"), sized(64, 4096, 262144)),
    "sequoia-scaling": (("nodes", "tokens", "first over it"), behind),
    "sequoia-pairs": (("draft", "tokens", "first over it"), behind),
    "sequoia-robustness": (
        ("temperature", "top_p", "sequoia", "over specinfer", "over top-k"),
        lambda row: row["temperature"] in (0.2, 0.6, 1.0),
    ),
    "sequoia-bounded": (("costs", "c", "nodes", "speedup", "speedup unbounded"), sized(64, 512)),
    "sequoia-verification": (
        ("device", "target", "16", "128", "512"), lambda row: row["target"] in ("vicuna-33b", "shipped"),
    ),
    "sequoia-chosen": (("costs", "temperature", "nodes", "levels", "speedup", "5 x 8"), every),
    "sequoia-defaults": (("temperature", "way", "tokens", "first over it", "speedup"), every),
    "sequoia-shapes": (("width", "depth", "tokens", "speedup"), shaped((1, 8), (1, 128), (128, 1), (16, 8))),
    "sequoia-large-shapes": (
        ("temperature", "way", "tokens", "first over it"),
        lambda row: behind(row) and (row["temperature"] > 0 or row["way"] == "16 x 48"),
    ),
    "llamas-devices": (("pair", "published", "ratio", "ratio of 5 x 8"), every),
    "llamas-sweeps": (
        ("sweep", "first child", "exponent", "off", "chosen", "published", "speedup", "published speedup", "best cell"),
        every,
    ),
    "llamas-chains": (("sweep", "length", "predicted", "published", "over predicted"), long(16, 64)),
    "dyspec-probabilities": (
        ("draft", "accepted", "quartiles of accepted", "target"), lambda row: row["draft"] < 0.3 or row["draft"] > 0.9,
    ),
    "dyspec-phases": (("nodes", "draft", "construction", "target"), every),
    "dyspec-thresholds": (("threshold", "nodes", "tokens", "correlation"), every),
    "dyspec-blocks": (("nodes", "breadth_first", "depth_first", "heavy_path", "prefix of 256"), sized(768, 1024)),
    "dyspec-random-blocks": (("nodes", "insertion", "depth_first", "heavy_path"), sized(256, 2048)),
    "dyspec-64": (("temperature", "method", "tokens", "behind"), every),
    "dyspec-768": (("temperature", "method", "tokens", "behind"), lambda row: row["method"] != "specinfer"),
    "ersd-growth": (
        ("rule", "tree", "expected", "tokens"), lambda row: row["nodes"] == 64 and row["tree"] != "1,1,3,1..",
    ),
    "ersd-marginals": (("rule", "nodes", "brings", "bound"), sized(8, 512)),
    "ersd-bounds": (("nodes", "best tree", "v = 1", "least v", "theorem 4.1"), sized(16, 256, 4096)),
    "ersd-entropy": (
        ("temperature", "positions", "lemma 3.1", "race", "overlap", "D", "H race", "upper", "of greedy rejection",
         "H greedy", "constant of (7)"), every,
    ),
    "ersd-one-vector": (("temperature", "length", "predicted", "tokens", "over predicted"), long(30)),
    "survey-medusa": (("temperature", "tokens", "over the draft"), lambda row: "over the draft" in row),
}  # fmt: skip


def result_rows(source: str, fields: Sequence[str], where: Callable[[Found], bool]) -> list[list[str]]:
    """Rows of a part's results, with these fields; `tokens` with its error."""
    return [
        [
            f"{row['tokens']:.2f} ± {row['error']:.2f}" if field == "tokens" else printed(row.get(field))
            for field in fields
        ]
        for row in found_in(source)["rows"]
        if where(row)
    ]
