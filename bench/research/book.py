"""The reproduction book of docs/papers.md: what the papers claim, what is done here, the verdict and its rule."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import beside  # noqa: F401
import verdicts as rules
from published import DRAFT_MS, TARGET_MS, time_of
from verdicts import Found, Rule

RESULTS = Path(__file__).parents[1] / "results"


class Line(NamedTuple):
    """A line of the book.

    place:  the figure, table or section
    claim:  what the paper says of it
    here:   what is done; where nothing is, why
    source: the part of papers.py, or the name of another file of results
    rule:   None where nothing is judged
    """

    place: str
    claim: str
    here: str
    source: str = ""
    rule: Rule | None = None


PAPERS: dict[str, Sequence[Line]] = {
    "Sequoia": (
        Line("figure 1, left", "tokens grow with log n, other shapes level off", "expected, by our vector",
             "sequoia-growth", rules.grows),
        Line("figures 1 right, 2, 5", "drawn trees", "planned by appendix E's vector", "sequoia-planned"),
        Line("figure 3", "rejection is a power law in k", "counted at contexts", "rejection", rules.power_laws),
        Line("figure 3", "lowest rejection at every T", "the same", "rejection", rules.lowest_rejection),
        Line("figure 4, left", "up to 33% over sequences", "exact, Sequoia's sampling and rule for both",
             "sequoia-scaling", rules.planned_ahead),
        Line("figure 4, right", "ahead at each T", "one tree, by vectors", "sequoia-robustness",
             rules.at_each_temperature),
        Line("figure 6", "ahead for other pairs", "exact, other drafts of our target, one rule",
             "sequoia-pairs", rules.planned_ahead),
        Line("figure 7", "bounded depth is faster", "by two costs, no wall clock", "sequoia-bounded",
             rules.bounded_is_faster),
        Line("figure 8", "t(n) is flat, then rises", "GPUs by a roofline, our CPU measured", "sequoia-verification",
             rules.flat_then_rising),
        Line("table 1", "7B on an A100: (128, 6 to 10), 2.71 to 4.04 times", "its constants, our vector",
             "sequoia-chosen", rules.chosen_by_table_1),
        Line("table 1", "ahead of SpecInfer's 5 x 8", "exact, trees of 64 planned for each T", "sequoia-defaults",
             rules.planned_ahead),
        Line("table 2", "0.60 to 1.10 s a token", "simulated", "offloading", rules.close("Sequoia", "table 2")),
        Line("tables 3, 4", "13B and 33B: 64 nodes, 5 to 10 levels; 33B 2.13 to 2.27 times", "a roofline, our vector",
             "sequoia-chosen", rules.chosen_by_roofline),
        Line("table 5", "T = 0: its tree beats every width x depth", "decoded tokens, table 1's constants",
             "sequoia-greedy-shapes", rules.beats_every_cell),
        Line("table 6", "the same at T = 0.6", "the same", "sequoia-shapes", rules.beats_every_cell),
        Line("table 7", "768 nodes surpass 16 x 48, 24 x 32, 32 x 24", "exact tokens, 769 nodes",
             "sequoia-large-shapes", rules.planned_ahead),
        Line("table 8", "ahead at each top-p", "one tree, by vectors", "sequoia-robustness", rules.at_each_top_p),
        Line("theorem 3.6", "k*-ary trees give b log n / (10 log log n)", "the best k-ary tree of each size",
             "sequoia-theorem", rules.bound_is_kept),
    ),
    "DySpec": (
        Line("figure 2, left", "acceptance rises with the draft's probability", "by tenths, every token",
             "dyspec-probabilities", rules.accepted_rises),
        Line("figure 2, right", "so does the target's probability", "the same", "dyspec-probabilities",
             rules.target_rises),
        Line("figure 4", "construction takes less than 2%", "its time includes draws here, which the figure counts "
             "apart", "dyspec-phases"),
        Line("figure 5", "size and accepted tokens follow the text", "exact, eight contexts, too few to judge",
             "dyspec-thresholds"),
        Line("figures 6, 7", "masks in two orders", "drawn in `docs/images/pictures-order.svg`"),
        Line("figure 8", "reordered attention: 2.1 times", "needs a GPU; its blocks are counted below"),
        Line("figure 9", "768: 366 to 218 blocks; 1,024: 580 to 296", "grown trees, prefix of 256", "dyspec-blocks",
             rules.fewer_blocks),
        Line("tables 1, 2", "64 nodes: ahead of Sequoia and SpecInfer", "exact tokens; no latency", "dyspec-64",
             rules.dyspec_ahead),
        Line("table 3", "0.54 to 1.14 s a token", "simulated, 18 rows", "offloading",
             rules.close("DySpec", "table 3")),
        Line("table 4", "0.42 to 0.88 s a token", "simulated", "offloading", rules.close("DySpec", "table 4")),
        Line("table 4", "768 nodes: ahead of Sequoia at T = 0, behind at 0.6", "exact tokens", "dyspec-768",
             rules.dyspec_by_temperature),
        Line("table 5", "blocks of random trees", "the same, ten seeds", "dyspec-random-blocks",
             rules.blocks_of_random_trees),
    ),
    "ERSD": (
        Line("figures 1, 2", "a race and a tree", "drawings; they measure nothing"),
        Line("figure 3", "trees ahead of batches and sequences", "expected and decoded", "ersd-growth",
             rules.trees_ahead),
        Line("figure 4", "a further node brings as 1 / n", "by vectors", "ersd-marginals",
             rules.falls_as_one_over_n),
        Line("theorem 4.1, lemma 4.2", "bounds on any tree", "by the race's vector", "ersd-bounds",
             rules.within_bounds),
        Line("equation 7", "greedy rejection: D + (1 + e) log(D + 1) + O(1)", "where K's law is known to its end",
             "ersd-entropy", rules.entropy_of_rejection),
        Line("lemma 3.1, (6), (8)", "bounds on a race and on H", "at every position", "ersd-entropy",
             rules.coupling),
        Line("section 3", "GSD is better for one child, races for batches", "counted at contexts", "rejection",
             rules.batches_prefer_races),
        Line("section 5", "sequences exceed what one rate predicts", "exact", "ersd-one-vector",
             rules.above_the_prediction),
    ),
    "RSD": (
        Line("figure 1", "recursive rejection accepts always", "exact, 15 pairs", "rsd-bernoulli",
             rules.always_accepts),
        Line("experiment 1, T = 0.3", "RSD-S has most tokens at each length", "exact", "rsd-1-at-0.3",
             rules.family_ahead),
        Line("experiment 1, T = 1, top-p 0.95", "the same", "exact, five texts a prompt", "rsd-1-at-1",
             rules.family_ahead),
        Line("experiment 2, T = 0.3", "RSD has most tokens at most budgets", "exact", "rsd-2-at-0.3",
             rules.family_ahead),
        Line("experiment 2, T = 1, top-p 0.95", "the same", "decoded, one seed, too few to judge", "rsd-2-at-1"),
        Line("tables of OPT and Llama-2", "12 pairs, BLEU and ROUGE-2", "weights and data sets are not at hand"),
    ),
    "surveys": (
        Line("SpecInfer", "the target's token is among the draft's k likeliest", "T = 0.6", "rejection",
             rules.likeliest),
        Line("Medusa", "several heads on one target", "trained here, T = 0 and 0.6", "survey-medusa"),
    ),
}  # fmt: skip

RSD_FAMILIES = {1: ("RSD-S",), 2: ("RSD-C", "RSD-S")}  # those that the paper has ahead, by experiment
# Errors found in the papers, in texts that did not name their version: paper, place, what is wrong.
ERRORS = [
    ("Sequoia", "algorithm 3", "line 8 takes the draft for the target; line 20 has t for s"),
    ("Sequoia", "appendix F.1", "g stands for F in F.1.2; a <= of F.1.3 must be >=; theorem 3.6 is proved in F.1.3"),
    ("Sequoia", "F.1.3", "the largest d <= log_k n makes trees of more than n nodes (k = 2, n = 64: 127); d - 1 does"),
    ("Sequoia", "section 4", "33% on average in one place is up to 33% in two others"),
    ("Sequoia", "algorithm 4", "what cannot be reached counts as 0, so that trees that cannot be are chosen"),
    ("Sequoia", "appendix E", "the vector rises at children 21, 25, 26 and 30: greedy planning wants it sorted"),
    ("DySpec", "abstract, table 3", "9.4 times; 5.60 s over 0.537 s is 10.4, so perhaps 9.4 times faster is meant"),
    ("DySpec", "table 3", "a step of 9.10 tokens takes less time than a token without a draft"),
    ("DySpec", "section 4.2", "values a place with the next draw's expected acceptance; algorithm 1 does not"),
    ("DySpec", "text", "129 lengths from 128 to 258 are 131; 2.1 times in the text are 2.2 in table 5"),
    ("DySpec", "appendix C.1", "a paragraph stands twice"),
    ("ERSD", "equation 6", "holds for independent draws; the place among distinct children can have less entropy"),
    ("RSD", "appendix C.2", "r is target / draft in the text; the tables have draft / target"),
    ("RSD", "section 3", "the bounds of sums differ in 3.2.1 and 3.2.2; k' is missing in (9)"),
    ("RSD", "algorithms 6 and 9", "6 stores a node's number for its token; 9 lacks a minus sign, and has F for T"),
    ("RSD", "tables 4 and 6", "SpecTr's rows 12 x 5 and 6 x 5 are exchanged: the larger tree has fewer tokens"),
    ("RSD", "related work", "says that lookahead does not recover the target's distribution; it does"),
    ("a survey", "steps, section 3.6", "q + 1 stands for gamma + 1, q - p for p - q; bus and car change places"),
]


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
        cost = time_of(1 + row["width"] * row["depth"]) + row["depth"] * DRAFT_MS / TARGET_MS
        rows.append(row | {"speedup": row["tokens"] / cost, "error": row["error"] / cost})
    (tree,) = (
        row["speedup"] for row in chosen["rows"] if "table 1" in row["costs"] and row["temperature"] == temperature
    )
    return {"rows": rows, "tree": tree}


def rule_of(rule: Callable) -> str:
    """The rule in words, which is its docstring."""
    return " ".join((rule.__doc__ or "").split())


def cells(paper: str) -> list[list[str]]:
    """The lines of a paper: place, claim, what is done, rule and verdict."""
    return [
        [line.place, line.claim, line.here, rule_of(line.rule), rules.verdict(line.rule(found_in(line.source)))]
        if line.rule
        else [line.place, line.claim, line.here, "", "not judged" if line.source else "not here"]
        for line in PAPERS[paper]
    ]


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


def shaped(*shapes: tuple[int, int]) -> Callable[[Found], bool]:
    """Rows of these widths and depths."""
    return lambda row: (row["width"], row["depth"]) in shapes


SHOWN: dict[str, tuple[Sequence[str], Callable[[Found], bool]]] = {  # of a part: the fields and rows on the page
    "sequoia-planned": (("nodes", "at most", "levels", "children of the root", "expected"), every),
    "sequoia-growth": (("nodes", "best", "sequences", "binary", "4-ary", "chain"), sized(16, 64, 256, 1024)),
    "sequoia-theorem": (("nodes", "lower", "k*", "k* tree", "best tree", "upper"), sized(64, 4096, 262144)),
    "sequoia-scaling": (("nodes", "expected", "tokens", "first over it"), behind),
    "sequoia-pairs": (("draft", "tokens", "first over it"), behind),
    "sequoia-robustness": (("temperature", "top_p", "sequoia", "over specinfer", "over top-k"), every),
    "sequoia-bounded": (("costs", "c", "nodes", "speedup", "speedup unbounded"), sized(64, 512)),
    "sequoia-verification": (("device", "target", "16", "128", "512"), lambda row: row["target"] != "llama-2-13b"),
    "sequoia-chosen": (("costs", "temperature", "nodes", "levels", "speedup", "5 x 8"), every),
    "sequoia-defaults": (("temperature", "way", "tokens", "first over it", "speedup"), every),
    "sequoia-shapes": (("width", "depth", "tokens", "speedup"), shaped((1, 8), (1, 128), (128, 1), (5, 8), (16, 8))),
    "sequoia-large-shapes": (("temperature", "way", "tokens", "first over it"), behind),
    "dyspec-probabilities": (
        ("draft", "accepted", "quartiles of accepted", "target"), lambda row: row["draft"] < 0.3 or row["draft"] > 0.9,
    ),
    "dyspec-phases": (("nodes", "draft", "construction", "target"), every),
    "dyspec-thresholds": (("threshold", "nodes", "tokens", "correlation"), every),
    "dyspec-blocks": (("nodes", "breadth_first", "depth_first", "heavy_path", "prefix of 256"), every),
    "dyspec-random-blocks": (("nodes", "insertion", "depth_first", "heavy_path"), every),
    "dyspec-64": (("temperature", "method", "tokens", "deepest", "behind"), every),
    "dyspec-768": (("temperature", "method", "tokens", "deepest", "behind"), every),
    "ersd-growth": (
        ("rule", "tree", "expected", "tokens"), lambda row: row["nodes"] == 64 and row["tree"] != "1,1,3,1..",
    ),
    "ersd-marginals": (("rule", "nodes", "brings", "bound"), sized(8, 512)),
    "ersd-bounds": (("nodes", "best tree", "v = 1", "least v", "theorem 4.1"), sized(16, 256, 4096)),
    "ersd-entropy": (
        ("temperature", "positions", "lemma 3.1", "race", "overlap", "D", "H race", "upper", "of greedy rejection",
         "H greedy", "constant of (7)"), every,
    ),
    "ersd-one-vector": (("temperature", "length", "predicted", "tokens", "over predicted"), every),
    "survey-medusa": (("temperature", "draft", "tokens", "over the draft"), every),
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
