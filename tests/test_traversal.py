"""Traversal verification against exact enumeration: every tree that can be drawn, every way the coins can fall.

Each node's distributions depend on the whole text before it. The reference runs once for each node that may be the
accepted one, with coins that note what they are compared with. So its own probabilities are known, and the law of the
text that it emits is a sum, with the target's own continuation behind a step that ends early.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.kernels.nodes import Nodes
from heavypath.kernels.noise import Noise
from heavypath.kernels.verifying import traversal
from heavypath.kernels.verifying.rule import Rule
from heavypath.speculative.trees.tree import TokenTree

Text = tuple[int, ...]
Law = dict[Text, float]
PLAIN = Filters()


class Language:
    """Logits of the target and of the draft after every text: small integers, so that some laws are equal."""

    def __init__(self, vocab_size: int, seed: int, spread: int = 2):
        self.vocab_size, self.seed, self.spread = vocab_size, seed, spread

    @cache  # noqa: B019
    def logits(self, text: Text) -> np.ndarray:
        """fp32 [2, V]: the target's, the draft's."""
        random = np.random.default_rng([self.seed, *text])
        return (self.spread * random.standard_normal((2, self.vocab_size))).astype(np.float32)

    @cache  # noqa: B019
    def law(self, text: Text, side: int, filters: Filters) -> tuple[float, ...]:
        return tuple(filtered_logprobs(torch.from_numpy(self.logits(text)[side]), filters).exp().tolist())

    def continued(self, law: Law, length: int, filters: Filters = PLAIN) -> Law:
        """The law of the first `length` tokens, where the target goes on behind shorter texts."""
        done: Law = defaultdict(float)
        for text, probability in law.items():
            if len(text) >= length:
                done[text[:length]] += probability
            elif probability:
                step = {(*text, token): probability * p for token, p in enumerate(self.law(text, 0, filters))}
                for longer, p in self.continued(step, length, filters).items():
                    done[longer] += p
        return done


class Drawn(NamedTuple):
    """A tree as it may be drawn: node 0 is the root; tokens of -1 are absent."""

    tokens: list[int]
    parents: list[int]
    ranks: list[int]
    probability: float

    def path(self, node: int) -> Text:
        return (0,) if node == 0 else (*self.path(self.parents[node]), node)

    def text(self, node: int) -> Text:
        return tuple(self.tokens[above] for above in self.path(node)[1:])

    @property
    def depth(self) -> int:
        return max(len(self.path(node)) for node in range(len(self.tokens))) - 1


class Draws(NamedTuple):
    """How children are drawn."""

    replacement: bool = False
    fill: bool = False
    filters: Filters = PLAIN

    def __call__(self, language: Language, text: Text, drawn: Text, k: int) -> Iterator[tuple[Text, float]]:
        """All ways to draw k more children of a node behind those `drawn`, and their probabilities."""
        if k == 0:
            yield (), 1.0
            return
        if self.filters.temperature == 0:
            yield tuple(np.argsort(-language.logits(text)[1], kind="stable")[len(drawn) : len(drawn) + k].tolist()), 1.0
            return
        left = np.array(language.law(text, 1, self.filters))
        if not self.replacement:
            left[[token for token in drawn if token >= 0]] = 0
            if left.sum() == 0 and self.fill:
                left[[token for token in range(len(left)) if token not in drawn]] = 1
        if left.sum() == 0:
            yield (-1,) * k, 1.0
            return
        for token in left.nonzero()[0].tolist():
            for more, probability in self(language, text, (*drawn, token), k - 1):
                yield (token, *more), float(left[token] / left.sum()) * probability


def static(tree: TokenTree) -> Callable[[Language, Draws, Text], list[Drawn]]:
    """All ways to draw a tree of one shape below a text."""
    parents, ranks = tree.parents.tolist(), tree.ranks.tolist()

    def draw(language: Language, draws: Draws, prefix: Text) -> list[Drawn]:
        trees = [Drawn([0] + [-1] * (len(tree) - 1), parents, ranks, 1.0)]
        for node in range(len(tree)):
            children = sorted((i for i in range(1, len(tree)) if parents[i] == node), key=ranks.__getitem__)
            grown = []
            for drawn in trees:
                if node and drawn.tokens[node] < 0:
                    grown.append(drawn)
                    continue
                for draw, probability in draws(language, prefix + drawn.text(node), (), len(children)):
                    tokens = [*drawn.tokens]
                    for child, token in zip(children, draw, strict=True):
                        tokens[child] = token
                    grown.append(drawn._replace(tokens=tokens, probability=drawn.probability * probability))
            trees = grown
        return trees

    return draw


def by_value(size: int) -> Callable[[Language, Draws, Text], list[Drawn]]:
    """DySpec's heap: draw, one after the other, where the next draw is worth most by the draft."""

    def draw(language: Language, draws: Draws, prefix: Text) -> list[Drawn]:
        def values(drawn: Drawn) -> list[tuple[float, int]]:
            worth, taken = [1.0], [1.0]  # of the node, and what its drawn children leave of the draft
            for node in range(1, len(drawn.tokens)):
                parent = drawn.parents[node]
                q = language.law(prefix + drawn.text(parent), 1, draws.filters)[drawn.tokens[node]]
                worth.append(worth[parent] * q)
                taken[parent] -= q
                taken.append(1.0)
            return [(a * b, -node) for node, (a, b) in enumerate(zip(worth, taken, strict=True)) if b > 1e-9]

        trees = [Drawn([0], [-1], [0], 1.0)]
        for _ in range(size - 1):
            grown = []
            for drawn in trees:
                node = -max(values(drawn))[1]
                before = tuple(t for t, p in zip(drawn.tokens, drawn.parents, strict=True) if p == node)
                for (token,), probability in draws(language, prefix + drawn.text(node), before, 1):
                    grown.append(Drawn([*drawn.tokens, token], [*drawn.parents, node], [*drawn.ranks, len(before)],
                                       drawn.probability * probability))  # fmt: skip
            trees = grown
        return trees

    return draw


class Coin:
    """Falls where the test wants it, and notes what it was compared with, and after which others."""

    def __init__(self, node: int, accepted: int, met: dict[int, float]):
        self.node, self.accepts, self.met = node, node in (0, accepted), met

    def __lt__(self, threshold: float) -> bool:
        self.met[self.node] = threshold
        return self.accepts


class Verifier(NamedTuple):
    """How a tree is verified."""

    rule: Rule
    target_filters: Filters = PLAIN
    draft_filters: Filters = PLAIN
    max_depth: int | None = None
    module: ModuleType = traversal

    def emitted(self, language: Language, trees: list[Drawn], prefix: Text, monkeypatch) -> Law:
        """The law of what one step emits behind a text, by the reference's own probabilities."""
        size = len(trees[0].tokens)
        copies = [(tree, node, {}) for tree in trees for node in range(size)]
        logits = np.zeros((2, len(copies), size, language.vocab_size), dtype=np.float32)
        for b, (tree, _, _) in enumerate(copies):
            for node in range(size):
                if min(tree.tokens[above] for above in tree.path(node)) >= 0:
                    logits[:, b, node] = language.logits(prefix + tree.text(node))
        coins = [[Coin(node, accepted, met) for node in range(size)] for _, accepted, met in copies]
        keys = []
        with monkeypatch.context() as patch:
            patch.setattr(self.module, "coins", lambda *_: np.array(coins, dtype=object))
            patch.setattr(self.module, "gumbels", lambda *_: 0)
            patch.setattr(self.module, "best_token", lambda given: (keys.append(given), given.argmax(-1))[1])
            nodes = (torch.tensor([getattr(tree, name) for tree, _, _ in copies]) for name in Nodes._fields)
            target, draft = map(torch.from_numpy, logits)
            verified = self.module.traverse(
                Nodes(*nodes), target, draft, rule=self.rule,
                max_depth=max(trees[0].depth, 0) if self.max_depth is None else self.max_depth,
                target_filters=self.target_filters, draft_filters=self.draft_filters, noise=Noise(0, None),
            )  # fmt: skip
        law: Law = defaultdict(float)
        for begin in range(0, len(copies), size):
            tree, _, met = copies[begin]  # which ends at the root, behind all others
            reached = tree.probability
            ends = {int(verified.path[b, verified.length[b]]): b for b in range(begin, begin + size)}
            for node, threshold in met.items():
                if reached * threshold > 0:
                    weights = np.exp(keys[0][ends[node]])
                    for token, share in enumerate((weights / weights.sum()).tolist()):
                        law[*prefix, *tree.text(node), token] += reached * threshold * share
                reached *= 1 - threshold
            assert reached == 0, "the walk ends at the root at the latest"
        return law


def error(language, draw, draws, verifier, monkeypatch, steps=1) -> float:
    """How far the law of a text is from the target's, at most, behind so many steps."""
    law: Law = {(): 1.0}
    length = 0
    for _ in range(steps):
        after: Law = defaultdict(float)
        for text, probability in law.items():
            trees = draw(language, draws, text)
            length = max(length, len(text) + max(tree.depth for tree in trees) + 1)
            for longer, p in verifier.emitted(language, trees, text, monkeypatch).items():
                after[longer] += probability * p
        law = after
    exact = language.continued({(): 1.0}, length, verifier.target_filters)
    got = language.continued(law, length, verifier.target_filters)
    assert sum(got.values()) == pytest.approx(1, abs=1e-6)
    return max(abs(got[text] - p) for text, p in exact.items())


TRAVERSAL, INDEPENDENT = Rule("traversal"), Rule("traversal", replacement=True)
HELD, HELD_INDEPENDENT = Rule("held_traversal"), Rule("held_traversal", replacement=True)
EXACT = 2e-6  # probabilities are computed from fp32 rows


SHAPES = [TokenTree([-1, *parents]) for n in (1, 2, 3) for parents in itertools.product(*(range(i) for i in range(1, n + 1)))]


@pytest.mark.parametrize("rule", [TRAVERSAL, INDEPENDENT, HELD, HELD_INDEPENDENT], ids=str)
@pytest.mark.parametrize("tree", SHAPES, ids=lambda t: str(t.parents.tolist()))
def test_the_law(tree, rule, monkeypatch):
    for seed in range(2):
        draws = Draws(rule.replacement)
        assert error(Language(3, seed), static(tree), draws, Verifier(rule), monkeypatch) < EXACT
