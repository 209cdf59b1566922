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
from heavypath.kernels.verification import verify_tree
from heavypath.kernels.verifying import distributions
from heavypath.kernels.verifying.rule import EITHER_DRAW

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


def check_decisions(
    verifier: Verifier, language: Language, trees: Iterable[Drawn], *, method: str, replacement=False, laws=False,
    max_depth: int | None = None,
) -> int:  # fmt: skip
    """Fail unless verify_tree ends where the oracle's verifier does, with its law of the next token; how many ends.

    Each end is tried with all its coins near the least that lead there, and with all near the largest; other coins are
    NaN. Nodes are in a shuffled order, and rows of leaves, which nobody may read, NaN. laws: whether each node says
    which row of draft_logits it was drawn from
    """
    plain = language.language if isinstance(language, Filtered) else language
    filters = {}
    if isinstance(language, Filtered):
        filters = language.target_filters._asdict() | draft_options(language.draft_filters)
    cases = []
    for tree in trees:
        there = [max_depth is None or len(tree.context(node)) <= max_depth for node in range(len(tree.parents))]
        tokens = (token if here else -1 for token, here in zip(tree.tokens, there, strict=True))
        for end in verifier.ends(language, tree._replace(tokens=(*tokens,)), (), replacement):
            gaps = [float(high - low) for low, high in end.coins.values()]
            if end.chance and min(gaps, default=1.0) > 3 * NEAR:
                cases += [(tree, end, side) for side in (0, 1)]
    count, vocab = len(cases[0][0].parents), language.vocab_size
    pairs = sorted({pair for tree, *_ in cases for pair in zip(tree.parents, tree.sources, strict=True)})
    batch, rows = len(cases), count + len(pairs) if laws else count
    tokens, parents, ranks, drawn_from = torch.zeros(4, batch, count, dtype=torch.long)
    coins = np.full((batch, count), np.nan)
    target, draft = np.full((batch, count, vocab), np.nan), np.full((batch, rows, vocab), np.nan)
    places = []
    for b, (tree, end, side) in enumerate(cases):
        order = shuffled(tree)
        place = {node: new for new, node in enumerate(order)} | {-1: -1}
        places.append(place)
        for node, new in ((node, place[node]) for node in order):
            parent = tree.parents[node]
            tokens[b, new], parents[b, new] = tree.tokens[node], place[parent]
            ranks[b, new] = tree.children(parent).index(node) if node else 0
            if tree.present(node):
                target[b, new] = plain.target(tree.context(node))
            if node:
                row = count + pairs.index((parent, tree.sources[node])) if laws else place[parent]
                drawn_from[b, new] = row
                if tree.present(parent):
                    source = tree.sources[node] if laws else 0
                    draft[b, row] = plain.draft(tree.context(parent), source)
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
            **({"laws": drawn_from} if laws else {}),
        )  # fmt: skip
    for (tree, end, side), place, path, length, token in zip(cases, places, *map(Tensor.tolist, verified), strict=True):
        way = [end.path[-1] if end.path else 0]  # of equal siblings, those that the last node hangs below
        while way[0] > 0:
            way.insert(0, tree.parents[way[0]])
        assert path[: length + 1] == [place[node] for node in way], (tree, end, side)
        np.testing.assert_allclose(kept[token] / kept[token].sum(), np.array(end.law, float), atol=3e-6)
    return len(cases) // 2
