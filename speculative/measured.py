"""What was counted of a pair's acceptance: the rates by which trees are planned, and the tokens that a tree brings."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.speculative.methods import Kind
from heavypath.speculative.trees.growth import Confidence
from heavypath.speculative.trees.planning import expected_tokens, node_probabilities
from heavypath.speculative.trees.ranks import steps_of
from heavypath.speculative.trees.tails import CHILDREN, DEPTH, falling, with_tail
from heavypath.speculative.trees.tree import TokenTree

PRIOR = 50  # nodes' worth of the mean over all depths in each depth's acceptance: deep nodes are seen seldom
SEEN = 10  # times that a child was accepted, for the law beyond it to go through it
_RANK = re.compile(r"-[12]|[0-9]{1,3}")


@dataclass(frozen=True)
class MeasuredAcceptance:
    """The counts of `calibration.walk` for one way to draw and verify, under one sampling.

    draw, verification: as in `methods.Kind`
    sequence_count:     the number of independent sequences; None for trees that may branch everywhere
    filters:            how target and draft were sampled
    accepted, reached, moments: as in `walking.Counts`
    texts:              of each text the ranks of its tokens with spaces between them; none where only counts are known
    """

    draw: str
    verification: str
    sequence_count: int | None
    filters: Filters
    accepted: list[list[int]]
    reached: list[int]
    moments: list[list[float]]
    texts: list[str] = field(default_factory=list)

    @property
    def kind(self) -> Kind:
        """The kind of the methods that this is the acceptance of."""
        return Kind(self.draw, self.verification, independent_sequences=self.sequence_count is not None)

    def check(self) -> None:
        """Raise ValueError for counts that cannot be."""
        self.filters.check()
        if self.sequence_count is not None and self.sequence_count < 1:
            raise ValueError(f"sequence_count must be None or >= 1, got {self.sequence_count}")
        children = {len(row) for row in self.accepted}
        if len(self.reached) != len(self.accepted) or len(children) != 1 or children == {0}:
            raise ValueError("accepted must have a row of as many children for each depth, reached a number for each")
        for row, reached in zip(self.accepted, self.reached, strict=True):
            if min(row) < 0 or sum(row) > reached:
                raise ValueError(f"of {reached} nodes that were reached at a depth at most as many go on, got {row}")
        if not all(len(row) == 5 and 0 <= min(row) <= max(row) <= 1.001 * min(row[0], 2**63) for row in self.moments):
            raise ValueError("moments must have rows of five numbers >= 0, none above the first")
        if not all(_RANK.fullmatch(rank) for text in self.texts for rank in text.split()):
            raise ValueError("texts must be ranks, numbers from -2 to 999, with spaces between them")
        if self.filters.temperature > 0:
            self.confidence()

    @property
    def ranks(self) -> list[list[int]]:
        """The ranks of each text's tokens."""
        return [[int(rank) for rank in text.split()] for text in self.texts]

    def tokens(self, tree: TokenTree) -> float:
        """The tokens that a step with a tree yields on average.

        Of the texts as they are; where there are none, and of independent sequences, by the rates.
        """
        if not self.texts or self.sequence_count is not None:
            return expected_tokens(tree, self.rates())
        steps, tokens = steps_of(tree, self.ranks).sum(0)
        return float(tokens / steps)

    def tokens_error(self, tree: TokenTree) -> float:
        """The standard error of `tokens`: by how much texts differ, or by the number of nodes that were counted."""
        if not self.texts or self.sequence_count is not None:
            return _error_by_counts(tree, self.rates(), self.reached)
        steps, tokens = steps_of(tree, self.ranks).T.astype(float)
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
        alike = slice(0 if self.sequence_count is None else 1, None)
        hits, nodes = accepted[alike].sum(0), max(1.0, reached[alike].sum())
        overall = hits / nodes if self.sequence_count is not None else _of_all_depths(hits, nodes)
        accepted = np.pad(accepted, ((0, 0), (0, len(overall) - len(hits))))
        rates = np.tile(overall, (max(DEPTH, len(accepted)), 1))
        rates[: len(accepted)] = (accepted + PRIOR * overall) / (reached + PRIOR)
        rates[: alike.start] = accepted[: alike.start] / np.maximum(1, reached[: alike.start])
        if self.sequence_count is None:
            rates = np.stack([falling(row) for row in rates])
        return torch.from_numpy(rates)

    def confidence(self) -> Confidence:
        """For each child the line of least squares through its acceptance by the draft's share.

        Children that were tried less than `PRIOR` times have the line of the last one before them.
        """
        base, slope = [], []
        for tried, shares, squares, hits, products in self.moments:
            if tried < PRIOR and base:
                break
            tried = max(tried, 1.0)
            spread = squares / tried - (shares / tried) ** 2
            rise = 0.0 if spread < 1e-6 else (products / tried - hits * shares / tried**2) / spread
            start = min(1.0, max(0.0, (hits - max(0.0, rise) * shares) / tried))
            base.append(start)
            slope.append(min(max(0.0, rise), 1.0 - start))
        return Confidence(tuple(base), tuple(slope))


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
    counted = torch.full((len(rates),), float(sum(reached)), dtype=torch.float64)
    counted[: len(reached)] = torch.tensor(reached, dtype=torch.float64)
    return math.sqrt(float(((squares - gains.sum(1) ** 2).clamp(min=0) / counted.clamp(min=1)).sum()))
