"""What verified trees emit, exactly: all draws and all coins over tiny vocabularies, in rational numbers.

Nothing here is shared with the kernels. A `Language` has a target and draft distributions after each context. `drawn`
lists every tree that a way of growing can draw, with its probability. A `Verifier` lists, for one such tree, each end
of the walk: its path, the law of the token after it, and between which numbers the coins lie that lead there. So
`text_law` sums it all up, step after step, and lets the target go on where the steps end. For a lossless verifier that
is `target_law`, with a difference of exactly 0.

The verifiers, `rejection`, `k_seq`, `held`, `traversal` and `held_traversal`, are written from their formulas, plainly.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from fractions import Fraction
from functools import cache, partial
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters

ONE, NONE = Fraction(1), Fraction(0)
Law = tuple[Fraction, ...]  # a probability for each token
Context = tuple[int, ...]  # the tokens before


class Language:
    """target(context) and draft(context, source): rational laws over the vocabulary, any at each context, and zeros.

    source: which of several drafts
    """

    def __init__(self, vocab_size: int, seed: int, zeros: float = 0.0, most: int = 9):
        self.vocab_size, self.seed, self.zeros, self.most = vocab_size, seed, zeros, most
        self._known: dict[tuple, Law] = {}

    def target(self, context: Context) -> Law:
        return self._law("target", context)

    def draft(self, context: Context, source: int = 0) -> Law:
        return self._law(f"draft {source}" if source else "draft", context)

    def _law(self, side: str, context: Context) -> Law:
        if (side, context) not in self._known:
            chosen = random.Random(f"{self.seed} {side} {context}")
            parts = [
                chosen.randint(1, self.most) if chosen.random() >= self.zeros else 0 for _ in range(self.vocab_size)
            ]
            parts[chosen.randrange(self.vocab_size)] += not any(parts)
            self._known[side, context] = whole(parts)
        return self._known[side, context]


class Filtered(Language):
    """A language whose laws pass through filters; at draft temperature 0 source k is the k-th likeliest token."""

    def __init__(self, language: Language, target_filters: Filters, draft_filters: Filters):
        self.language, self.vocab_size = language, language.vocab_size
        self.target_filters, self.draft_filters = target_filters, draft_filters

    def target(self, context: Context) -> Law:
        return filtered(self.language.target(context), self.target_filters)

    def draft(self, context: Context, source: int = 0) -> Law:
        if self.draft_filters.temperature > 0:
            return filtered(self.language.draft(context, source), self.draft_filters)
        law = self.language.draft(context)
        return whole([Fraction(law[v] == sorted(law)[-1 - source]) for v in range(self.vocab_size)])


def filtered(law: Law, filters: Filters) -> Law:
    """As in transformers, one after the other. 1 / temperature is whole, and no two tokens are equally likely."""
    law = whole([part ** round(1 / filters.temperature) for part in law])
    falling = sorted(law, reverse=True)
    if filters.top_k:
        law = whole([part * (part >= falling[min(filters.top_k, len(law)) - 1]) for part in law])
    if filters.top_p:
        upto = [*accumulate(sorted(law, reverse=True))]
        kept = sum(before < Fraction(filters.top_p) for before in [NONE, *upto[:-1]])
        law = whole([part * (part >= falling[kept - 1]) for part in law])
    if filters.min_p:
        law = whole([part * (part >= max(law) * Fraction(filters.min_p)) for part in law])
    return law


def whole(parts: Sequence[Fraction | int]) -> Law:
    """Divided by their sum, if there is any."""
    total = sum(parts)
    return tuple(Fraction(part, total or 1) for part in parts)


class Drawn(NamedTuple):
    """A drawn tree: parent and token of each node, siblings in draw order. Node 0 is the root, of no token.

    A token of -1 is an absent node: nothing was left to draw. sources: the draft that each node is from
    """

    parents: tuple[int, ...] = (-1,)
    tokens: tuple[int, ...] = (-1,)
    sources: tuple[int, ...] = (0,)

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


GROWTHS = {
    "chain": static([-1, 0, 1, 2]),
    "star": static([-1, 0, 0, 0]),
    "binary": static([-1, 0, 0, 1, 1, 2]),
    "three levels": static([-1, 0, 0, 1, 3]),
    "a deep younger child": static([-1, 0, 0, 2, 2]),
}


def by_the_first_token(tree: Drawn) -> int | None:
    """A way to grow that looks at what was drawn: a token 0 gets two children, others get a sibling; five draws."""
    if len(tree.parents) == 5:
        return None
    last = len(tree.parents) - 1
    parent = last if tree.tokens[last] == 0 else max(tree.parents[last], 0)
    return parent if len(tree.children(parent)) < 2 else last


def draw_law(draft: Law, elder: Collection[int]) -> Law:
    """The law of the next child without replacement: uniform on the tokens left where none has draft probability."""
    left = [NONE if v in elder else q for v, q in enumerate(draft)]
    return whole(left if any(left) else [Fraction(v not in elder) for v in range(len(draft))])


def drawn(
    language: Language,
    growth: Growth,
    context: Context = (),
    replacement=False,
    fill=False,
    sources: Sequence[int] = (),
) -> Iterator[tuple[Drawn, Fraction]]:
    """Every tree that is drawn below a context, with its probability.

    fill:    whether children are drawn uniformly from the tokens left, once no others have any draft probability
    sources: the draft of each node, the first one if not given
    """

    def further(tree: Drawn, probability: Fraction) -> Iterator[tuple[Drawn, Fraction]]:
        parent = growth(tree)
        if parent is None:
            yield tree, probability
            return
        source = sources[len(tree.parents)] if sources else 0
        law: Law = ()
        if tree.present(parent):
            draft = language.draft((*context, *tree.context(parent)), source)
            elder = [] if replacement else [tree.tokens[child] for child in tree.children(parent)]
            law = draw_law(draft, elder) if fill or any(q for v, q in enumerate(draft) if v not in elder) else ()
        for token, q in enumerate(law) if any(law) else [(-1, ONE)]:
            if q:
                child = Drawn((*tree.parents, parent), (*tree.tokens, token), (*tree.sources, source))
                yield from further(child, probability * q)

    yield from further(Drawn(), ONE)


class End(NamedTuple):
    """Where a walk may end: the path without the root, the law of the token after it, and the coins that lead there.

    coins: of a node, at least the first number and below the second
    """

    path: tuple[int, ...]
    law: Law
    coins: dict[int, tuple[Fraction, Fraction]]

    @property
    def chance(self) -> Fraction:
        return prod((high - low for low, high in self.coins.values()), start=ONE)


TextLaw = dict[tuple[int, ...], Fraction]
Verdict = dict[tuple[tuple[int, ...], int], Fraction]  # of paths, root left out, and the tokens after them


class Verifier(NamedTuple):
    """Called, it gives the law of the path and of the token after it."""

    ends: Callable[[Language, Drawn, Context, bool], Iterator[End]]

    def __call__(self, language: Language, tree: Drawn, context: Context = (), replacement: bool = False) -> Verdict:
        verdict: Verdict = defaultdict(Fraction)
        for end in self.ends(language, tree, context, replacement):
            for token, chance in enumerate(end.law):
                if chance * end.chance:
                    verdict[end.path, token] += chance * end.chance
        return verdict


def text_law(
    language: Language, verifier: Verifier, growth: Growth, length: int, *, steps=1, context: Context = (), **ways
) -> TextLaw:
    """The law of the first `length` tokens: of so many steps, and then of the target alone. ways: as in `drawn`."""
    if length <= 0 or steps == 0:
        return target_law(language, context, max(length, 0))
    law, emitted = defaultdict(Fraction), defaultdict(Fraction)
    for tree, probability in drawn(language, growth, context, **ways):
        verdict = verifier(language, tree, context, ways.get("replacement", False))
        assert sum(verdict.values()) == 1, (tree, verdict)
        for (path, token), chance in verdict.items():
            emitted[(*(tree.tokens[node] for node in path), token)] += probability * chance
    for begin, probability in emitted.items():
        behind = (*context, *begin)
        rest = text_law(language, verifier, growth, length - len(begin), steps=steps - 1, context=behind, **ways)
        for end, chance in rest.items():
            law[(*begin, *end)[:length]] += probability * chance
    return {text: chance for text, chance in law.items() if chance}


def keeps_the_law(verifier: Verifier, language: Language, growth: Growth, length: int, **ways) -> bool:
    return text_law(language, verifier, growth, length, **ways) == target_law(language, (), length)


def target_law(language: Language, context: Context, length: int) -> TextLaw:
    """The law of the next `length` tokens, by the target alone."""
    law = {}
    for text in product(range(language.vocab_size), repeat=length):
        law[text] = prod(language.target((*context, *text[:place]))[token] for place, token in enumerate(text))
    return {text: Fraction(chance) for text, chance in law.items() if chance}


Weights = tuple[list[Fraction], Law | None]  # of each child, and the law of the token where none is accepted
# A rule for one node: of the target's law, the laws that the children are from, their tokens in draw order, and whether
# they are independent draws.
NodeRule = Callable[[Law, Sequence[Law], Sequence[int], bool], Weights]


def rejecting(target: Law, drafts: Sequence[Law], tokens: Sequence[int], replacement: bool) -> Weights:
    """Recursive rejection: P <- norm max(P - Q, 0), and Q without the child, after each rejection."""
    p, reach, weights, elder = target, ONE, [], []
    for draft, token in zip(drafts, tokens, strict=True):
        q = draw_law(draft, () if replacement else elder)
        take = min(ONE, p[token] / q[token]) if q[token] else NONE  # a child of no draft probability is skipped
        weights.append(reach * take)
        reach *= 1 - take
        if q[token]:
            p = whole(_less(p, q))
            elder.append(token)
    return weights, p if any(p) else None


def seeking(target: Law, drafts: Sequence[Law], tokens: Sequence[int], replacement: bool) -> Weights:
    """K-SEQ: C(g) = sum min(P, g Q), A(g) = 1 - (1 - C / g)^K; each of K children by P / (g Q), else the token is drawn
    by P - min(P, g Q) A / C. The least g with C(g) >= A(g), or a little more, which is exact as well.
    """
    count = sum(draft[token] > 0 for draft, token in zip(drafts, tokens, strict=True))
    if not count:
        return [NONE for _ in tokens], target
    g, covered, accepted = _multiple(target, drafts[0], count)
    weights, reach = [], ONE
    for draft, token in zip(drafts, tokens, strict=True):
        take = min(ONE, target[token] / (g * draft[token])) if draft[token] else NONE
        weights.append(reach * take)
        reach *= 1 - take
    share = accepted / covered if covered else NONE
    left = whole([p - min(p, g * q) * share for p, q in zip(target, drafts[0], strict=True)])
    return weights, left if any(left) else None


@cache
def _multiple(target: Law, draft: Law, count: int) -> tuple[Fraction, Fraction, Fraction]:
    """g, C(g) and A(g)."""

    def sides(g: Fraction) -> tuple[Fraction, Fraction]:
        covered = sum((min(p, g * q) for p, q in zip(target, draft, strict=True)), NONE)
        return covered, 1 - (1 - covered / g) ** count

    low, high = ONE, Fraction(count)
    if sides(low)[0] >= sides(low)[1]:
        high = low
    for _ in range(22):
        middle = (low + high) / 2
        low, high = (low, middle) if sides(middle)[0] >= sides(middle)[1] else (middle, high)
    return high, *sides(high)


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
    target: Law, drafts: Sequence[Law], tokens: Sequence[int], replacement: bool, weight=ONE, held=False
) -> Chain:
    """With w: M = P, c = n = w; and for each child x, drawn from q (Q without its elder, or Q)

        t = min(1, c M(x) / q(x));  t = 1: n = 0, and no further child
        M <- max(M - q / c, 0);  S = c sum M;  r = (1 - n) + S
        traversal:  c <- c / r,            n <- S / r
        held:       c <- c (1 - t) / r,    n <- (1 - t) S / r

    A child of no draft probability is skipped.
    """
    left, elder, c, n = target, [], weight, weight
    takes, leaves = [], [weight]
    for draft, token in zip(drafts, tokens, strict=True):
        q, take = draw_law(draft, () if replacement else elder), NONE
        if n and q[token]:
            take = min(ONE, c * left[token] / q[token])
            if take < 1 and c:
                left = _less(left, [part / c for part in q])
                rest = c * sum(left)
                c, n = (factor / (1 - n + rest) * ((1 - take) if held else 1) for factor in (c, rest))
            else:
                n *= take < 1
            elder.append(token)
        takes.append(take)
        leaves.append(n)
    return Chain(takes, leaves, whole(left) if any(left) else None)


def _less(p: Sequence[Fraction], q: Sequence[Fraction]) -> Law:
    return tuple(max(one - other, NONE) for one, other in zip(p, q, strict=True))


def holding(target: Law, drafts: Sequence[Law], tokens: Sequence[int], replacement: bool) -> Weights:
    """Held siblings: stop with probability n; else for j = k .. 1 accept x_j with probability t_j / (1 - n after j)."""
    found = chain(target, drafts, tokens, replacement, held=True)
    return _held_weights(found), found.recovered


def _held_weights(chain: Chain) -> list[Fraction]:
    weights, reach = [NONE] * len(chain.takes), 1 - chain.leaves[-1]
    for j in reversed(range(len(weights))):
        if chain.takes[j]:
            weights[j] = reach * chain.takes[j] / (1 - chain.leaves[j + 1])
            reach -= weights[j]
        assert reach >= 0
    return weights


def top_down(rule: NodeRule, one_coin: bool = False) -> Verifier:
    """Walk down from the root by a rule for one node. Equal siblings of an accepted node have its children, too.

    one_coin: whether the coin of a node's first child decides, by sums of weights; else each child has its own
    """

    def ends(language: Language, tree: Drawn, context: Context, replacement: bool) -> Iterator[End]:
        def walk(equals: list[int], path: tuple[int, ...], coins: dict) -> Iterator[End]:
            target, drafts, children, tokens = _node(language, tree, context, equals, path)
            weights, recovered = rule(target, drafts, tokens, replacement)
            below = NONE
            for child, weight in zip(children, weights, strict=True):
                take = weight / (1 - below) if weight else NONE
                mine = {children[0]: (below, below + weight)} if one_coin else {child: (NONE, take)}
                if weight:
                    yield from walk(_equal(tree, children, child), (*path, child), coins | mine)
                coins = coins if one_coin else coins | {child: (take, ONE)}
                below += weight
            if below < 1:
                assert recovered is not None
                yield End(path, recovered, coins | {children[0]: (below, ONE)} if one_coin and children else coins)

        return walk([0], (), {})

    return Verifier(ends)


def by_law(rule: Callable[[Tensor, Tensor, Tensor], Tensor]) -> NodeRule:
    """A rule as `heavypath.kernels.verifying.top_down` takes it, computed in fp64 and rounded to the fractions meant.

    Two fractions with denominators of at most 10^6 are 10^-12 apart, so those of a small language are told from each
    other. Were they not, `text_law` would find probabilities that do not sum to 1.
    """

    def decide(target: Law, drafts: Sequence[Law], tokens: Sequence[int], replacement: bool) -> Weights:
        if not tokens:
            return [], target
        logs = (torch.tensor([[[*map(float, law)]]], dtype=torch.float64).log() for law in (target, drafts[0]))
        chances = rule(*logs, torch.tensor([[[*tokens, -1]]]))[0, 0].tolist()
        law = [Fraction(chance).limit_denominator(10**6) for chance in chances]
        first = [token not in tokens[:place] for place, token in enumerate(tokens)]  # of equal children
        recovered = whole([chance * (token not in tokens) for token, chance in enumerate(law)])
        return [law[token] * here for token, here in zip(tokens, first, strict=True)], recovered

    return decide


def _node(language: Language, tree: Drawn, context: Context, equals: list[int], path: tuple):
    """Of nodes with one context: the target's law, and law, number and token of each child that is there. Children
    come by their places among their siblings: the first child of each node, then the second of each, and so on."""
    here = (*context, *(tree.tokens[node] for node in path))
    ranked = sorted((rank, child) for node in equals for rank, child in enumerate(tree.children(node)))
    children = [child for _, child in ranked if tree.tokens[child] >= 0]
    drafts = [language.draft(here, tree.sources[child]) for child in children]
    return language.target(here), drafts, children, [tree.tokens[child] for child in children]


def _equal(tree: Drawn, children: list[int], child: int) -> list[int]:
    return [other for other in children if tree.tokens[other] == tree.tokens[child]]


def _traversal(
    language: Language, tree: Drawn, context: Context, replacement: bool, held: bool = False
) -> Iterator[End]:
    """Accept the first node in post-order (children in draw order, then the node) whose own coin is below m.

    traversal:       w(x_j) = t_j;                              m = n
    held traversal:  w(x_j) = W_j / (1 - sum_{i<j} W_i);        m = n / (1 - sum W), with W of `holding`

    The root has w = 1, a leaf m = w. Children of equal later siblings hang below the first.
    """
    coins: dict[int, tuple[Fraction, Fraction]] = {}

    def visit(equals: list[int], path: tuple[int, ...], weight: Fraction) -> Iterator[End]:
        target, drafts, children, tokens = _node(language, tree, context, equals, path)
        found = chain(target, drafts, tokens, replacement, weight, held)
        takes, last = found.takes, found.leaves[-1]
        if held:
            weights = _held_weights(found)
            left = [1 - sum(weights[:j]) for j in range(len(weights) + 1)]
            takes = [part / rest if rest else NONE for part, rest in zip(weights, left, strict=False)]
            last = last / left[-1] if left[-1] else NONE
        for child, take in zip(children, takes, strict=True):
            if take:
                yield from visit(_equal(tree, children, child), (*path, child), take)
        if last:
            assert found.recovered is not None
            yield End(path, found.recovered, coins | ({path[-1]: (NONE, last)} if path else {}))
        if path:
            coins[path[-1]] = last, ONE

    return visit([0], (), ONE)


rejection, k_seq, held = top_down(rejecting), top_down(seeking), top_down(holding, one_coin=True)
traversal, held_traversal = Verifier(_traversal), Verifier(partial(_traversal, held=True))
