"""The cells of the papers' tables that are decoded with every verifier, and RSD's shapes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import beside  # noqa: F401
from papers_setting import MEASURED

from heavypath.speculative import TokenTree, sequoia_tree
from heavypath.speculative.methods import DEFAULT_ACCEPTANCE

PAIRS = {2: [(2, 2), (3, 2)], 3: [(3, 3), (4, 3)], 4: [(5, 4), (7, 4)], 5: [(6, 5), (12, 5)]}
BUDGETS = {
    6: ([(2, 3), (3, 2)], [[2, 1, 1], [2, 2], [3, 1]]),
    10: ([(2, 5), (5, 2)], [[2, 1, 1, 1, 1], [2, 2, 1], [5, 1]]),
    14: ([(2, 7), (7, 2)], [[2, 1, 1, 1, 1, 1, 1], [2, 2, 2], [7, 1]]),
    21: ([(3, 7), (7, 3)], [[3, 1, 1, 1, 1, 1, 1], [3, 2, 2], [7, 1, 1]]),
    30: ([(5, 6), (6, 5)], [[2, 2, 2, 2], [5, 1, 1, 1, 1, 1], [6, 1, 1, 1, 1]]),
}
NAMES = {"temperature": "T =", "top_p": "top-p"}
WIDE = 128  # nodes of a level, where trees of up to 768 grow; half as long to draft as the default of 384
DYSPEC: dict[str, dict] = {
    "dyspec as published": {"confidence": "draft"},
    "dyspec, measured confidence": {"confidence": MEASURED},
}


class Cell(NamedTuple):
    """One cell: where it stands in its table, and what is decoded.

    group, label: the heading of its rows, and its own row
    sampling:     options of `generate`
    """

    group: str
    label: str
    method: str
    options: Mapping[str, Any]
    sampling: Mapping[str, float]


def rsd_shapes(pairs: Sequence[tuple[int, int]], vectors: Sequence[list[int]]) -> Iterator[tuple[str, str, dict]]:
    """Label, method and options: k sequences of l tokens and beams of k by l, then trees by branching vectors."""
    for count, length in pairs:
        yield f"SpecTr ({count}, {length})", "spectr", {"tree": TokenTree.independent(count, length)}
    for vector in vectors:
        yield f"RSD-C {vector}", "rsd-c", {"branching": vector}
    for count, length in pairs:
        options = {"width": count, "max_depth": length, "tree_size": 1 + count * length}
        yield f"RSD-S ({count}, {length})", "rsd-s", options


def rsd_1(temperature: float) -> Iterator[Cell]:
    """Drafts of L levels, and the chain of L tokens."""
    for length, pairs in PAIRS.items():
        group = f"{length} levels"
        yield Cell(group, "SD", "chain", {"tree": TokenTree.chain(length)}, {"temperature": temperature})
        vectors = [[2] * length, *([count, *[1] * (length - 1)] for count, _ in pairs)]
        vectors += [[2, 1]] if length == 2 else []
        for label, method, options in rsd_shapes(pairs, [list(each) for each in dict.fromkeys(map(tuple, vectors))]):
            yield Cell(group, label, method, options, {"temperature": temperature})


def rsd_2(temperature: float) -> Iterator[Cell]:
    """Drafts of at most B nodes, and the chain of B tokens."""
    for budget, (pairs, vectors) in BUDGETS.items():
        group = f"{budget} nodes"
        yield Cell(group, "SD", "chain", {"tree": TokenTree.chain(budget)}, {"temperature": temperature})
        for label, method, options in rsd_shapes(pairs, vectors):
            yield Cell(group, label, method, options, {"temperature": temperature})


def robustness(temperature: float) -> Iterator[Cell]:
    """One fixed tree, planned for T = 0.6, verified as Sequoia, SpecInfer and top-k sampling do."""
    tree = sequoia_tree(DEFAULT_ACCEPTANCE, 64)
    samplings = [{"temperature": each} for each in (0.2, 0.4, 0.6, 0.8, 1.0)]
    samplings += [{"temperature": temperature, "top_p": each} for each in (0.8, 0.9)]
    for sampling in samplings:
        group = ", ".join(f"{NAMES[name]} {value:g}" for name, value in sampling.items())
        for method in ("sequoia", "specinfer", "top-k"):
            yield Cell(group, method, method, {"tree": tree}, sampling)


def specinfer(temperature: float) -> Iterator[Cell]:
    """k sequences of l tokens."""
    for width in (1, 2, 4, 8, 16):
        for length in (1, 2, 4, 8, 16):
            if width * length <= 128:
                options = {"tree": TokenTree.independent(width, length)}
                yield Cell(f"width {width}", f"depth {length}", "specinfer", options, {"temperature": temperature})


def dyspec(temperature: float) -> Iterator[Cell]:
    """Trees of at most 768 nodes that stop growing where a slot is worth less than a threshold."""
    for group, values in DYSPEC.items():
        for threshold in (0.1, 0.03, 0.01, 0.003):
            options = {"tree_size": 768, "max_depth": 12, "width": WIDE, "threshold": threshold, **values}
            yield Cell(group, f"threshold {threshold:g}", "dyspec", options, {"temperature": temperature})


def large(temperature: float) -> Iterator[Cell]:
    """Trees of 768 nodes."""
    for each in (0.6, 1.0):
        group, sampling = f"T = {each:g}", {"temperature": each}
        yield Cell(group, "sequoia", "sequoia", {"tree": sequoia_tree(DEFAULT_ACCEPTANCE, 768, 18)}, sampling)
        for label, values in DYSPEC.items():
            yield Cell(group, label, "dyspec", {"tree_size": 768, "max_depth": 18, "width": WIDE, **values}, sampling)
        yield Cell(group, "specinfer 48 x 16", "specinfer", {"tree": TokenTree.independent(48, 16)}, sampling)


TABLES: dict[str, Callable[[float], Iterator[Cell]]] = {
    "rsd-1": rsd_1, "rsd-2": rsd_2, "robustness": robustness, "specinfer": specinfer, "dyspec": dyspec, "large": large,
}  # fmt: skip
