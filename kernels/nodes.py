"""A drafted tree's nodes, and what a verification accepts of them: what verification and commit hand to each other."""

from typing import NamedTuple

from torch import Tensor


class Nodes(NamedTuple):
    """The N nodes of each sequence's drafted tree; node 0 is the root, the last committed token.

    tokens:  LongTensor[B, N]; -1 marks an absent node
    parents: LongTensor[N], if all trees have one shape, or [B, N]; -1 for the root
    ranks:   a node's place among its siblings in draw order, shaped as parents; None means index order
    """

    tokens: Tensor
    parents: Tensor
    ranks: Tensor | None

    def per_sequence(self) -> "Nodes":
        """The same with parents and ranks [B, N]."""
        ranks = None if self.ranks is None else self.ranks.expand_as(self.tokens)
        return Nodes(self.tokens, self.parents.expand_as(self.tokens), ranks)


class Verified(NamedTuple):
    """What one verification accepted.

    path:       LongTensor[B, max_depth + 1]; node 0, then the accepted nodes from parent to child, then -1
    length:     LongTensor[B], number of accepted drafted nodes
    next_token: LongTensor[B], the recovered or bonus token that follows them; -1 where the rows that decide have no
                distribution (NaN, +inf, or nothing but -inf), which on a CPU raises
    """

    path: Tensor
    length: Tensor
    next_token: Tensor
