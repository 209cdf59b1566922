"""The parts of papers.py that repeat RSD (Jeon et al. 2024, arXiv 2402.14160): figure 1, and experiments 1 and 2.

Every shape of appendix C.3 is evaluated after the same contexts by the rule of its method's paper (exact.py).
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from exact import without_replacement
from papers_setting import Evaluated, Row, Setting
from rejection import kseq_multiplier, least_rejection, rounds_rejection, uncovered

from heavypath.speculative import TokenTree

FAMILIES = {1: ("RSD-S",), 2: ("RSD-C", "RSD-S")}  # those that the paper has ahead, by experiment
# Experiment 1: levels, then sequences and levels of SpecTr and RSD-S.
PAIRS = {2: [(2, 2), (3, 2)], 3: [(3, 3), (4, 3)], 4: [(5, 4), (7, 4)], 5: [(6, 5), (12, 5)]}
# Experiment 2: nodes, then the same and the branching of RSD-C.
BUDGETS = {
    6: ([(2, 3), (3, 2)], [[2, 1, 1], [2, 2], [3, 1]]),
    10: ([(2, 5), (5, 2)], [[2, 1, 1, 1, 1], [2, 2, 1], [5, 1]]),
    14: ([(2, 7), (7, 2)], [[2, 1, 1, 1, 1, 1, 1], [2, 2, 2], [7, 1]]),
    21: ([(3, 7), (7, 3)], [[3, 1, 1, 1, 1, 1, 1], [3, 2, 2], [7, 1, 1]]),
    30: ([(5, 6), (6, 5)], [[2, 2, 2, 2], [5, 1, 1, 1, 1, 1], [6, 1, 1, 1, 1]]),
}
SAMPLINGS: dict[str, dict] = {"0.3": {"temperature": 0.3}, "1": {"temperature": 1.0, "top_p": 0.95}}


class Shape(NamedTuple):
    """A drafted tree: the group that it is compared in, its name as in the paper, and how it is decoded."""

    group: str
    family: str
    size: str
    method: str
    options: dict
    levels: int


def shapes(group: str, pairs: list[tuple[int, int]], vectors: list[list[int]]) -> Iterator[Shape]:
    """SpecTr and RSD-S of some sequences and levels, and RSD-C of some branching."""
    for count, levels in pairs:
        tree = TokenTree.independent(count, levels)
        yield Shape(group, "SpecTr", f"({count}, {levels})", "spectr", {"tree": tree}, levels)
    for vector in vectors:
        yield Shape(group, "RSD-C", f"{vector}", "rsd-c", {"branching": vector}, len(vector))
    for count, levels in pairs:
        options = {"width": count, "max_depth": levels, "tree_size": 1 + count * levels}
        yield Shape(group, "RSD-S", f"({count}, {levels})", "rsd-s", options, levels)


def of_equal_depth() -> Iterator[Shape]:
    """Experiment 1: drafts of L levels, and the chain of L tokens."""
    for levels, pairs in PAIRS.items():
        group = f"{levels} levels"
        yield Shape(group, "SD", f"{levels}", "chain", {"tree": TokenTree.chain(levels)}, levels)
        vectors = [[2] * levels, *([count] + [1] * (levels - 1) for count, _ in pairs)]
        vectors += [[2, 1]] if levels == 2 else []
        yield from shapes(group, pairs, [list(each) for each in dict.fromkeys(map(tuple, vectors))])


def of_equal_size() -> Iterator[Shape]:
    """Experiment 2: drafts of at most B nodes, and the chain of B tokens."""
    for budget, (pairs, vectors) in BUDGETS.items():
        group = f"{budget} nodes"
        yield Shape(group, "SD", f"{budget}", "chain", {"tree": TokenTree.chain(budget)}, budget)
        yield from shapes(group, pairs, vectors)


def experiment(setting: Setting, number: int, sampling: str, contexts: int, seeds: int) -> Row:
    """All shapes of an experiment with one sampling.

    ahead: of each group, the best of the paper's families over the best of the others, after the same contexts
    """
    kinds = {1: of_equal_depth, 2: of_equal_size}
    chosen = [*kinds[number]()][: 5 if setting.small else None]
    rows: list[Row] = []
    best: dict[str, dict[bool, Evaluated]] = {}
    for shape in chosen:
        own = setting.evaluate(shape.method, contexts=contexts, seeds=seeds, **SAMPLINGS[sampling], **shape.options)
        rows.append({
            "group": shape.group, "family": shape.family, "size": shape.size, "levels": shape.levels, **own.row,
            "mbsu": round(own.row["tokens"] / (1 + shape.levels * setting.ratio), 4),
        })  # fmt: skip
        group, theirs = best.setdefault(shape.group, {}), shape.family in FAMILIES[number]
        if theirs not in group or own.row["tokens"] > group[theirs].row["tokens"]:
            group[theirs] = own
    ahead = {name: each[True].over(each[False]) for name, each in best.items() if len(each) == 2}
    return {"sampling": SAMPLINGS[sampling], "rows": rows, "ahead": ahead}


def bernoulli(setting: Setting) -> Row:
    """Figure 1: how often one of two children is accepted where P = (p, 1 - p) and Q = (q, 1 - q), by rule.

    Recursive rejection has distinct children; the first of them is weighed in both orders. The others draw
    independently; "optimal" is what optimal transport leaves to any of them.
    """
    rows = []
    for p in (0.1, 0.3, 0.5):
        for q in (0.1, 0.3, 0.5, 0.7, 0.9):
            target, draft = (torch.tensor([[each, 1 - each]], dtype=torch.float64) for each in (p, q))
            multiplier = kseq_multiplier(target, draft, 2)
            rates = {
                "K-SEQ": uncovered(target, draft, multiplier), "multi-round": rounds_rejection(target, draft, 2),
                "optimal": least_rejection(target, draft, 2),
            }  # fmt: skip
            accepted = {name: round(1 - float(rate[0, 1]), 4) for name, rate in rates.items()}
            both = [
                chance * sum(without_replacement(target[0].numpy(), draft[0].numpy(), tokens))
                for chance, tokens in ((q, [0, 1]), (1 - q, [1, 0]))
            ]
            rows.append({"p": p, "q": q, **accepted, "recursive": round(sum(both), 4)})
    return {"rows": rows}


PARTS = {"rsd-bernoulli": bernoulli} | {
    f"rsd-{number}-at-{sampling}": partial(experiment, number=number, sampling=sampling, contexts=contexts, seeds=seeds)
    for number in FAMILIES
    for sampling, contexts, seeds in (("0.3", 6, 1), ("1", 2, 5))
}
