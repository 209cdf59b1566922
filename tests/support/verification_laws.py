"""verify_tree's reference beside the exact oracle: all trees, and coins on both sides of the oracle's thresholds."""

import random
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch import Tensor
from verification_cases import draft_options
from verification_oracle import Drawn, Filtered, Language, Verifier

from heavypath.kernels import verification
from heavypath.kernels.nodes import EITHER_DRAW
from heavypath.kernels.verification import verify_tree
from heavypath.kernels.verifying import distributions

NEAR = 4e-6  # how near to a threshold coins are tossed, on both sides; thresholds are computed from fp32 rows


def shuffled(tree: Drawn) -> list[int]:
    """Some order of the nodes: parents come before their children, and nodes of equal rank stay in order, for among
    the children of equal siblings rank and then index decide."""
    ranks = [0, *(tree.children(parent).index(node) for node, parent in enumerate(tree.parents) if node)]
    chosen, order = random.Random(0), [0]
    left = [*range(1, len(ranks))]
    while left:
        first = {ranks[node]: node for node in reversed(left)}
        order.append(chosen.choice([node for node in first.values() if tree.parents[node] in order]))
        left.remove(order[-1])
    return order


def fields_of(tree: Drawn, place: dict[int, int], language: Language) -> tuple[np.ndarray, ...]:
    """Tokens, parents and ranks [3, N] of a tree, and the laws of both where they are known; place: of each node."""
    count = len(tree.parents)
    numbers = np.zeros((3, count), int)
    target, draft = np.full((2, count, language.vocab_size), np.nan)
    for node, new in ((node, place[node]) for node in range(count)):
        parent = tree.parents[node]
        rank = tree.children(parent).index(node) if node else 0
        numbers[:, new] = tree.tokens[node], place[parent], rank
        if tree.present(node):
            target[new] = language.target(tree.context(node))
        if node and tree.present(parent):
            draft[place[parent]] = language.draft(tree.context(parent))
    return numbers, target, draft


def check_decisions(
    verifier: Verifier, language: Language, trees: Iterable[Drawn], *, method: str, replacement=False,
    max_depth: int | None = None,
) -> int:  # fmt: skip
    """Fail unless verify_tree ends where the oracle's verifier does, with its law of the next token; how many ends.

    Each end is tried with all its coins near the least that lead there, and with all near the largest; other coins are
    NaN. Nodes are in a shuffled order, and rows of leaves, which nobody may read, NaN.
    """
    plain = language.language if isinstance(language, Filtered) else language
    filters = {}
    if isinstance(language, Filtered):
        filters = language.target_filters._asdict() | draft_options(language.draft_filters)
    cases, several = [], []  # each end from both sides; trees, each with its number of cases
    for tree in trees:
        there = [max_depth is None or len(tree.context(node)) <= max_depth for node in range(len(tree.parents))]
        tokens = (token if here else -1 for token, here in zip(tree.tokens, there, strict=True))
        before = len(cases)
        for end in verifier.ends(language, tree._replace(tokens=(*tokens,)), (), replacement):
            gaps = [float(high - low) for low, high in end.coins.values()]
            if end.chance and min(gaps, default=1.0) > 3 * NEAR:
                cases += [(tree, end, side) for side in (0, 1)]
        if len(cases) > before:
            several.append((tree, len(cases) - before))
    fields, places = [], []
    for tree, times in several:
        order = shuffled(tree)
        place = {node: new for new, node in enumerate(order)} | {-1: -1}
        fields += [fields_of(tree, place, plain)] * times
        places += [place] * times
    numbers, target, draft = map(np.stack, zip(*fields, strict=True))
    tokens, parents, ranks = torch.from_numpy(numbers).unbind(1)
    coins = np.full(tokens.shape, np.nan)
    for b, ((_, end, side), place) in enumerate(zip(cases, places, strict=True)):
        for node, (low, high) in end.coins.items():
            coins[b, place[node]] = float(high) - NEAR if side else float(low) + NEAR
    kept: list[np.ndarray] = []

    def keep(keys: np.ndarray) -> np.ndarray:
        kept.extend(np.exp(keys - keys.max(-1, keepdims=True)))
        return np.arange(len(kept) - len(keys), len(kept))

    with pytest.MonkeyPatch.context() as patch, np.errstate(divide="ignore"):
        patch.setattr(verification, "coins", lambda *_: coins)
        patch.setattr(distributions, "gumbels", lambda seed, stream, row, vocab_size: 0)
        patch.setattr(distributions, "best_tokens", keep)
        logits = (torch.from_numpy(np.log(side)).float() for side in (target, draft))
        verified = verify_tree(
            tokens, parents, *logits, method=method, replacement=replacement and method in EITHER_DRAW, ranks=ranks,
            max_depth=max_depth, impl="torch", **filters,
        )  # fmt: skip
    for (tree, end, side), place, path, length, _ in zip(cases, places, *map(Tensor.tolist, verified), strict=True):
        way = [end.path[-1] if end.path else 0]  # of equal siblings, those that the last node hangs below
        while way[0] > 0:
            way.insert(0, tree.parents[way[0]])
        assert path[: length + 1] == [place[node] for node in way], (tree, end, side)
    chances = np.stack(kept)[verified.next_token]
    expected = np.array([end.law for _, end, _ in cases], float)
    np.testing.assert_allclose(chances / chances.sum(-1, keepdims=True), expected, atol=3e-6)
    return len(cases) // 2
