"""Drafted trees, the rules of verification, and the input and result of one; with checks of shapes and values."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.kernels.noise import Noise

DRAWS = ("without_replacement", "with_replacement", "top_k")  # how children are drawn


class VerificationRule(NamedTuple):
    """What a verification needs.

    draws:          how children may be drawn, so that the output has the target's distribution; none if it is greedy
    number:         of the rule in native/verification.cpp
    draft_aware:    whether it weighs children by the distribution they were drawn from: it needs the draft's logits
    whole_tree:     whether it looks at the whole tree, not at one node at a time
    point_masses:   whether it takes children drawn at draft temperature 0, each a point mass
    siblings_first: whether all children of a node must be drawn before any node below them
    """

    draws: tuple[str, ...]
    number: int
    draft_aware: bool = False
    whole_tree: bool = False
    point_masses: bool = True
    siblings_first: bool = False


_EITHER = DRAWS[:2]
# All rules, by the `method` of `verification.verify_tree`, which describes them.
VERIFICATION_RULES = {
    "without_replacement": VerificationRule(("without_replacement",), 3, draft_aware=True),
    "with_replacement": VerificationRule(("with_replacement",), 3, draft_aware=True),
    "kseq": VerificationRule(("with_replacement",), 5, draft_aware=True, point_masses=False),
    "held": VerificationRule(_EITHER, 4, draft_aware=True),
    "traversal": VerificationRule(_EITHER, 6, draft_aware=True, whole_tree=True),
    "held_traversal": VerificationRule(_EITHER, 7, draft_aware=True, whole_tree=True, siblings_first=True),
    "race": VerificationRule(DRAWS, 2),
    "target_sample": VerificationRule(DRAWS, 1),
    "greedy": VerificationRule((), 0),
}
DRAFT_AWARE = tuple(name for name, rule in VERIFICATION_RULES.items() if rule.draft_aware)
WHOLE_TREE = tuple(name for name, rule in VERIFICATION_RULES.items() if rule.whole_tree)
EITHER_DRAW = tuple(name for name, rule in VERIFICATION_RULES.items() if rule.draws == _EITHER)


class Nodes(NamedTuple):
    """The N nodes of each sequence's drafted tree; node 0 is the root, the last committed token.

    tokens:  LongTensor[B, N]; -1 marks an absent node
    parents: LongTensor[N], if all trees have one shape, or [B, N]; -1 for the root
    ranks:   a node's index among its siblings in draw order, shaped as parents; None means index order
    """

    tokens: Tensor
    parents: Tensor
    ranks: Tensor | None

    def per_sequence(self) -> "Nodes":
        """Return the same nodes with parents and ranks expanded to [B, N]."""
        ranks = None if self.ranks is None else self.ranks.expand_as(self.tokens)
        return Nodes(self.tokens, self.parents.expand_as(self.tokens), ranks)


class VerifyInputs(NamedTuple):
    """The inputs of a verification.

    target_logits:  [B, N, V], the target's logits after each node
    draft_logits:   [B, N, V], the logits from which each node's children were drawn; None for trees of only a root.
                    Methods that do not need them ignore them
    method:         of `verify_tree`
    replacement:    whether siblings are independent draws; some methods imply it
    max_depth:      edges of the deepest path considered
    target_filters, draft_filters: temperature and filters of both
    noise:          with rows [B, N]
    """

    nodes: Nodes
    target_logits: Tensor
    draft_logits: Tensor | None
    method: str
    replacement: bool
    max_depth: int
    target_filters: Filters
    draft_filters: Filters
    noise: Noise

    @property
    def independent(self) -> bool:
        """Whether siblings count as independent draws, so that siblings of equal token share their children."""
        return self.replacement or VERIFICATION_RULES[self.method].draws == ("with_replacement",)


class Verified(NamedTuple):
    """The accepted nodes of one verification.

    path:       LongTensor[B, max_depth + 1]; node 0, then the accepted nodes from parent to child, then -1
    length:     LongTensor[B], number of accepted drafted nodes
    next_token: LongTensor[B], the recovered or bonus token that follows them; -1 if the rows that decide have no
                distribution (NaN, +inf, or only -inf); on a CPU this raises instead
    """

    path: Tensor
    length: Tensor
    next_token: Tensor


class PlainTree(NamedTuple):
    """One sequence's nodes on the host: tokens and parents; and `order`, the nodes sorted by rank, then by index."""

    tokens: list[int]
    parents: list[int]
    order: list[int]

    def below(self, nodes: list[int]) -> list[int]:
        """Return the children of some nodes, in draw order, without absent ones."""
        return [child for child in self.order if self.parents[child] in nodes and self.tokens[child] >= 0]

    def alike(self, siblings: list[int], token: int) -> list[int]:
        """Return the siblings with this token."""
        return [node for node in siblings if self.tokens[node] == token]

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root down to this one."""
        path = [node]
        while path[0] > 0:
            path.insert(0, self.parents[path[0]])
        return path


def sibling_order(parents: Tensor) -> Tensor:
    """Return each node's rank if siblings are in index order: LongTensor[B, N] from parents LongTensor[B, N]."""
    families, order = parents.sort(dim=-1, stable=True)
    place = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    begins = families.diff(dim=-1, prepend=families[:, :1] - 1) != 0
    return torch.empty_like(parents).scatter_(1, order, place - place.where(begins, 0).cummax(-1).values)


def plain_trees(nodes: Nodes) -> list[PlainTree]:
    """Copy the trees of nodes [B, N] to the host."""
    ranks = sibling_order(nodes.parents) if nodes.ranks is None else nodes.ranks
    fields = (nodes.tokens, nodes.parents, ranks.argsort(dim=1, stable=True))
    return [*map(PlainTree, *(field.tolist() for field in fields))]


def as_verified(paths: list[list[int]], next_tokens: np.ndarray, inputs: VerifyInputs) -> Verified:
    """Make a `Verified` of each sequence's path from the root, and the token after it."""
    path = [[*nodes, *[-1] * (inputs.max_depth + 1 - len(nodes))] for nodes in paths]
    path, length = (torch.tensor(each, device=inputs.nodes.tokens.device) for each in (path, [*map(len, paths)]))
    return Verified(path, length - 1, torch.from_numpy(next_tokens).to(path.device))


def per_sequence(name: str, value: Tensor, batch: int, nodes: int) -> Tensor:
    """Expand a LongTensor[N] or [B, N] to [B, N]; ValueError for any other."""
    if value.dtype != torch.long or value.shape not in ((nodes,), (batch, nodes)):
        raise ValueError(
            f"{name} must be a LongTensor [{nodes}] or [{batch}, {nodes}], got {value.dtype} {[*value.shape]}"
        )
    return value.expand(batch, nodes)


def check_trees(tokens: Tensor, parents: Tensor, target_logits: Tensor, rows: Tensor | None) -> Tensor:
    """Check trees and return the parents [B, N]; ValueError for shapes, dtypes or devices that do not fit."""
    if tokens.dim() != 2 or tokens.dtype != torch.long or tokens.shape[1] == 0:
        raise ValueError(f"tokens must be a LongTensor [B, N] with N >= 1, got {tokens.dtype} {[*tokens.shape]}")
    batch, nodes = tokens.shape
    parents = per_sequence("parents", parents, batch, nodes)
    check_logits("target_logits", target_logits, batch, nodes)
    if rows is not None and (rows.shape != tokens.shape or rows.dtype != torch.long):
        raise ValueError(f"rows must be a LongTensor {[batch, nodes]}, got {rows.dtype} {[*rows.shape]}")
    check_devices(tokens, parents=parents, target_logits=target_logits, rows=rows)
    return parents


def check_devices(tokens: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError if a tensor is on another device than `tokens`."""
    for name, value in others.items():
        if value is not None and value.device != tokens.device:
            raise ValueError(f"{name} must be on the device of tokens, {tokens.device}, got {value.device}")


def check_logits(name: str, logits: Tensor, batch: int, nodes: int) -> None:
    """Raise ValueError unless logits are floating point [B, N, V] with V >= 1."""
    if (
        not logits.is_floating_point()
        or logits.dim() != 3
        or logits.shape[:2] != (batch, nodes)
        or logits.shape[2] == 0
    ):
        raise ValueError(f"{name} must be floating point [{batch}, {nodes}, V], got {logits.dtype} {[*logits.shape]}")


def check_draft_logits(draft_logits: Tensor, target_logits: Tensor) -> None:
    """Raise ValueError unless draft_logits have the shape of the target's logits [B, N, V]."""
    batch, nodes, _ = target_logits.shape
    check_logits("draft_logits", draft_logits, batch, nodes)
    if draft_logits.shape != target_logits.shape:
        raise ValueError(
            f"draft_logits must have target_logits' shape {[*target_logits.shape]}, got {[*draft_logits.shape]}"
        )


def check_values(tokens: Tensor, parents: Tensor, ranks: Tensor | None, rows: Tensor | None, vocab_size: int) -> None:
    """Raise ValueError unless nodes [B, N], on a CPU, are trees."""
    token = tokens.numpy()
    parent = parents.numpy()
    if token.min(initial=0) < -1 or token.max(initial=0) >= vocab_size:
        raise ValueError(f"tokens must be in [-1, {vocab_size}), got {token.min()} .. {token.max()}")
    index = np.arange(parent.shape[1])
    if (parent[:, 0] != -1).any() or ((parent[:, 1:] < 0) | (parent[:, 1:] >= index[1:])).any():
        raise ValueError(f"parents must hold -1 at node 0 and 0 <= parents[i] < i elsewhere, got {parents.tolist()}")
    if ranks is not None:
        rank = ranks.numpy()[:, 1:]
        siblings = np.sort(parent[:, 1:] * len(index) + rank)
        if ((rank < 0) | (rank >= len(index))).any() or (siblings[:, 1:] == siblings[:, :-1]).any():
            raise ValueError(f"ranks must differ among siblings and be in [0, {len(index)}), got {ranks.tolist()}")
    if rows is not None and (rows.numpy() < 0).any():
        raise ValueError(f"rows must be at least 0, got {int(rows.min())}")


def no_maximum(side: str, sequence: int, node: int, largest: float | np.floating) -> ValueError:
    """Return the error for a row without a finite maximum."""
    return ValueError(
        f"{side}_logits must have a finite maximum in every row that is used, "
        f"but [{sequence}, {node}] has {float(largest)}"
    )


def depth_of(parents: Tensor, max_depth: int | None) -> int:
    """Return max_depth (ValueError if it is negative), or for None the deepest tree's depth. parents: [B, N]."""
    if max_depth is not None:
        if max_depth < 0:
            raise ValueError(f"max_depth must be at least 0, got {max_depth}")
        return max_depth
    depth = 0
    node = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    while (node := parents.gather(1, node.clamp(min=0)).where(node >= 0, -1)).ge(0).any():
        depth += 1
    return depth


def nothing_verified(tokens: Tensor, depth: int) -> Verified:
    """Return the result for an empty batch."""
    return Verified(tokens.new_zeros(0, depth + 1), tokens.new_zeros(0), tokens.new_zeros(0))
