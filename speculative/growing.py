"""Grow a tree where the draft is confident: DySpec, EAGLE-2's expand-and-rerank, and RSD-S's stochastic beam.

A slot is a place for the next draw below a node. With Q the draft's distribution after a node and x_1, x_2, ... its
children in draw order, let

    value(root) = 1,    value(child x_k) = value(parent) Q(x_k),    R_k = 1 - Q(x_1) - ... - Q(x_{k-1}),
    value(slot k below a node) = value(node) R_k

(DySpec, Xiong et al. 2024, algorithm 1: its product of 1 - conditional Q over the earlier siblings telescopes to R_k.)
A slot's value is known before its token, and never exceeds that of the slot that its parent was drawn in, nor that of
an earlier sibling's. So the N slots of largest value are a tree, which the paper's heap finds with a draft call for
each (`heap_tree`). Here a level is drafted in one call:

    depth times:  the `width` best slots below the nodes just drafted get their tokens, and one draft forward
    at the end:   the best size - 1 of all of them stay

That is the heap's tree whenever no level of it is wider than `width` and it is no deeper than `depth`. Ties go to the
shallower slot, then to the lower rank, then to the parent drafted earlier.

What is lossless: a slot may be left out for its value, which does not depend on its own token; never for its token. By
"node" the value is that of the node itself, which is for deterministic drafts alone (EAGLE-2, Li et al. 2024,
sec. 4). By "beam" a level is the next of a stochastic beam search (RSD-S, Jeon et al. 2024, algorithm 3): the keys that
it keeps are independent of the tokens that have them.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from heavypath.kernels.filtering import Filters
from heavypath.kernels.ordering import Ordering, heavy_path_order
from heavypath.kernels.sampling import Beam, TopK, gumbel_topk, stochastic_beam
from heavypath.speculative.drafting import Drafted, check_distributions, root_feed
from heavypath.speculative.drafts import Cache, Draft, Feed
from heavypath.speculative.sequences import Sequences

VALUE_TEMPERATURE = 0.6  # of the draft's probabilities as values, where its tokens are drawn at temperature 0 (DySpec)


@dataclass(frozen=True)
class Growth:
    """How trees grow.

    by:        what nodes are kept for: their "slot"'s value, the "node"'s own, or their key in a stochastic "beam"
    size:      nodes of a tree, root included, at most
    width:     nodes drafted on a level, at most
    depth:     levels
    threshold: slots of less value stay empty; with one node a level, a chain that ends early
    """

    by: Literal["slot", "node", "beam"]
    size: int
    width: int
    depth: int
    threshold: float = 0.0

    def __post_init__(self) -> None:
        for name in ("width", "depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be in [0, 1], got {self.threshold}")
        if self.size < 2:
            raise ValueError(f"size counts the root and must be at least 2, got {self.size}")

    def __len__(self) -> int:
        return self.size

    @property
    def branching(self) -> int:
        """The most children that a node may have."""
        return self.width

    @property
    def slots(self) -> int:
        """Rows of the draft's cache that a tree takes while it grows."""
        return 1 + self.depth * self.width


class _Level(NamedTuple):
    """The nodes drafted on a level, best first; [B, W].

    parent: LongTensor into the nodes of the level above; rank, tokens: LongTensors, tokens -1 where there is none
    slot:   fp64, what the place is worth, 0 where it stays empty
    node:   fp64, what the node is worth; by "beam" its path's log-probability, and key its key
    """

    parent: Tensor
    rank: Tensor
    tokens: Tensor
    slot: Tensor
    node: Tensor
    key: Tensor


def grow_tree(
    draft: Draft,
    cache: Cache,
    growth: Growth,
    sequences: Sequences,
    first_row: Tensor,
    filters: Filters,
    value_temperature: float,
    seed: int,
) -> Drafted:
    """A tree for each sequence, of growth.size nodes on a GPU; on a CPU of as many as one of them has.

    first_row: LongTensor[B], the roots' noise; that of slot s is first_row + s.
    value_temperature: of the draft's probabilities as values where filters.temperature is 0.
    """
    root, lengths = sequences.root, sequences.lengths
    batch, device = len(root), root.device
    longest = int(lengths.max())
    on_cpu = device.type == "cpu"

    # The level above: its slots are first .. first + n - 1, and what they see of the slots up to their own.
    first, tokens = 0, root[:, None]
    key = torch.zeros(batch, 1, dtype=torch.float64, device=device)
    node = key if growth.by == "beam" else torch.ones_like(key)
    sees = torch.ones(batch, 1, 1, dtype=torch.bool, device=device)
    above = torch.zeros_like(tokens)  # slots of the parents
    levels: list[_Level] = []
    logits: list[Tensor] = []
    for depth in range(1, growth.depth + 1):
        slots = torch.arange(first, first + tokens.shape[1], device=device)
        if depth == 1:
            feed = root_feed(sequences, nodes=2)
        else:
            feed = Feed(
                tokens=tokens.clamp(min=0),
                positions=(lengths + depth - 1)[:, None].expand_as(tokens),
                rows=lengths[:, None] + slots,
                parent_rows=lengths[:, None] + above,
                lengths=lengths,
                visible_rows=longest + first + len(slots),
                ancestor_mask=sees,
            )
        after = draft(feed, cache)[:, -len(slots) :]  # [B, n, V]
        rows = first_row[:, None] + slots
        if growth.by == "beam":
            beam = stochastic_beam(after, node, key, growth.width, **filters._asdict(), seed=seed, rows=rows)
            check_distributions(after.amax(-1), lengths + depth - 1)
            level = _beam_level(beam)
        else:
            drawing = filters if growth.by == "slot" else filters._replace(temperature=0.0)
            drawn = gumbel_topk(after, min(growth.width, after.shape[-1]), **drawing._asdict(), seed=seed, rows=rows)
            check_distributions(drawn.keys[..., 0], lengths + depth - 1)
            if drawing.temperature == 0:
                drawn = drawn._replace(
                    logprobs=_logprobs(after, drawn.tokens, filters.temperature or value_temperature)
                )
            level = _best_level(drawn, node, growth)
        there = (level.slot > 0) & (level.slot >= growth.threshold) & (depth <= sequences.room)[:, None]
        level = level._replace(tokens=level.tokens.where(there, -1), slot=level.slot.where(there, 0))

        above = first + level.parent
        first += len(slots)
        tokens, node, key = level.tokens, level.node, level.key
        own = torch.eye(tokens.shape[1], dtype=torch.bool, device=device).expand(batch, -1, -1)
        inherited = sees.gather(1, level.parent[..., None].expand(-1, -1, sees.shape[2]))
        sees = torch.cat([inherited, own], 2)
        levels.append(level._replace(parent=above))
        logits.append(after)
        if on_cpu and not (tokens >= 0).any():
            break
    return _assembled(levels, torch.cat(logits, 1), growth, root, first_row, on_cpu)


def _logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of tokens [B, n, K] by logits [B, n, V] at a temperature; -inf for a token of -1."""
    scores = logits / temperature
    logprobs = scores.gather(-1, tokens.clamp(min=0)) - scores.logsumexp(-1, keepdim=True)
    return logprobs.masked_fill(tokens < 0, -torch.inf)


def _best_level(drawn: TopK, node: Tensor, growth: Growth) -> _Level:
    """The `width` best of the slots, or of the nodes, below the nodes worth `node` [B, n]; drawn: [B, n, K]."""
    parents = node.shape[1]
    probs = drawn.logprobs.double().exp()
    remaining = (1 - pad(probs[..., :-1], (1, 0)).cumsum(-1)).clamp(min=0)  # R_k
    slot = (node[..., None] * remaining).masked_fill(drawn.tokens < 0, 0)
    worth = torch.minimum(node[..., None] * probs, slot)  # more by rounding, if at all
    if growth.by == "node":
        slot = worth
    # By falling value, then rank, then parent.
    slot, worth, tokens = (field.transpose(1, 2).flatten(1) for field in (slot, worth, drawn.tokens))  # [B, K * n]
    order = slot.sort(dim=-1, descending=True, stable=True).indices[:, : growth.width]
    slot, worth, tokens = (field.gather(1, order) for field in (slot, worth, tokens))
    return _Level(order % parents, order // parents, tokens, slot, worth, worth)


def _beam_level(beam: Beam) -> _Level:
    """Children of one parent come in the order drawn, so a rank counts the parent's children before."""
    parent = beam.parent.clamp(min=0)
    rank = (parent[:, :, None] == parent[:, None, :]).tril(-1).sum(-1)
    return _Level(parent, rank, beam.tokens, (beam.tokens >= 0).double(), beam.logprobs, beam.keys)


def _assembled(
    levels: list[_Level], logits: Tensor, growth: Growth, root: Tensor, first_row: Tensor, trim: bool
) -> Drafted:
    """The best slots of all levels as trees in heavy-path order; logits: [B, slots but the last level's, V]."""
    batch, device = len(root), root.device
    sizes = torch.tensor([1, *(level.tokens.shape[1] for level in levels)], device=device)
    depth_of = torch.arange(len(sizes), device=device).repeat_interleave(sizes)
    blank = torch.full((batch, 1), -1, device=device)
    parent, rank, token, value = (
        torch.cat([first, *(getattr(level, name) for level in levels)], 1)
        for name, first in (
            ("parent", blank),
            ("rank", blank + 1),
            ("tokens", root[:, None]),
            ("slot", torch.full((batch, 1), torch.inf, dtype=torch.float64, device=device)),
        )
    )
    # Stable, so that ties go to the shallower slot and the root comes first; absent slots, worth 0, last.
    kept = value.sort(dim=-1, descending=True, stable=True).indices[:, : growth.size].sort(-1).values
    number = torch.zeros_like(parent).scatter_(1, kept, torch.arange(kept.shape[1], device=device).expand_as(kept))
    parent, rank, token = (field.gather(1, kept) for field in (parent, rank, token))
    parent = number.gather(1, parent.clamp(min=0)).where((parent >= 0) & (token >= 0), -1)
    order = heavy_path_order(parent, rank.where(parent >= 0, 0))
    slots, token = kept.gather(1, order.permutation), token.gather(1, order.permutation)
    if trim:
        nodes = int((token >= 0).sum(1).max())
        order = Ordering(*(field[:, :nodes] for field in order))
        slots, token = slots[:, :nodes], token[:, :nodes]
    # An absent node, behind all others, goes below the one before it.
    index = torch.arange(token.shape[1], device=device)
    absent = (order.parents < 0) & (index > 0)
    return Drafted(
        tokens=token,
        parents=(index - 1).where(absent, order.parents),
        ranks=order.ranks,
        depths=depth_of[slots].where(~absent, 0),
        subtree_end=order.subtree_end,
        rows=first_row[:, None] + slots,
        draft_rows=slots,
        logits=logits[torch.arange(batch, device=device)[:, None], slots.clamp(max=logits.shape[1] - 1)],
    )


def heap_tree(
    children: Callable[[tuple[int, ...]], Sequence[float]], size: int, max_depth: int
) -> list[tuple[int, ...]]:
    """DySpec's algorithm 1 as published: the drafted nodes as paths of ranks, in the order they are drawn.

    children(path): the draft's probabilities Q of the children of the node at `path`, in draw order. The reference of
    `grow_tree`, which asks the draft once for each node: O(size log size) beside that.
    """
    nodes: list[tuple[int, ...]] = [()]
    rows: dict[tuple[int, ...], Sequence[float]] = {}
    # (-value, depth, rank, parent's number, parent's value, Q of the earlier siblings)
    queue = [(-1.0, 1, 0, 0, 1.0, 0.0)]
    while queue and len(nodes) < size:
        negative, depth, rank, parent, worth, drawn = heapq.heappop(queue)
        probs = rows.setdefault(nodes[parent], children(nodes[parent]))
        if rank >= len(probs) or negative == 0:
            continue
        nodes.append((*nodes[parent], rank))
        drawn_now = drawn + probs[rank]
        heapq.heappush(queue, (-worth * max(0.0, 1 - drawn_now), depth, rank + 1, parent, worth, drawn_now))
        if depth < max_depth:
            below = min(worth * probs[rank], -negative)
            heapq.heappush(queue, (-below, depth + 1, 0, len(nodes) - 1, below, 0.0))
    return nodes[1:]
