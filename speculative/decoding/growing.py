"""Grow a tree where the draft is confident: DySpec, EAGLE-2's expansion and re-ranking, and RSD-S's stochastic beam.

A slot of a tree is a place for the next draw below a node. `slot_values` says what it is worth, which is known before
its token is drawn. A slot counts with the least of three values: its own, that of the slot of its parent, and that of
the sibling before it. So the N slots of largest value are a tree. DySpec's heap finds it with a draft call for each
node (`heap_tree`); here a level is drafted in one call:

    depth times:  the `width` best slots below the nodes just drafted get their tokens, and one draft forward
    at the end:   the best size - 1 of all of them stay

That is the heap's tree whenever no level of it is wider than `width` and it is no deeper than `depth`. Ties go to the
shallower slot, then to the lower rank, then to the parent drafted earlier.

What is lossless: slots may be left out by value, because a value is known before the slot's token is drawn. To leave
out nodes by their token would change the distribution of the text. By "node" the value is the node's own worth, which
is for deterministic drafts alone (EAGLE-2, Li et al. 2024, sec. 4). By "beam" a level is the next one of a stochastic
beam search (RSD-S, Jeon et al. 2024, algorithms 7 to 9): the keys that it keeps are independent of the tokens that have
them.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from heavypath.kernels.ordering import Ordering, heavy_path_order
from heavypath.kernels.sampling import Beam, gumbel_topk, stochastic_beam
from heavypath.speculative.decoding.drafted import Drafted, Lap, check_distributions, root_feed
from heavypath.speculative.decoding.growth import Growth
from heavypath.speculative.decoding.noise_rows import node_rows
from heavypath.speculative.decoding.rules import Rules
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.decoding.slot_values import sum_of_squares, values
from heavypath.speculative.decoding.snapshots import host_can_read
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.drafts.feed import Feed
from heavypath.speculative.models.caches import RowCache


def heap_tree(
    below: Callable[[tuple[int, ...]], tuple[Sequence[float], Sequence[float]]], size: int, max_depth: int
) -> list[tuple[int, ...]]:
    """DySpec's algorithm 1 as published, with a draft call for each node: what `grow_tree` must find.

    Returns the drafted nodes as paths of ranks, in the order in which they are drawn, without the root.

    below(path): `slot_values.values` of the node at `path`, asked once for each node. O(size log size) beside that.
    """
    nodes: list[tuple[int, ...]] = [()]
    worths = [1.0]
    rows: dict[int, tuple[Sequence[float], Sequence[float]]] = {}
    queue: list[tuple[float, int, int, int]] = []  # (-value, depth, rank, parent's number)

    def offer(parent: int, rank: int, most: float) -> None:
        depth = len(nodes[parent]) + 1
        if parent not in rows and depth <= max_depth:
            rows[parent] = below(nodes[parent])
        if depth <= max_depth and rank < len(rows[parent][0]):
            heapq.heappush(queue, (-min(most, worths[parent] * rows[parent][0][rank]), depth, rank, parent))

    offer(0, 0, 1.0)
    while queue and queue[0][0] < 0 and len(nodes) < size:
        negative, _, rank, parent = heapq.heappop(queue)
        nodes.append((*nodes[parent], rank))
        worths.append(worths[parent] * rows[parent][1][rank])
        offer(parent, rank + 1, -negative)
        offer(len(nodes) - 1, 0, -negative)
    return nodes[1:]


class _Level(NamedTuple):
    """The nodes drafted on a level, best first; each field is [B, W].

    parent: LongTensor, which node of the level above is the parent
    rank:   LongTensor, the node's place among its siblings
    tokens: LongTensor, -1 where there is no node
    slot:   fp64, the value of the node's slot, 0 where the slot stays empty
    node:   fp64, what the node is worth; by "beam" the log-probability of its path
    key:    fp64, by "beam" the node's key
    """

    parent: Tensor
    rank: Tensor
    tokens: Tensor
    slot: Tensor
    node: Tensor
    key: Tensor


def grow_tree(
    draft: Draft,
    cache: RowCache,
    growth: Growth,
    state: Sequences,
    *,
    visible_rows: int,
    root_rows: Tensor,
    rules: Rules,
    lap: Lap,
) -> Drafted:
    """Grow a tree for each sequence: of growth.size nodes on a GPU; on a CPU of as many as the largest one has.

    visible_rows: cache rows that hold the longest prefix
    root_rows:    LongTensor[B], the roots' noise rows; slot s of a tree has its root's row + s
    """
    root, lengths, filters = state.root, state.lengths, rules.draft_filters
    batch, device = len(root), root.device
    can_trim = host_can_read(device)

    # The level above: its n slots are first .. first + n - 1, and `sees` says which slots up to their own they see.
    first, tokens = 0, root[:, None]
    key = torch.zeros(batch, 1, dtype=torch.float64, device=device)
    slot = torch.ones_like(key)
    node = key if growth.by == "beam" else slot
    sees = torch.ones(batch, 1, 1, dtype=torch.bool, device=device)
    above = torch.zeros_like(tokens)  # the slots of their parents
    levels: list[_Level] = []
    logits: list[Tensor] = []
    for depth in range(1, growth.depth + 1):
        slots = torch.arange(first, first + tokens.shape[1], device=device)
        if depth == 1:
            feed = root_feed(state, visible_rows, nodes=2)
        else:
            feed = Feed(
                tokens=tokens.clamp(min=0),
                positions=(lengths + depth - 1)[:, None].expand_as(tokens),
                cache_rows=lengths[:, None] + slots,
                parent_rows=lengths[:, None] + above,
                prefix_lengths=lengths,
                visible_rows=visible_rows + first + len(slots),
                ancestor_mask=sees,
            )
        after = draft(feed, cache)[:, -len(slots) :]  # [B, n, V]
        lap("draft")
        noise_rows = node_rows(root_rows, slots)
        if growth.by == "beam":
            beam = stochastic_beam(
                after, node, key, growth.width, **filters._asdict(), seed=state.seed, rows=noise_rows
            )
            check_distributions("draft", after, state, depth - 1)
            level = _beam_level(beam)
        else:
            drawing = rules.drawing_filters
            most = min(growth.width, after.shape[-1])
            drawn = gumbel_topk(after, most, **drawing._asdict(), seed=state.seed, rows=noise_rows)
            check_distributions("draft", drawn.keys, state, depth - 1)
            sampled, temperature = drawing.temperature > 0, filters.temperature or rules.value_temperature
            logprobs = drawn.logprobs if sampled else _logprobs(after, drawn.tokens, temperature)
            confidence = growth.confidence if sampled else None
            squares = None if confidence is None else sum_of_squares(after, temperature)
            slot_value, child_worth = values(logprobs.double().exp(), squares, confidence)
            if growth.by == "node":
                slot_value = child_worth
            level = _best_level(drawn.tokens, slot_value, child_worth, node, slot, growth.width)
        there = (level.slot > 0) & (level.slot >= growth.threshold) & (depth <= state.room)[:, None]
        level = level._replace(tokens=level.tokens.where(there, -1), slot=level.slot.where(there, 0))

        above = first + level.parent
        first += len(slots)
        tokens, slot, node, key = level.tokens, level.slot, level.node, level.key
        own = torch.eye(tokens.shape[1], dtype=torch.bool, device=device).expand(batch, -1, -1)
        inherited = sees.gather(1, level.parent[..., None].expand(-1, -1, sees.shape[2]))
        sees = torch.cat([inherited, own], 2)
        levels.append(level._replace(parent=above))
        logits.append(after)
        lap("sampling")
        if can_trim and not (tokens >= 0).any():
            break
    drafted = _assembled(levels, torch.cat(logits, 1), growth.size, root, root_rows, can_trim)
    lap("sampling")
    return drafted


def _logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of tokens [B, n, K] by logits [B, n, V] at a temperature; -inf for a token of -1."""
    scores = logits.float() / temperature
    logprobs = scores.gather(-1, tokens.clamp(min=0)) - scores.logsumexp(-1, keepdim=True)
    return logprobs.masked_fill(tokens < 0, -torch.inf)


def _best_level(tokens: Tensor, value: Tensor, worth: Tensor, node: Tensor, slot: Tensor, width: int) -> _Level:
    """The `width` best of the slots below n nodes, for each sequence.

    tokens: LongTensor[B, n, K], the children drawn, -1 where absent; value, worth: [B, n, K] of `values`
    node, slot: [B, n], the worth of the nodes, and the value of the slots that they were drawn in
    """
    parents = node.shape[1]
    value = (node[..., None] * value).masked_fill(tokens < 0, 0).cummin(-1).values
    value = torch.minimum(value, slot[..., None])
    # By falling value, then rank, then parent.
    fields = (field.transpose(1, 2).flatten(1) for field in (value, node[..., None] * worth, tokens))  # [B, K * n]
    value, worth, tokens = fields
    order = value.sort(dim=-1, descending=True, stable=True).indices[:, :width]
    value, worth, tokens = (field.gather(1, order) for field in (value, worth, tokens))
    return _Level(order % parents, order // parents, tokens, value, worth, worth)


def _beam_level(beam: Beam) -> _Level:
    """A beam as a level. Children of one parent come in the order drawn: a rank counts those of the parent before."""
    parent = beam.parent.clamp(min=0)
    rank = (parent[:, :, None] == parent[:, None, :]).tril(-1).sum(-1)
    return _Level(parent, rank, beam.tokens, (beam.tokens >= 0).double(), beam.logprobs, beam.keys)


def _assembled(
    levels: list[_Level], logits: Tensor, size: int, root: Tensor, root_rows: Tensor, can_trim: bool
) -> Drafted:
    """The `size` best slots of all levels as trees in heavy-path order.

    logits: [B, slots but the last level's, V]; root: LongTensor[B], the roots' tokens; can_trim: leave out nodes that
    are absent from all trees.
    """
    batch, device = len(root), root.device
    sizes = 1, *(level.tokens.shape[1] for level in levels)
    depth_of = torch.cat([torch.full((size,), depth, device=device) for depth, size in enumerate(sizes)])
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
    # A stable sort: ties go to the shallower slot, the root comes first, absent slots of value 0 come last.
    kept = value.sort(dim=-1, descending=True, stable=True).indices[:, :size].sort(-1).values
    number = torch.zeros_like(parent).scatter_(1, kept, torch.arange(kept.shape[1], device=device).expand_as(kept))
    parent, rank, token = (field.gather(1, kept) for field in (parent, rank, token))
    parent = number.gather(1, parent.clamp(min=0)).where((parent >= 0) & (token >= 0), -1)
    order = heavy_path_order(parent, rank.where(parent >= 0, 0))
    slots, token = kept.gather(1, order.permutation), token.gather(1, order.permutation)
    if can_trim:
        nodes = int((token >= 0).sum(1).max())
        order = Ordering(*(field[:, :nodes] for field in order))
        slots, token = slots[:, :nodes], token[:, :nodes]
    # Absent nodes come behind all others; each is put below the node before it.
    index = torch.arange(token.shape[1], device=device)
    absent = (order.parents < 0) & (index > 0)
    return Drafted(
        tokens=token,
        parents=(index - 1).where(absent, order.parents),
        ranks=order.ranks,
        depths=depth_of[slots].where(~absent, 0),
        subtree_end=order.subtree_end,
        noise_rows=node_rows(root_rows, slots),
        draft_rows=slots,
        logits=logits[torch.arange(batch, device=device)[:, None], slots.clamp(max=logits.shape[1] - 1)],
    )
