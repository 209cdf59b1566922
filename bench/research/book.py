"""The reproduction book: a line for each figure, table and claim of the papers, for docs/papers.md.

A line has what the paper says, what is found here with its standard error, and the part of papers.py that found it. A
figure whose paper has no numbers in it is quoted by what it shows. Lines without a result have a reason.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import beside  # noqa: F401
import book_effects as effects
import book_words as say
import rsd
from book_effects import Effects
from book_words import Found

RESULTS = Path(__file__).parents[1] / "results"


class Line(NamedTuple):
    """A line of the book.

    published: what the paper says. source: the part of papers.py, or the name of another file of results
    ours:      a sentence from what that has. reason: why there is none
    effect:    what is larger by the paper; None where it claims nothing that a small pair could show
    """

    paper: str
    place: str
    published: str
    source: str = ""
    ours: Callable[[Found], str] | None = None
    effect: Effects | None = None
    reason: str = ""


def found_in(source: str) -> tuple[str, Found]:
    """The name of a file of results, and what it has of a source. Raises KeyError for a part that has not been run."""
    other = RESULTS / f"{source}-cpu.json"
    if other.exists():
        content = json.loads(other.read_text(encoding="utf-8"))
        return other.name, content | content["environment"]
    content = json.loads((RESULTS / "papers-cpu.json").read_text(encoding="utf-8"))
    found = content[source]
    if isinstance(found, list):  # a table with every verifier, of which the paper's own counts
        rows = [row | {"tokens": row["tokens"]["own"], "error": row["standard_error"]["own"]} for row in found]
        found = {"rows": rows, "command": f"python bench/research/papers.py {source}"}
    return "papers-cpu.json", found


S, D, E, R, V = "Sequoia", "DySpec", "ERSD", "RSD", "surveys"
PAIR_NEEDED = "weights of the pair are not shipped, and nothing may be downloaded; our pair stands for it"
LINES = [  # what the paper says, then what shows it here
    Line(S, "figure 1, left", "grows with log n; other shapes level off",
         "sequoia-growth", say.growth, effects.growth),
    Line(S, "figures 1 right, 2 and 5", "trees of 8 to 256 nodes, planned by the vector of appendix E",
         "sequoia-growth", say.trees(8, 32, 64, 128, 256), effects.trees),
    Line(S, "figure 3", "without replacement, a power law; its b falls with T",
         "rejection", say.exponents, effects.exponents),
    Line(S, "figure 4, left", "the planned tree is ahead, most at 512 nodes",
         "sequoia-scaling", say.scaling, effects.over("over sequences")),
    Line(S, "figure 4, right", "ahead of SpecInfer and top-k at each temperature",
         "sequoia-robustness", say.robust(False), effects.sampled("specinfer", "top-k", cut=False)),
    Line(S, "figure 4, right, decoded", "the same",
         "sequoia-temperatures", say.over("over specinfer", "decoded, equal siblings joined", "temperature"),
         effects.over("over specinfer")),
    Line(S, "figure 6", "ahead for other pairs, too",
         "sequoia-pairs", say.over("over specinfer", "over 8 sequences, T = 0.6", "draft"),
         effects.over("over specinfer")),
    Line(S, "figure 7", "bounding the depth is faster",
         "sequoia-bounded", say.bounded, effects.bounded),
    Line(S, "figure 8", "t(n) is flat, then rises",
         "sequoia-verification", say.verification, effects.flat_then_rising),
    Line(S, "table 1", "7B on an A100: (128, 10) to (128, 6), 2.71 x to 4.04 x",
         "sequoia-chosen", say.implied, effects.chosen(paper=True)),
    Line(S, "table 1, on our pair", "ahead of SpecInfer 5 x 8",
         "sequoia-defaults", say.over("over 5 x 8", "64 nodes over 5 x 8 by temperature", "temperature"),
         effects.over("over 5 x 8")),
    Line(S, "table 2", "0.60 to 1.10 s a token",
         "offloading", say.offloading("Sequoia", "table 2"), effects.close("Sequoia", "table 2")),
    Line(S, "tables 3 and 4", "13B and 33B: 64 nodes, 5 to 10 levels",
         "sequoia-chosen", say.by_roofline, effects.chosen(paper=False)),
    Line(S, "table 5", "greedy: rises with both",
         "sequoia-greedy-shapes", say.corners, effects.wider_and_deeper),
    Line(S, "table 6", "T = 0.6: rises with both",
         "sequoia-shapes", say.corners, effects.wider_and_deeper),
    Line(S, "table 7", "(16, 48), (24, 32), (32, 24)",
         "sequoia-large-shapes", say.large_shapes),
    Line(S, "table 8", "ahead at each top-p",
         "sequoia-robustness", say.robust(True), effects.sampled("specinfer", "top-k", cut=True)),
    Line(S, "theorem 3.6", "at least b log n / (10 log log n)",
         "sequoia-theorem", say.theorem, effects.theorem),
    Line(D, "figure 2, left", "acceptance rises with the draft's probability",
         "dyspec-probabilities", say.probability("accepted"), effects.by_probability("accepted")),
    Line(D, "figure 2, right", "so does the target's probability",
         "dyspec-probabilities", say.probability("target"), effects.by_probability("target")),
    Line(D, "figure 4", "construction takes less than 2%",
         "dyspec-phases", say.phases, effects.construction),
    Line(D, "figure 5", "size and accepted tokens follow the text",
         "dyspec-thresholds", say.thresholds, effects.thresholds),
    Line(D, "figures 6 and 7", "masks in two orders",
         reason="drawn in `docs/images/pictures-order.svg`; figure 9 and table 5 count their blocks"),
    Line(D, "figure 8", "times of attention",
         reason="needs a GPU; figure 9 and table 5 count its blocks"),
    Line(D, "figure 9", "768: 366 to 218 blocks; 1,024: 580 to 296",
         "dyspec-blocks", say.blocks, effects.fewer_blocks),
    Line(D, "tables 1 and 2", "64 nodes: ahead of Sequoia and SpecInfer",
         "dyspec-64", say.methods, effects.dyspec(1, 1)),
    Line(D, "table 3", "0.51 to 1.14 s a token",
         "offloading", say.offloading("DySpec", "table 3"), effects.close("DySpec", "table 3")),
    Line(D, "table 4, seconds", "0.42 to 0.88 s a token",
         "offloading", say.offloading("DySpec", "table 4"), effects.close("DySpec", "table 4")),
    Line(D, "table 4, tokens", "T = 0: 11.5 to 16.0, Sequoia 9.4 to 9.8; T = 0.6: 7.0 to 7.7, 8.8 to 9.1",
         "dyspec-768", say.methods, effects.dyspec(1, -1)),
    Line(D, "table 5", "256: 36, 22.5; 512: 135.5, 52.8; 1,024: 490.2, 119.3; 2,048: 1,654.5, 278.7",
         "dyspec-random-blocks", say.random_blocks, effects.fewer_of_random),
    Line(E, "figures 1 and 2", "drawings of a race and of a tree",
         reason="drawings; they measure nothing"),
    Line(E, "figure 3", "trees are ahead of batches and sequences",
         "ersd-growth", say.shapes_of_64, effects.trees_ahead),
    Line(E, "figure 4", "what further nodes bring falls as 1 / n",
         "ersd-growth", say.marginals, effects.doublings),
    Line(E, "theorem 4.1, lemma 4.2", "bounds on any tree, one with a fixed parameter",
         "ersd-bounds", say.limits, effects.bounds),
    Line(E, "equation 7", "greedy rejection: D + (1 + e) log(D + 1) + O(1)",
         "ersd-entropy", say.bits, effects.entropies),
    Line(E, "lemma 3.1, equations 6 and 8", "sum P Q / (P + Q); H is at least D, and at most (8)",
         "ersd-entropy", say.coupling, effects.coupling),
    Line(E, "section 5", "one acceptance vector is not enough for sequences",
         "ersd-one-vector", say.sequences, effects.over("over expected", length=16)),
    Line(R, "figure 1", "recursive rejection accepts always",
         "rsd-bernoulli", say.bernoulli, effects.always),
    *(Line(R, f"experiment {number}, {name}", claim,
           f"rsd-{number}{part}", say.experiment(group), effects.best_of(group, rsd.FAMILIES[number]))
      for number, group, claim in ((1, "5 levels", "RSD-S has most tokens"),
                                   (2, "30 nodes", "RSD has most tokens, in most cases"))
      for part, name in (("-at-0.3", "T = 0.3"), ("-at-0.6", "T = 0.6"), ("-at-1", "T = 1, top-p 0.95"))),
    Line(R, "tables of OPT and Llama-2", "12 pairs of models",
         reason=PAIR_NEEDED),
    Line(V, "target's token among the draft's k likeliest", "rises with k",
         "rejection", say.top_k, effects.likeliest),
    Line(V, "Medusa heads", "several heads on one target",
         "survey-medusa", say.drafts, effects.pays("Medusa heads")),
    Line(V, "[PAD] and lookahead tokens", "a draft says several tokens in one pass",
         "survey-block", say.drafts, effects.pays("block draft")),
    Line(V, "vertical cascade", "the draft drafts by a smaller one",
         reason="not built: it needs a decoder within a draft, and the article has no figure to repeat"),
    Line(V, "saturation exit", "each token leaves at its own layer",
         reason="not built: a level's nodes are drafted together and leave at one layer; the article has no figure"),
    Line(V, "tolerance and top-k rules", "accept what is near the target",
         reason="left out: they are lossy; `typical-lossy` stands for them"),
]  # fmt: skip

ARXIV = {S: "2402.12374", D: "2410.11744", E: "2504.15475", R: "2402.14160"}
# Errors found in the papers, in texts that did not name their version: paper, place, what is wrong.
ERRORS = [
    (S, "algorithm 3", "line 8 takes the draft for the target; line 20 has t for s"),
    (S, "appendix F.1", "g stands for F in F.1.2; a <= of F.1.3 must be >=; theorem 3.6 is proved in F.1.3, not F.3"),
    (S, "section 4", "33% on average in one place is up to 33% in two others"),
    (S, "algorithm 4", "what cannot be reached counts as 0, so that sizes and depths that no tree has can be chosen"),
    (D, "abstract, table 3", "says 9.4 times; 5.60 s over 0.537 s is 10.4, so perhaps 9.4 times faster is meant"),
    (D, "table 3", "a step of 9.10 tokens takes less time than a token without a draft"),
    (
        D,
        "section 4.2",
        "values a place with the next draw's expected acceptance as a factor; algorithm 1 has no such factor",
    ),
    (D, "text", "says 129 lengths from 128 to 258; these are 131"),
    (E, "equation 6", "holds for independent draws; the place among distinct children can have less entropy than D"),
    (R, "appendix C.2", "r is target / draft in the text; the tables have draft / target"),
    (R, "section 3", "the bounds of sums differ in 3.2.1 and 3.2.2; k' is missing in (9)"),
    (
        R,
        "algorithms 6 and 9",
        "6 stores a node's number for its token; 9 lacks a minus sign (line 6), and takes F for T (line 7)",
    ),
    (R, "related work", "says that lookahead does not recover the target's distribution; it does"),
]


def rows() -> list[list[str]]:
    """The lines of the book as cells: paper, place, its words, what is found, verdict, command, seconds and file."""
    cells = []
    for line in LINES:
        if line.ours is None:
            cells.append([line.paper, line.place, line.published, f"none: {line.reason}", "", "", "", ""])
            continue
        name, found = found_in(line.source)
        command = f"`{found['command'].removeprefix('python bench/research/')}`"
        judged = "-" if line.effect is None else effects.verdict(line.effect(found))
        seconds = f"{found['seconds']:.0f}" if "seconds" in found else "-"
        cells.append([line.paper, line.place, line.published, line.ours(found), judged, command, seconds, f"`{name}`"])
    return cells
