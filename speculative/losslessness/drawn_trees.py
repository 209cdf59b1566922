"""Distributions after every short sequence, and trees of tokens that are drawn from them.

There is one row of P and one of Q for each context, that is for each sequence of at most `depth` tokens. So two
siblings with the same token have the same rows after them, as in a language model.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

Draw = Callable[[Tensor, int, int, int], Tensor]


class Tables(NamedTuple):
    """P and Q after each sequence of t tokens, for t = 0, 1, ..., depth: float64 [V ** t, V] on the CPU."""

    target: list[Tensor]
    draft: list[Tensor]

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens."""
        return self.target[0].shape[1]

    def law(self) -> Tensor:
        """The target's joint distribution of depth + 1 tokens, [V, ..., V]: the product of P after each of them."""
        law = torch.ones(1, dtype=torch.float64, device="cpu")
        for level in self.target:
            law = (law[:, None] * level).flatten()
        return law.view([self.vocab_size] * len(self.target))


class DrawnTrees(NamedTuple):
    """B drafted trees of N nodes, all of one shape.

    tokens:   LongTensor[B, N]; node 0 is the root, whose token is 0; -1 marks an absent node
    contexts: LongTensor[B, N], the row of `Tables` at the node's depth that has P and Q after the node
    """

    tokens: Tensor
    contexts: Tensor


def generator_of(*numbers: int) -> torch.Generator:
    """A new generator of random numbers on the CPU, seeded by all these numbers >= 0 together, not by one of them."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]
    return torch.Generator("cpu").manual_seed(int(state) & 0x7FFF_FFFF_FFFF_FFFF)


def _with_replacement(draft: Tensor, count: int, node: int, seed: int) -> Tensor:
    return draft.multinomial(count, replacement=True, generator=generator_of(seed, node))


def _without_replacement(draft: Tensor, count: int, node: int, seed: int) -> Tensor:
    """The tokens that come first if each comes after an exponential time of rate Q: successive draws from the rest.

    -1 once Q has no token left.
    """
    times = torch.empty_like(draft).exponential_(generator=generator_of(seed, node))
    first = (draft / times).topk(count, -1)
    return first.indices.where(first.values > 0, -1)


def _top_k(draft: Tensor, count: int, node: int, seed: int) -> Tensor:
    return draft.topk(count, -1).indices


DRAWS: Mapping[str, Draw] = MappingProxyType(
    {
        "without_replacement": _without_replacement,
        "with_replacement": _with_replacement,
        "top_k": _top_k,
    }
)


def depths_of(parents: Sequence[int]) -> list[int]:
    """The depth of each node, 0 for the root. parents: of each node, which comes before it; parents[0] is ignored."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def children_of(parents: Sequence[int]) -> dict[int, list[int]]:
    """For each node that has children, their indices in rising order. parents: of each node; parents[0] is ignored."""
    children: dict[int, list[int]] = {}
    for child, parent in enumerate(parents[1:], start=1):
        children.setdefault(parent, []).append(child)
    return children


def draw_trees(tables: Tables, parents: Sequence[int], draw: Draw, trees: int, seed: int) -> DrawnTrees:
    """Draw trees of one shape: the children of each node are drawn from Q after the node.

    draw: called with Q [trees, V], number of children, node and seed; returns their tokens LongTensor[trees, number]

    Raises TypeError and ValueError for a draw that does not return tokens.
    """
    depths = depths_of(parents)
    tokens = torch.zeros(trees, len(parents), dtype=torch.long, device="cpu")
    contexts = torch.zeros_like(tokens)
    for node, children in sorted(children_of(parents).items()):
        draft = tables.draft[depths[node]][contexts[:, node]]
        drawn = _checked_draw(draw(draft, len(children), node, seed), trees, len(children), tables.vocab_size)
        absent = tokens[:, node, None] < 0
        tokens[:, children] = drawn.masked_fill(absent, -1)
        contexts[:, children] = contexts[:, node, None] * tables.vocab_size + drawn.clamp(min=0)
    return DrawnTrees(tokens, contexts)


def rows_at(levels: list[Tensor], contexts: Tensor, depths: Sequence[int]) -> Tensor:
    """The distributions after all nodes of B trees, fp32 [B, N, V].

    levels: the target's or the draft's tables by depth; contexts: LongTensor[B, N], each node's row; depths: [N]
    """
    rows = [levels[depth][contexts[:, node]] for node, depth in enumerate(depths)]
    return torch.stack(rows, 1).float()


def _checked_draw(drawn: Tensor, trees: int, count: int, vocab_size: int) -> Tensor:
    if not isinstance(drawn, Tensor) or drawn.dtype != torch.long:
        raise TypeError(f"draw must return a LongTensor [{trees}, {count}], got {type(drawn).__name__}")
    if [*drawn.shape] != [trees, count]:
        raise ValueError(f"draw must return a LongTensor [{trees}, {count}], got {[*drawn.shape]}")
    if not -1 <= int(drawn.min()) <= int(drawn.max()) < vocab_size:
        raise ValueError(
            f"draw must return tokens in 0 .. {vocab_size - 1}, or -1 for an absent node, "
            f"got {int(drawn.min())} .. {int(drawn.max())}"
        )
    return drawn.cpu()
