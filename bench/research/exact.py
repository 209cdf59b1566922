"""Expected tokens of a step without tossing a coin: how probable it is that each node of a drafted tree is accepted.

A tree is drafted after a context as in decoding. With the draft's and the target's probabilities at its nodes, a rule
says how probable it is that each child of a node is the accepted one. A node's probability is the product along its
path, and the expected tokens of the step are the sum over all nodes, the root included, which stands for the token that
the target adds. What is left to chance are the context and the tree's own tokens.

    without_replacement   Sequoia's algorithm 2, RSD's recursive rejection: accept with min(1, p(x) / q(x)), else
                          p = norm(max(p - q, 0)) and q = Q without x, which is uniform once Q is used up
    with_replacement      SpecInfer's algorithm: the same with q = Q
    k_seq                 SpecTr's: accept with min(1, P(x) / (g Q(x)))
    target_sample         the target's own token is drafted
    race                  ERSD's: the target's race has the draft's clocks. Exact but for the children's arrival times,
                          which are drawn 16 times

Equal siblings of independent draws are followed together, as in decoding: the children of all of them are candidates.
This file shares no code with the kernels.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import beside  # noqa: F401
import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.kernels.nodes import Nodes, Verified
from heavypath.kernels.noise import Noise

Row = np.ndarray  # probabilities [V], fp64
Rule = Callable[[Row, Row, Sequence[int]], list[float]]  # P, Q, tokens of the children in draw order
BISECTIONS = 40


def without_replacement(target: Row, draft: Row, tokens: Sequence[int]) -> list[float]:
    """The probability that each child is the accepted one, [K], for distinct children."""
    left, undrawn = target, draft.copy()
    free, reached, found = np.ones(len(draft)), 1.0, []
    for token in tokens:
        if not undrawn.any():
            undrawn = free.copy()
        drawn_from = undrawn / undrawn.sum()
        chance = min(1.0, left[token] / drawn_from[token]) if drawn_from[token] > 0 else 0.0
        found.append(reached * chance)
        reached *= 1 - chance
        left = residual(left, drawn_from)
        undrawn[token] = free[token] = 0
    return found


def with_replacement(target: Row, draft: Row, tokens: Sequence[int]) -> list[float]:
    """The same for children that are drawn independently, by rounds of rejection."""
    left, reached, found = target, 1.0, []
    for token in tokens:
        chance = min(1.0, left[token] / draft[token]) if draft[token] > 0 else 0.0
        found.append(reached * chance)
        reached *= 1 - chance
        left = residual(left, draft)
    return found


def residual(left: Row, drawn_from: Row) -> Row:
    """norm(max(p - q, 0)); p itself where nothing is left."""
    rest = np.maximum(left - drawn_from, 0)
    total = rest.sum()
    return rest / total if total > 0 else left


def k_seq(target: Row, draft: Row, tokens: Sequence[int]) -> list[float]:
    """The same by SpecTr's rule, with the least g in [1, K] for which K rounds cover enough."""
    low, high, count = 1.0, float(len(tokens)), len(tokens)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        covered = np.minimum(target, middle * draft).sum()
        if 1 - (1 - covered / middle) ** count > covered:
            low = middle
        else:
            high = middle
    reached, found = 1.0, []
    for token in tokens:
        chance = min(1.0, target[token] / (high * draft[token])) if draft[token] > 0 else 0.0
        found.append(reached * chance)
        reached *= 1 - chance
    return found


def target_sample(target: Row, draft: Row, tokens: Sequence[int]) -> list[float]:
    """The same where the target's token is drawn first: its probability, once for each token."""
    return [0.0 if token in tokens[:place] else float(target[token]) for place, token in enumerate(tokens)]


def race(target: Row, draft: Row, tokens: Sequence[int], races: int = 16) -> list[float]:
    """The same where token i arrives at E_i / Q_i in the draft's race, and at E_i / P_i in the target's.

    Given the children's times, the clock of another token has passed Q_i T_K, with T_K the last child's time. So a
    child that is the target's first at s is the first of all tokens with exp(-sum max(0, P_i s - Q_i T_K)).
    """
    undrawn = np.maximum(1 - np.append(0, draft[tokens][:-1].cumsum()), 1e-12)
    times = (np.random.default_rng([*tokens]).exponential(size=(races, len(tokens))) / undrawn).cumsum(1)
    own = np.where(draft[tokens] > 0, draft[tokens] * times, np.inf) / np.maximum(target[tokens], 1e-300)
    others, found = np.delete(np.arange(len(draft)), tokens), np.zeros(len(tokens))
    for child, first, last in zip(own.argmin(1), own.min(1), times[:, -1], strict=True):
        found[child] += np.exp(-np.maximum(target * min(first, 1e300) - draft * last, 0)[others].sum()) / races
    return found.tolist()


RULES: dict[str, Rule] = {
    "chain": without_replacement,
    "sequoia": without_replacement,
    "dyspec": without_replacement,
    "rsd-c": without_replacement,
    "rsd-s": without_replacement,
    "specinfer": with_replacement,
    "spectr": k_seq,
    "top-k": target_sample,
    "naive": target_sample,
    "ersd": race,
}


class Tree:
    """One drafted tree: tokens, -1 for an absent node, and the children of each node in draw order."""

    def __init__(self, tokens: list[int], parents: list[int], ranks: list[int] | None):
        self.tokens, self.parents = tokens, parents
        self.children: list[list[int]] = [[] for _ in tokens]
        order = range(1, len(tokens))
        for node in order if ranks is None else sorted(order, key=lambda node: ranks[node]):
            if tokens[node] >= 0:
                self.children[parents[node]].append(node)

    @property
    def size(self) -> int:
        """Nodes that are present, the root included."""
        return 1 + sum(map(len, self.children))

    @property
    def depth(self) -> int:
        """Levels below the root."""
        level, depth = self.children[0], 0
        while level:
            level, depth = [child for node in level for child in self.children[node]], depth + 1
        return depth

    def expected_tokens(self, rule: Rule, target: Row, draft: Row) -> float:
        """The expected tokens of the step. target, draft: [N, V], the probabilities after each node."""

        def below(alike: list[int]) -> float:
            candidates = [child for node in alike for child in self.children[node]]
            if not candidates:
                return 1.0
            tokens = [self.tokens[child] for child in candidates]
            chances: dict[int, float] = {}
            for token, chance in zip(tokens, rule(target[alike[0]], draft[alike[0]], tokens), strict=True):
                chances[token] = chances.get(token, 0.0) + chance
            return 1.0 + sum(
                chance * below([child for child in candidates if self.tokens[child] == token])
                for token, chance in chances.items()
                if chance > 0
            )

        return below([0])


class Step(NamedTuple):
    """What a step has after one context: its expected tokens, its nodes and levels, and the parent of each node."""

    expected: float
    nodes: int
    depth: int
    parents: list[int]


class ExactSteps:
    """A verifier that keeps the expected tokens of each step, and lets a recorded text follow, a token a step.

    texts: LongTensor[B, steps - 1], without the token `end`, which ends them
    steps: of all sequences in turn
    """

    def __init__(self, rule: Rule, texts: Tensor, end: int):
        self.rule = rule
        self.texts = torch.cat([texts, torch.full((len(texts), 1), end)], dim=1)
        self.steps: list[Step] = []

    def __call__(
        self,
        nodes: Nodes,
        target_logits: Tensor,
        draft_logits: Tensor | None,
        *,
        max_depth: int,
        target_filters: Filters,
        draft_filters: Filters,
        noise: Noise,
    ) -> Verified:
        own = nodes.per_sequence()
        for row, tokens in enumerate(own.tokens.tolist()):
            ranks = None if own.ranks is None else own.ranks[row].tolist()
            tree = Tree(tokens, own.parents[row].tolist(), ranks)
            expected = self.expected(tree, target_logits[row], draft_logits, row, target_filters, draft_filters)
            self.steps.append(Step(expected, tree.size, tree.depth, tree.parents))
        path = torch.full((len(own.tokens), max_depth + 1), -1)
        path[:, 0] = 0
        length = torch.zeros(len(own.tokens), dtype=torch.long)
        return Verified(path, length, self.texts[:, len(self.steps) // len(self.texts) - 1])

    def expected(
        self, tree: Tree, target: Tensor, drafts: Tensor | None, row: int, filters: Filters, draft_filters: Filters
    ) -> float:
        """The expected tokens of one sequence's step; at temperature 0 they are certain."""
        if filters.temperature == 0:
            likeliest = torch.nn.functional.one_hot(target.argmax(-1), target.shape[-1]).double().numpy()
            return tree.expected_tokens(target_sample, likeliest, likeliest)
        probs = filtered_logprobs(target, filters).exp().double().numpy()
        if drafts is None or self.rule is target_sample:
            return tree.expected_tokens(target_sample, probs, probs)
        return tree.expected_tokens(
            self.rule, probs, filtered_logprobs(drafts[row], draft_filters).exp().double().numpy()
        )
