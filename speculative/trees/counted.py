"""Acceptance from counts: the rates by which trees are planned, and the tokens per step that a tree yields by them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from heavypath.speculative.trees.planning import expected_tokens, node_probabilities
from heavypath.speculative.trees.ranks import steps_of
from heavypath.speculative.trees.tails import CHILDREN, DEPTH, with_tail
from heavypath.speculative.trees.tree import TokenTree

PRIOR = 50  # weight, in nodes, of the mean over all depths in each depth's acceptance: deep nodes are rare
SEEN = 10  # how often a child must have been accepted for the fit of the power law to include it


@dataclass(frozen=True)
class CountedTexts:
    """Counts of acceptance on measured sequences, from which rates and expected tokens are computed.

    accepted: [depth][child], how often child j of a node at depth d was accepted
    reached: [depth], how many nodes at depth d were counted
    texts: for each sequence the rank of each token: which child of the draft it was; empty if only counts are known
    alike: the first depth from which on all depths are assumed to be alike: 1 for independent sequences, else 0
    """

    accepted: Sequence[Sequence[int]]
    reached: Sequence[int]
    texts: Sequence[Sequence[int]]
    alike: int

    def tokens(self, tree: TokenTree) -> float:
        """The average number of tokens that a step with this tree yields, the bonus token included.

        It is counted along the ranks of the measured sequences. Without ranks, or for independent sequences, it is
        computed from the rates.
        """
        if not self.texts or self.alike:
            return expected_tokens(tree, self.rates())
        steps, tokens = steps_of(tree, self.texts).sum(0)
        return float(tokens / steps)

    def tokens_error(self, tree: TokenTree) -> float:
        """The standard error of `tokens(tree)`: by differences between sequences, or by numbers of counted nodes."""
        if not self.texts or self.alike:
            return _error_by_counts(tree, self.rates(), self.reached)
        steps, tokens = steps_of(tree, self.texts).T.astype(float)
        apart = tokens - tokens.sum() / steps.sum() * steps
        return math.sqrt(float((apart**2).sum()) * len(steps) / max(1, len(steps) - 1)) / steps.sum()

    def rates(self) -> Tensor:
        """The acceptance by which trees are planned, fp64 [depth, child]: counted shares, smoothed and extrapolated.

        It starts as the share of nodes at depth d whose child j was accepted. Each depth is shrunk towards the mean
        over all depths, which has the weight of `PRIOR` nodes. That mean is shrunk, with the same weight, towards the
        power law of `tails`, which is fitted to the children that were accepted at least `SEEN` times and continues up
        to tails.CHILDREN children. Acceptance is then made non-increasing in the child. For independent sequences the
        first row stays as counted, and the others are shrunk to their own mean. Depths that were not counted get the
        mean over all depths.
        """
        accepted = np.array(self.accepted, np.float64)
        reached = np.array(self.reached, np.float64)[:, None]
        alike = slice(self.alike, None)
        hits = accepted[alike].sum(0)
        nodes = max(1.0, reached[alike].sum())
        overall = hits / nodes if self.alike else _of_all_depths(hits, nodes)
        accepted = np.pad(accepted, ((0, 0), (0, len(overall) - len(hits))))
        rates = np.tile(overall, (max(DEPTH, len(accepted)), 1))
        rates[: len(accepted)] = (accepted + PRIOR * overall) / (reached + PRIOR)
        rates[: self.alike] = accepted[: self.alike] / np.maximum(1, reached[: self.alike])
        if not self.alike:
            rates = np.stack([falling(row) for row in rates])
        return torch.from_numpy(rates)


def _of_all_depths(hits: np.ndarray, nodes: float) -> np.ndarray:
    """Acceptance over all depths, fp64 [child], shrunk towards the fitted power law.

    hits: [child], how often each child was accepted
    nodes: number of nodes whose children were offered
    """
    seen = int(np.argmax(np.append(hits, 0) < SEEN))
    fit = with_tail(hits[:seen] / nodes, max(CHILDREN, len(hits))) if seen else np.zeros(max(CHILDREN, len(hits)))
    return falling((np.pad(hits, (0, len(fit) - len(hits))) + PRIOR * fit) / (nodes + PRIOR))


def _error_by_counts(tree: TokenTree, rates: Tensor, reached: Sequence[int]) -> float:
    """The standard error of a tree's expected tokens for rates [depth, child], from the number of nodes at each depth.

    With n nodes counted at a depth, let a[j] be the acceptance of their children, and g[j] the derivative of the
    expected tokens with respect to a[j]. That depth adds (sum_j a[j] g[j]^2 - (sum_j a[j] g[j])^2) / n to the variance.
    For depths that were not counted, n is the total of all depths.
    """
    below = node_probabilities(tree, rates).cumsum(0)
    last = tree.subtree_end.long() - 1
    gains = torch.zeros_like(rates)  # a[j] g[j]: the expected tokens of the subtrees of all children j at a depth
    for node in range(1, len(tree)):
        depth = int(tree.depths[node]) - 1
        rank = int(tree.ranks[node])
        if depth < len(rates) and rank < rates.shape[1]:
            gains[depth, rank] += below[last[node]] - below[node - 1]
    squares = torch.where(rates > 0, gains**2 / rates.clamp(min=1e-12), 0.0).sum(1)
    counted = torch.full((len(rates),), float(sum(reached)), dtype=torch.float64, device="cpu")
    counted[: len(reached)] = torch.tensor(reached, dtype=torch.float64, device="cpu")
    return math.sqrt(float(((squares - gains.sum(1) ** 2).clamp(min=0) / counted.clamp(min=1)).sum()))


def falling(acceptance: np.ndarray) -> np.ndarray:
    """The non-increasing sequence nearest to acceptance [child], by least squares (isotonic regression).

    In measurements a later child can be accepted more often than an earlier one, but only by chance.
    """
    blocks: list[tuple[float, int]] = []  # mean, entries
    for rate in acceptance.tolist():
        mean = rate
        count = 1
        while blocks and blocks[-1][0] < mean:
            before, entries = blocks.pop()
            mean = (before * entries + mean * count) / (entries + count)
            count = entries + count
        blocks.append((mean, count))
    return np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])
