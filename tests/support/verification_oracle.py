"""What verified trees emit, exactly: all draws and all coins over tiny vocabularies, in rational numbers.

Nothing here is shared with the kernels. A `Language` has a target and a draft distribution after each context. `drawn`
lists every tree that a way of growing can draw, with its probability; a verifier gives, for one such tree, the law of
the path and of the token after it, over its coins; `text_law` puts both together, step after step, and the target's own
continuation behind. For a lossless verifier that is `target_law`, with a difference of exactly 0.

The verifiers, `rejection`, `held`, `traversal` and `held_traversal`, are written from their formulas, plainly.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

Law = tuple[Fraction, ...]  # a probability for each token
ONE, NONE = Fraction(1), Fraction(0)


class Language:
    """target(context) and draft(context): rational laws over the vocabulary, any at each context, and zeros in both."""

    def __init__(self, vocab_size: int, seed: int, zeros: float = 0.0, most: int = 9):
        self.vocab_size, self.seed, self.zeros, self.most = vocab_size, seed, zeros, most
        self._known: dict[tuple, Law] = {}

    def target(self, context: tuple[int, ...]) -> Law:
        return self._law("target", context)

    def draft(self, context: tuple[int, ...]) -> Law:
        return self._law("draft", context)

    def _law(self, side: str, context: tuple[int, ...]) -> Law:
        if (side, context) not in self._known:
            chosen = random.Random(f"{self.seed} {side} {context}")
            parts = [
                0 if chosen.random() < self.zeros else chosen.randint(1, self.most) for _ in range(self.vocab_size)
            ]
            parts[chosen.randrange(self.vocab_size)] += not any(parts)
            self._known[side, context] = tuple(Fraction(part, sum(parts)) for part in parts)
        return self._known[side, context]


class Drawn(NamedTuple):
    """A drawn tree: the parent and the token of each node, siblings in draw order. Node 0 is the root, of no token.

    A token of -1 is an absent node: nothing was left to draw.
    """

    parents: tuple[int, ...] = (-1,)
    tokens: tuple[int, ...] = (-1,)

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def context(self, node: int) -> tuple[int, ...]:
        return () if node == 0 else (*self.context(self.parents[node]), self.tokens[node])

    def present(self, node: int) -> bool:
        return node == 0 or (self.tokens[node] >= 0 and self.present(self.parents[node]))


Growth = Callable[[Drawn], int | None]  # the node that gets the next child, or None for a finished tree


def static(parents: Sequence[int]) -> Growth:
    """A tree of fixed shape: parents[0] = -1, siblings are drawn in index order."""
    return lambda tree: parents[len(tree.parents)] if len(tree.parents) < len(parents) else None


def drawn(
    language: Language, growth: Growth, context: tuple[int, ...], replacement: bool = False, fill: bool = False
) -> Iterator[tuple[Drawn, Fraction]]:
    """Every tree that is drawn below a context, with its probability.

    fill: whether children are drawn uniformly from the tokens left, once no others have any draft probability.
    """

    def further(tree: Drawn, probability: Fraction) -> Iterator[tuple[Drawn, Fraction]]:
        parent = growth(tree)
        if parent is None:
            yield tree, probability
            return
        law = [NONE] * language.vocab_size
        if tree.present(parent):
            elder = [] if replacement else [tree.tokens[child] for child in tree.children(parent)]
            law = [NONE if v in elder else q for v, q in enumerate(language.draft((*context, *tree.context(parent))))]
            if fill and not any(law):
                law = [Fraction(v not in elder) for v in range(language.vocab_size)]
        for token, q in enumerate(law) if any(law) else [(-1, ONE)]:
            if q:
                child = Drawn((*tree.parents, parent), (*tree.tokens, token))
                yield from further(child, probability * q / (sum(law) or 1))

    yield from further(Drawn(), ONE)


# The law of the accepted path, root left out, and of the token after it: {((node, ...), token): probability}.
Verdict = dict[tuple[tuple[int, ...], int], Fraction]
Verifier = Callable[[Language, Drawn, tuple[int, ...], bool], Verdict]


def text_law(
    language: Language,
    verifier: Verifier,
    growth: Growth,
    length: int,
    *,
    steps: int = 1,
    context: tuple[int, ...] = (),
    replacement: bool = False,
    fill: bool = False,
) -> dict[tuple[int, ...], Fraction]:
    """The law of the first `length` tokens: of so many steps, and then of the target alone."""
    law: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    if length <= 0 or steps == 0:
        return target_law(language, context, max(length, 0))
    emitted: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    for tree, probability in drawn(language, growth, context, replacement, fill):
        verdict = verifier(language, tree, context, replacement)
        assert sum(verdict.values()) == 1, (tree, verdict)
        for (path, token), chance in verdict.items():
            emitted[(*(tree.tokens[node] for node in path), token)] += probability * chance
    for begin, probability in emitted.items():
        rest = text_law(
            language, verifier, growth, length - len(begin), steps=steps - 1, context=(*context, *begin),
            replacement=replacement, fill=fill,
        )  # fmt: skip
        for end, chance in rest.items():
            law[(*begin, *end)[:length]] += probability * chance
    return {text: chance for text, chance in law.items() if chance}


def target_law(language: Language, context: tuple[int, ...], length: int) -> dict[tuple[int, ...], Fraction]:
    """The law of the next `length` tokens, by the target alone."""
    law = {}
    for text in product(range(language.vocab_size), repeat=length):
        law[text] = ONE
        for place, token in enumerate(text):
            law[text] *= language.target((*context, *text[:place]))[token]
    return {text: chance for text, chance in law.items() if chance}


class Chain(NamedTuple):
    """A node's children in draw order, weighed by one of the rules below.

    takes:     t of each child
    leaves:    n before the first child, and after each one
    recovered: the law of the token where the node is the last one; None where that never happens
    """

    takes: list[Fraction]
    leaves: list[Fraction]
    recovered: Law | None


def chain(
    target: Law, draft: Law, tokens: Sequence[int], replacement: bool, weight: Fraction = ONE, held: bool = False
) -> Chain:
    """F(l) = sum max(P - l Q, 0); with w: l = 0, c = n = w; and for each child x

        t = min(1, c max(P(x) - l Q(x), 0) R / Q(x));  t = 1: n = 0, and no further child
        l += 1 / (c R);  S = c F(l);  r = (1 - n) + S
        traversal:  c <- c / r,            n <- S / r
        held:       c <- c (1 - t) / r,    n <- (1 - t) S / r

    R is the mass of Q on tokens not drawn (1 for independent draws). Draft used up: P on the tokens left, Q uniform on
    them, l = 0, R = 1, while c and n stay. A child of no draft probability is skipped.
    """
    p, q, seen = list(target), list(draft), set()
    multiple, c, n = NONE, weight, weight
    takes, leaves = [], [weight]
    for token in tokens:
        undrawn = [v for v in range(len(p)) if replacement or v not in seen]
        mass = sum(q[v] for v in undrawn)
        if undrawn and mass == 0:
            p = [p[v] if v in undrawn else NONE for v in range(len(p))]
            q = [Fraction(v in undrawn, len(undrawn)) for v in range(len(p))]
            multiple, mass = NONE, ONE
        take = NONE
        if n and token in undrawn and q[token]:
            take = min(ONE, c * max(p[token] - multiple * q[token], NONE) * mass / q[token])
            if take < 1 and c:
                multiple += 1 / (c * mass)
                rest = c * sum(_rest(p, q, multiple))
                whole = 1 - n + rest
                c, n = (factor / whole * ((1 - take) if held else 1) for factor in (c, rest))
            else:
                n *= take < 1
            seen.add(token)
        takes.append(take)
        leaves.append(n)
    rest = _rest(p, q, multiple)
    return Chain(takes, leaves, tuple(part / sum(rest) for part in rest) if sum(rest) else None)


def _rest(p: Sequence[Fraction], q: Sequence[Fraction], multiple: Fraction) -> list[Fraction]:
    return [max(one - multiple * other, NONE) for one, other in zip(p, q, strict=True)]


# A rule for one node: the probability of each child, and the law of the token where none is accepted.
NodeRule = Callable[[Law, Law, Sequence[int], bool], tuple[list[Fraction], Law | None]]


def rejecting(target: Law, draft: Law, tokens: Sequence[int], replacement: bool) -> tuple[list[Fraction], Law | None]:
    """Recursive rejection: P <- norm max(P - Q, 0), and Q without the child, after each rejection."""
    p, q, reach, weights = list(target), list(draft), ONE, []
    left = set(range(len(p)))
    for token in tokens:
        if left and not sum(q):
            q = [Fraction(v in left, len(left)) for v in range(len(p))]
            p = [p[v] * (v in left) for v in range(len(p))]
            p = [part / (sum(p) or 1) for part in p]
        if token < 0 or not q[token]:
            weights.append(NONE)
            continue
        take = min(ONE, p[token] / q[token])
        weights.append(reach * take)
        reach *= 1 - take
        p = _rest(p, q, ONE)
        p = [part / (sum(p) or 1) for part in p]
        if not replacement:
            left.discard(token)
            q = [part * (v in left) for v, part in enumerate(q)]
            q = [part / (sum(q) or 1) for part in q]
    return weights, tuple(p) if sum(p) else None


def holding(target: Law, draft: Law, tokens: Sequence[int], replacement: bool) -> tuple[list[Fraction], Law | None]:
    """Held siblings: stop with probability n; else for j = k .. 1 accept x_j with probability t_j / (1 - n after j)."""
    takes, leaves, recovered = chain(target, draft, tokens, replacement, held=True)
    weights, reach = [NONE] * len(tokens), 1 - leaves[-1]
    for j in reversed(range(len(tokens))):
        held = 1 - leaves[j + 1]
        if takes[j]:
            weights[j] = reach * takes[j] / held
            reach -= weights[j]
        assert reach >= 0
    return weights, recovered


def top_down(rule: NodeRule) -> Verifier:
    """Walk down from the root by a rule for one node. Equal siblings of an accepted node have its children, too."""

    def verify(language: Language, tree: Drawn, context: tuple[int, ...], replacement: bool) -> Verdict:
        verdict: Verdict = defaultdict(Fraction)

        def walk(equals: list[int], path: tuple[int, ...], reach: Fraction) -> None:
            here = (*context, *(tree.tokens[node] for node in path))
            children = candidates(tree, equals)
            tokens = [tree.tokens[child] for child in children]
            weights, recovered = rule(language.target(here), language.draft(here), tokens, replacement)
            for child, weight in zip(children, weights, strict=True):
                if weight:
                    again = [other for other in children if tree.tokens[other] == tree.tokens[child]]
                    walk(again, (*path, child), reach * weight)
            if sum(weights) < 1:
                assert recovered is not None
                for token, chance in enumerate(recovered):
                    if chance:
                        verdict[path, token] += reach * (1 - sum(weights)) * chance

        walk([0], (), ONE)
        return verdict

    return verify


def by_law(rule: Callable[[Tensor, Tensor, Tensor], Tensor]) -> NodeRule:
    """A rule as `heavypath.kernels.verifying.top_down` takes it, computed in fp64 and rounded to the fractions meant.

    Two fractions with denominators of at most 10^6 are 10^-12 apart, so those of a small language are told from each
    other. Were they not, `text_law` would find probabilities that do not sum to 1.
    """

    def decide(target: Law, draft: Law, tokens: Sequence[int], replacement: bool) -> tuple[list[Fraction], Law | None]:
        if not tokens:
            return [], target
        logs = (torch.tensor([[[*map(float, law)]]], dtype=torch.float64).log() for law in (target, draft))
        chances = rule(*logs, torch.tensor([[[*tokens, -1]]]))[0, 0].tolist()
        law = [Fraction(chance).limit_denominator(10**6) for chance in chances]
        first = [token not in tokens[:place] for place, token in enumerate(tokens)]  # of equal children
        rest = [chance * (token not in tokens) for token, chance in enumerate(law)]
        recovered = tuple(part / sum(rest) for part in rest) if sum(rest) else None
        return [law[token] * here for token, here in zip(tokens, first, strict=True)], recovered

    return decide


def candidates(tree: Drawn, equals: list[int]) -> list[int]:
    """The present children of nodes with one context: the first child of each, then the second of each, and so on."""
    children = [(rank, child) for node in equals for rank, child in enumerate(tree.children(node))]
    return [child for _, child in sorted(children) if tree.tokens[child] >= 0]


def _traversal(
    language: Language, tree: Drawn, context: tuple[int, ...], replacement: bool, held: bool = False
) -> Verdict:
    """Accept the first node in post-order (children in draw order, then the node) whose own coin is below m.

    traversal:       w(x_j) = t_j;                              m = n
    held traversal:  w(x_j) = W_j / (1 - sum_{i<j} W_i);        m = n / (1 - sum W), with W of `holding`

    The root has w = 1, a leaf m = w. Children of equal later siblings hang below the first.
    """
    verdict: Verdict = defaultdict(Fraction)
    reach = ONE

    def visit(equals: list[int], path: tuple[int, ...], weight: Fraction) -> None:
        nonlocal reach
        here = (*context, *(tree.tokens[node] for node in path))
        children = candidates(tree, equals)
        tokens = [tree.tokens[child] for child in children]
        target, draft = language.target(here), language.draft(here)
        takes, leaves, recovered = chain(target, draft, tokens, replacement, weight, held)
        last = leaves[-1]
        if held:
            takes, last = _in_order(takes, leaves)
        for child, take in zip(children, takes, strict=True):
            if take:
                again = [other for other in children if tree.tokens[other] == tree.tokens[child]]
                visit(again, (*path, child), take)
        if last:
            assert recovered is not None
            for token, chance in enumerate(recovered):
                if chance and reach:
                    verdict[path, token] += reach * last * chance
        reach *= 1 - last

    visit([0], (), ONE)
    return verdict


def _in_order(takes: list[Fraction], leaves: list[Fraction]) -> tuple[list[Fraction], Fraction]:
    """w of each child, and m, of a node that `chain` has weighed with `held`."""
    weights, reach = [NONE] * len(takes), 1 - leaves[-1]
    for j in reversed(range(len(takes))):
        if takes[j]:
            weights[j] = reach * takes[j] / (1 - leaves[j + 1])
            reach -= weights[j]
    before = [sum(weights[:j]) for j in range(len(weights) + 1)]
    chances = [part / (1 - elder) if elder < 1 else NONE for part, elder in zip(weights, before, strict=False)]
    return chances, leaves[-1] / (1 - before[-1]) if before[-1] < 1 else NONE


rejection, held = top_down(rejecting), top_down(holding)
traversal, held_traversal = _traversal, partial(_traversal, held=True)
