"""Counts of acceptance: the rates by which trees are planned, and the tokens that a tree brings of texts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from heavypath.speculative.trees.planning import expected_tokens, node_probabilities
from heavypath.speculative.trees.ranks import steps_of
from heavypath.speculative.trees.tails import CHILDREN, DEPTH, falling, with_tail
from heavypath.speculative.trees.tree import TokenTree

PRIOR = 50  # nodes' worth of the mean over all depths in each depth's acceptance: deep nodes are seen seldom
SEEN = 10  # times that a child was accepted, for the law beyond it to go through it


@dataclass(frozen=True)
class CountedTexts:
    """The counts of a walk, as lists of a profile.

    accepted:    [depth][child], how often child j of a node at depth d was the accepted one
    reached:     [depth], how many nodes there were
    texts:       the ranks of each text's tokens, see `ranks`; none where only counts are known
    alike:       the first depth whose children are like those of deeper ones: 1 for independent sequences, else 0
    """

    accepted: Sequence[Sequence[int]]
    reached: Sequence[int]
    texts: Sequence[Sequence[int]]
    alike: int

    def tokens(self, tree: TokenTree) -> float:
        """The tokens that a step with a tree yields on average.

        Of the texts as they are; where there are none, and of independent sequences, by the rates.
        """
        if not self.texts or self.alike:
            return expected_tokens(tree, self.rates())
        steps, tokens = steps_of(tree, self.texts).sum(0)
        return float(tokens / steps)

    def tokens_error(self, tree: TokenTree) -> float:
        """The standard error of `tokens`: by how much texts differ, or by the number of nodes that were counted."""
        if not self.texts or self.alike:
            return _error_by_counts(tree, self.rates(), self.reached)
        steps, tokens = steps_of(tree, self.texts).T.astype(float)
        apart = tokens - tokens.sum() / steps.sum() * steps
        return math.sqrt(float((apart**2).sum()) * len(steps) / max(1, len(steps) - 1)) / steps.sum()

    def rates(self) -> Tensor:
        """The acceptance by which trees are planned: fp64 [tails.DEPTH, child].

        At first the share of nodes at depth d whose child j was accepted. A depth's shares are drawn to those of all
        depths, by as much as `PRIOR` nodes would. Those of all depths are drawn as much to the power law of `tails`
        through the children that were accepted `SEEN` times, which goes on up to tails.CHILDREN children. Shares never
        rise with the child, but by chance. Of independent sequences the first row stays as counted, and the others are
        drawn to their own mean. Levels that were not counted are as all depths.
        """
        accepted, reached = np.array(self.accepted, np.float64), np.array(self.reached, np.float64)[:, None]
        alike = slice(self.alike, None)
        hits, nodes = accepted[alike].sum(0), max(1.0, reached[alike].sum())
        overall = hits / nodes if self.alike else _of_all_depths(hits, nodes)
        accepted = np.pad(accepted, ((0, 0), (0, len(overall) - len(hits))))
        rates = np.tile(overall, (max(DEPTH, len(accepted)), 1))
        rates[: len(accepted)] = (accepted + PRIOR * overall) / (reached + PRIOR)
        rates[: self.alike] = accepted[: self.alike] / np.maximum(1, reached[: self.alike])
        if not self.alike:
            rates = np.stack([falling(row) for row in rates])
        return torch.from_numpy(rates)


def _of_all_depths(hits: np.ndarray, nodes: float) -> np.ndarray:
    """The shares of all depths [child], by how often each child of so many nodes was accepted; with the tail's law."""
    seen = int(np.argmax(np.append(hits, 0) < SEEN))
    law = with_tail(hits[:seen] / nodes, max(CHILDREN, len(hits))) if seen else np.zeros(max(CHILDREN, len(hits)))
    return falling((np.pad(hits, (0, len(law) - len(hits))) + PRIOR * law) / (nodes + PRIOR))


def _error_by_counts(tree: TokenTree, rates: Tensor, reached: Sequence[int]) -> float:
    """The standard error of a tree's expected tokens by rates [depth, child], by the number of nodes at each depth.

    With n nodes counted at a depth, let their children be accepted with shares a[j], and let g[j] be the derivative of
    the expected tokens by a[j]. That depth adds (sum_j a[j] g[j]^2 - (sum_j a[j] g[j])^2) / n to the variance. Depths
    that were not counted have n of all depths.
    """
    below = node_probabilities(tree, rates).cumsum(0)
    last = tree.subtree_end.long() - 1
    gains = torch.zeros_like(rates)  # a[j] g[j]: what the subtrees below all children j of a depth yield
    for node in range(1, len(tree)):
        depth, rank = int(tree.depths[node]) - 1, int(tree.ranks[node])
        if depth < len(rates) and rank < rates.shape[1]:
            gains[depth, rank] += below[last[node]] - below[node - 1]
    squares = torch.where(rates > 0, gains**2 / rates.clamp(min=1e-12), 0.0).sum(1)
    counted = torch.full((len(rates),), float(sum(reached)), dtype=torch.float64, device="cpu")
    counted[: len(reached)] = torch.tensor(reached, dtype=torch.float64, device="cpu")
    return math.sqrt(float(((squares - gains.sum(1) ** 2).clamp(min=0) / counted.clamp(min=1)).sum()))
