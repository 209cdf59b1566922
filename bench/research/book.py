"""What docs/papers.md shows of results: fields and rows of each part, and verdicts."""

from collections.abc import Callable, Sequence
from typing import Any

import verdicts
from verdicts import Found


def judged(found: Found, rule: str) -> str:
    """A rule in words, which is its docstring, and its verdict on results."""
    own = getattr(verdicts, rule)
    return f"{own.__doc__}: **{verdicts.verdict(own(found))}**"


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
    "rejection": (
        ("method", "k = 1", "k = 4", "k = 32", "exponent"),
        lambda row: row["temperature"] == 0.6 and row["method"] != "naive-distinct",  # which is in no paper
    ),
    "sequoia-planned": (
        ("nodes", "at most", "levels", "children of the root", "expected"), sized(64, 256),
    ),
    "sequoia-growth": (("nodes", "best", "sequences", "binary", "4-ary", "chain"), sized(64, 1024)),
    "sequoia-theorem": (("nodes", "lower", "k*", "k* tree", "best tree", "upper"), sized(64, 262144)),
    "sequoia-scaling": (("nodes", "tokens", "first over it"), behind),
    "sequoia-pairs": (("draft", "tokens", "first over it"), behind),
    "sequoia-robustness": (
        ("temperature", "top_p", "sequoia", "over specinfer", "over top-k"),
        lambda row: row["temperature"] in (0.2, 0.6, 1.0) and row["top_p"] in (None, 0.8),
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
    "dyspec-thresholds": (("threshold", "nodes", "tokens", "correlation"), lambda row: row["threshold"] in (0.1, 0.01)),
    "dyspec-blocks": (("nodes", "breadth_first", "depth_first", "heavy_path", "prefix of 256"), sized(768, 1024)),
    "dyspec-random-blocks": (("nodes", "insertion", "depth_first", "heavy_path"), sized(256, 2048)),
    "dyspec-64": (("temperature", "method", "tokens", "behind"), every),
    "dyspec-768": (("temperature", "method", "tokens", "behind"), lambda row: row["method"] != "specinfer"),
    "ersd-growth": (
        ("rule", "tree", "expected", "tokens", "first over it"),
        lambda row: row["nodes"] == 64 and row["tree"] != "1,1,3,1..",
    ),
    "ersd-marginals": (("rule", "nodes", "brings", "bound"), sized(8, 512)),
    "ersd-bounds": (("nodes", "best tree", "v = 1", "least v", "theorem 4.1"), sized(16, 4096)),
    "ersd-entropy": (
        ("temperature", "positions", "lemma 3.1", "race", "overlap", "D", "H race", "upper", "of greedy rejection",
         "H greedy", "constant of (7)"), every,
    ),
    "ersd-one-vector": (("temperature", "length", "predicted", "tokens", "over predicted"), long(30)),
    "survey-medusa": (("temperature", "tokens", "over the draft"), lambda row: "over the draft" in row),
}  # fmt: skip


def result_rows(source: str, found: Found) -> list[list[str]]:
    """The rows of a part that the page has; `tokens` with its error."""
    fields, where = SHOWN[source]
    return [
        [printed([row["tokens"], row["error"]] if field == "tokens" else row.get(field)) for field in fields]
        for row in found["rows"]
        if where(row)
    ]
