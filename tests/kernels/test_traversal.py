"""Traversal verification against exact enumeration: every tree that can be drawn, every way the coins can fall.

Each node's distributions depend on the whole text before it. The reference runs once for each node that may be the
accepted one, with coins that note what they are compared with. So its own probabilities are known, and the law of the
text that it emits is a sum, with the target's own continuation behind a step that ends early.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from mutations import mutated

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.kernels.nodes import Nodes
from heavypath.kernels.noise import Noise
from heavypath.kernels.verification import verify_tree
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
        self.node, self.accepts, self.met = node, node == accepted, met

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
    order: Callable[[Drawn, int], int] = lambda tree, node: 0  # of those that the coins accept, which is the first

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
            tree, _, met = copies[begin]  # which ends at the root, behind all others, without a coin
            met[0] = 1.0
            reached = tree.probability
            ends = {int(verified.path[b, verified.length[b]]): b for b in range(begin, begin + size)}
            for node, threshold in sorted(met.items(), key=lambda item, tree=tree: self.order(tree, item[0])):
                if reached * threshold > 0:
                    weights = np.exp(keys[0][ends[node]])
                    for token, share in enumerate((weights / weights.sum()).tolist()):
                        law[*prefix, *tree.text(node), token] += reached * threshold * share
                reached *= 1 - threshold
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
    return max(abs(got[text] - p) for text, p in exact.items())


TRAVERSAL, INDEPENDENT = Rule("traversal"), Rule("traversal", replacement=True)
HELD, HELD_INDEPENDENT = Rule("held_traversal"), Rule("held_traversal", replacement=True)
RULES = {"traversal": TRAVERSAL, "independent": INDEPENDENT, "held": HELD, "held independent": HELD_INDEPENDENT}
EXACT = 2e-6  # probabilities are computed from fp32 rows
CHAIN, PAIR, TWINS = TokenTree.chain(2), TokenTree([-1, 0, 0]), TokenTree.k_ary(2, 2)


def all_shapes(nodes: int, depth: int) -> list[TokenTree]:
    """Every tree of so many nodes that is at most so deep, each in one order of its siblings."""
    shapes = [TokenTree([-1, *parents]) for parents in product(*(range(i) for i in range(1, nodes)))]
    return [tree for tree in shapes if tree.depth <= depth and (tree.parents[2:] >= tree.parents[1:-1]).all()]


@pytest.mark.parametrize("name", RULES)
def test_all_small_trees_keep_the_law_exactly(name, monkeypatch):
    rule = RULES[name]
    for nodes in (2, 3, 4):
        for seed, tree in enumerate(all_shapes(nodes, 3)):
            found = error(Language(3, seed), static(tree), Draws(rule.replacement), Verifier(rule), monkeypatch)
            assert found < EXACT, tree


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [2, 3, 4])
@pytest.mark.parametrize("name", RULES)
def test_all_trees_of_five_nodes_keep_the_law_exactly(name, vocab_size, monkeypatch):
    rule = RULES[name]
    for tree in all_shapes(5, 3):
        for seed in range(2):
            language = Language(vocab_size, seed, spread=1 + seed)
            found = error(language, static(tree), Draws(rule.replacement), Verifier(rule), monkeypatch)
            assert found < EXACT, (tree, seed)


@pytest.mark.parametrize("name", RULES)
def test_two_steps_keep_the_law_exactly(name, monkeypatch):
    rule = RULES[name]
    for tree in (CHAIN, PAIR):
        verifier = Verifier(rule)
        assert error(Language(3, 7), static(tree), Draws(rule.replacement), verifier, monkeypatch, steps=2) < EXACT


OTHERS = {
    "siblings out of index order": (TokenTree([-1, 0, 0, 1, 2], [0, 1, 0, 0, 0]), Draws(), {}),
    "no draft": (TokenTree([-1]), Draws(), {}),
    "shallow": (TWINS, Draws(), {"max_depth": 1}),
    "other temperatures": (PAIR, Draws(filters=Filters(1.5)), {"target_filters": Filters(0.6)}),
    "a filtered target": (TWINS, Draws(), {"target_filters": Filters(1.2, 2)}),
    "a truncated draft": (TokenTree.k_ary(3, 1), Draws(filters=Filters(top_k=2)), {}),
    "a truncated draft, filled": (TokenTree([-1, 0, 0, 0, 3]), Draws(fill=True, filters=Filters(top_k=1)), {}),
    "the draft's likeliest": (TokenTree([-1, 0, 0, 1, 2]), Draws(filters=Filters(0.0)), {}),
    "a leaf's equal sibling has children": (TokenTree([-1, 0, 0, 2]), Draws(replacement=True), {}),
}


@pytest.mark.parametrize("method", ["traversal", "held_traversal"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_trees_and_filters_keep_the_law_exactly(name, method, monkeypatch):
    tree, draws, options = OTHERS[name]
    verifier = Verifier(Rule(method, draws.replacement), draft_filters=draws.filters, **options)
    assert error(Language(3, 3), static(tree), draws, verifier, monkeypatch) < EXACT


def test_a_tree_that_grows_by_value_keeps_the_law_under_traversal_alone(monkeypatch):
    """Held traversal is refused for such trees: whether a sibling is there may depend on tokens below an elder one."""
    errors = {
        rule: max(error(Language(3, seed, 1), by_value(5), Draws(), Verifier(rule), monkeypatch) for seed in range(3))
        for rule in (TRAVERSAL, HELD)
    }
    assert errors[TRAVERSAL] < EXACT
    assert errors[HELD] > 1e-4


def test_children_of_all_equal_siblings_are_candidates(monkeypatch):
    """Siblings 1 and 2 both carry token 1; node 3 hangs below the second of them only."""
    tree = Drawn([0, 1, 1, 2], [-1, 0, 0, 2], [0, 0, 1, 0], 1.0)
    law = Verifier(INDEPENDENT).emitted(Language(3, 1), [tree], (), monkeypatch)
    assert sum(p for text, p in law.items() if text[:2] == (1, 2) and len(text) > 2) > 0.01


def test_weights_that_shrink_below_every_number_are_0():
    """A chain of tokens that the target hardly ever takes; its coins are 0, and below nothing but 0."""
    tokens, parents = torch.ones(1, 12, dtype=torch.long), torch.arange(-1, 11)
    target, draft = torch.tensor([0.0, -80.0]).expand(1, 12, 2), torch.zeros(1, 12, 2)
    for rule in RULES.values():
        for seed in range(3):
            verified = verify_tree(tokens, parents, target, draft, **rule._asdict(), seed=seed)
            assert (verified.length.tolist(), verified.next_token.tolist()) == ([0], [0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", ["target", "draft"])
def test_a_row_without_a_distribution_is_refused_where_it_is_read(side, dtype):
    """Nothing hangs below node 2, whose row of the draft is never read."""
    tokens, parents = torch.tensor([[0, 1, 2], [0, 2, 1]]), torch.tensor([-1, 0, 1])
    logits = {"target": torch.zeros(2, 3, 3, dtype=dtype), "draft": torch.zeros(2, 3, 3, dtype=dtype)}
    logits["draft"][:, 2] = torch.nan
    assert verify_tree(tokens, parents, *logits.values(), method="traversal").length.tolist() == [2, 2]
    for bad in (torch.nan, torch.inf, -torch.inf):
        logits[side][1, 1] = bad
        with pytest.raises(ValueError, match=rf"{side}_logits must have a finite maximum .* \[1, 1\] has {bad}"):
            verify_tree(tokens, parents, *logits.values(), method="traversal")


def test_absent_nodes_and_what_hangs_below_them_are_passed_by(monkeypatch):
    tree = Drawn([0, -1, 2, 1], [-1, 0, 0, 1], [0, 0, 1, 0], 1.0)
    law = Verifier(TRAVERSAL).emitted(Language(3, 1), [tree], (), monkeypatch)
    assert {text[0] for text in law if len(text) > 1} == {2}


def block_verification(target: np.ndarray, draft: np.ndarray, drawn: list[int]) -> list[float]:
    """The law of how many tokens are accepted, as in algorithm 2 of Sun et al. 2024.

    target [L + 1, V], draft [L, V]: probabilities; drawn: L tokens
    """
    kept, h = [1.0], []
    for place, token in enumerate(drawn):
        kept.append(min(kept[-1] * target[place, token] / draft[place, token], 1.0))
    for place in range(1, len(drawn)):
        residual = np.maximum(kept[place] * target[place] - draft[place], 0).sum()
        h.append(residual / (residual + 1 - kept[place]))
    h.append(kept[-1])
    longest = [1.0]  # the paper looks at all lengths, and takes the longest whose coin falls
    law = []
    for chance in h[::-1]:
        law.append(longest[-1] * chance)
        longest.append(longest[-1] * (1 - chance))
    return [longest[-1], *law[::-1]]


@pytest.mark.parametrize("method", ["traversal", "held_traversal"])
def test_on_a_chain_it_is_block_verification(method, monkeypatch):
    language, chain = Language(4, 5), TokenTree.chain(4)
    for tokens in ([0, 1, 2, 3], [3, 3, 0, 1], [2, 0, 0, 0], [1, 2, 2, 1]):
        tree = Drawn([0, *tokens], chain.parents.tolist(), chain.ranks.tolist(), 1.0)
        texts = [tree.text(node) for node in range(5)]
        laws = [np.array([language.law(text, side, PLAIN) for text in texts]) for side in (0, 1)]
        expected = block_verification(laws[0], laws[1][:4], tokens)
        got = [0.0] * 5
        for text, probability in Verifier(Rule(method)).emitted(language, [tree], (), monkeypatch).items():
            got[len(text) - 1] += probability
        assert got == pytest.approx(expected, abs=1e-6)


def accepted(rule: Rule, language: Language, tree: TokenTree, monkeypatch) -> float:
    trees = static(tree)(language, Draws(rule.replacement), ())
    return sum(p * (len(text) - 1) for text, p in Verifier(rule).emitted(language, trees, (), monkeypatch).items())


@pytest.mark.parametrize("replacement", [False, True])
def test_more_is_accepted_than_by_a_chain_of_decisions(replacement, monkeypatch):
    """A node decided by itself accepts sum_v min(P, Q) of a single child, a chain of two s_1 (1 + s_2)."""
    for seed in range(5):
        language = Language(3, seed)
        target, draft = (
            np.array([language.law(text, side, PLAIN) for text in [(), (0,), (1,), (2,)]]) for side in (0, 1)
        )
        shared = np.minimum(target, draft)
        alone = shared[0].sum() + (shared[0] * shared[1:].sum(1)).sum()
        assert accepted(Rule("traversal", replacement), language, CHAIN, monkeypatch) > alone - 1e-6
        held, plain = (
            accepted(Rule(method, replacement), language, PAIR, monkeypatch)
            for method in ("held_traversal", "traversal")
        )
        assert held > plain - 1e-6


MUTATIONS = {
    "the coin is held against w": (TRAVERSAL, "chain is None else chain.ending", "True else chain.ending"),
    "r without 1 - w": (TRAVERSAL, "total = self.leaving +", "total = 0 * self.leaving +"),
    "R is forgotten": (TRAVERSAL, "self.mass = float(self.draft.sum())\n        if", "pass\n        if"),
    "youngest first": (TRAVERSAL, "in children:\n        weight", "in children[::-1]:\n        weight"),
    "the recovered token by w = 1": (TRAVERSAL, "weight / float(self.left.sum())", "1 / float(self.left.sum())"),
    "equal siblings leave the chain": (INDEPENDENT, "chain.offer(tokens[child])", "chain.offer(tokens[child]) or None"),
    "the support is never filled": (TRAVERSAL, "logs = np.where(self.undrawn, np.float32(0), -np.inf)", "logs[:] = 0"),
    "the held are not": (HELD, "chain.pass_over(tokens[child], 1 - taken)", "chain.pass_over(tokens[child], 1.0)"),
    "a held child keeps its whole weight": (HELD, "held / rest if held > 0 else 0.0", "held"),
}  # fmt: skip


def test_taking_the_deepest_of_the_accepted_nodes_is_found(monkeypatch):
    verifier = Verifier(TRAVERSAL, order=lambda tree, node: -len(tree.path(node)))
    tree = static(TokenTree([-1, 0, 0, 2]))
    assert max(error(Language(3, seed), tree, Draws(), verifier, monkeypatch) for seed in range(4)) > 1e-4


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_bug_of_the_reference_is_found(name, monkeypatch):
    rule, original, replacement = MUTATIONS[name]
    copy = mutated(traversal, original, replacement)
    draws = Draws(rule.replacement)
    if "filled" in name:
        draws = Draws(fill=True, filters=Filters(top_k=1))
    trees = (TokenTree([-1, 0, 0, 1, 1]), TokenTree.k_ary(3, 1))
    found = [
        error(
            Language(3, 2), static(tree), draws, Verifier(rule, draft_filters=draws.filters, module=module), monkeypatch
        )
        for tree in trees
        for module in (traversal, copy)
    ]
    assert max(found[::2]) < EXACT
    assert max(found[1::2]) > 1e-4
