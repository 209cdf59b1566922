"""Grow a tree where the draft is confident: DySpec, EAGLE-2's expand-and-rerank, and RSD-S's stochastic beam.

A slot is a place for the next draw below a node. With Q the draft's distribution after a node, x_1, x_2, ... its
children in draw order, R_k = 1 - Q(x_1) - ... - Q(x_{k-1}) and c_k the chance that x_k is accepted once x_1 .. x_{k-1}
are rejected, let

    worth(root) = 1,    worth(child x_k) = worth(node) (1 - c_1) ... (1 - c_{k-1}) c_k
    value(slot k below a node) = worth(node) (1 - c_1) ... (1 - c_{k-1}) e_k

    DySpec (Xiong et al. 2024, algorithm 1)    c_k = Q(x_k) / R_k,                  e_k = 1
    by measured confidence                     c_k = base_k + slope_k Q(x_k) / R_k,  e_k = E[c_k | x_1 .. x_{k-1}]
                                                   = base_k + slope_k sum_v Q(v)^2 / R_k^2 over v not drawn yet

In DySpec's the products telescope: a slot is worth worth(node) R_k. But a drawn token is accepted far more often than
with its draft probability (the paper's figure 2 has a line, with neither slope 1 nor through 0), so its trees are too
wide where the draft is flat; the second form takes the line as measured, and a slot's value is what it is expected to
add to the tokens of a step.

A slot's value is known before its token, and is cut to that of the slot which its parent was drawn in and to its elder
sibling's. So the N slots of largest value are a tree, which the paper's heap finds with a draft call for each
(`heap_tree`). Here a level is drafted in one call:

    depth times:  the `width` best slots below the nodes just drafted get their tokens, and one draft forward
    at the end:   the best size - 1 of all of them stay

That is the heap's tree whenever no level of it is wider than `width` and it is no deeper than `depth`. Ties go to the
shallower slot, then to the lower rank, then to the parent drafted earlier.

What is lossless: a slot may be left out for its value, which does not depend on its own token; never for its token. By
"node" the value is the node's own worth, which is for deterministic drafts alone (EAGLE-2, Li et al. 2024, sec. 4). By
"beam" a level is the next of a stochastic beam search (RSD-S, Jeon et al. 2024, algorithms 7 to 9): the keys that it
keeps are independent of the tokens that have them.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from heavypath.kernels.filtering import Filters
from heavypath.kernels.ordering import Ordering, heavy_path_order
from heavypath.kernels.sampling import Beam, gumbel_topk, stochastic_beam
from heavypath.speculative.decoding.drafting import Drafted, Lap, check_distributions, root_feed
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.decoding.snapshots import host_sees
from heavypath.speculative.drafts.drafts import Cache, Draft, Feed

TINY = 1e-300
MAX_SLOTS = 1 << 12  # each has noise of its own, named by as many bits beside its root's position
VALUE_TEMPERATURE = 0.6  # of the draft's probabilities as values, where its tokens are drawn at temperature 0 (DySpec)


@dataclass(frozen=True)
class Confidence:
    """c_k = base[k] + slope[k] q, the chance that child k is accepted once its elder siblings are rejected, where the
    draft gives it the share q of the tokens left. The last entries serve all further children.
    """

    base: tuple[float, ...]
    slope: tuple[float, ...]

    def __post_init__(self) -> None:
        lines = list(zip(self.base, self.slope, strict=False))
        if len(self.base) != len(self.slope) or not lines or not all(0 <= b <= b + s <= 1 for b, s in lines):
            raise ValueError(f"confidence must rise within [0, 1] for each child, got {self.base} and {self.slope}")

    def of(self, children: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """fp64 base and slope [children]."""
        return _lines(self, children, device)


@lru_cache(maxsize=64)  # copied to a device once, and so before a CUDA graph reads them there
def _lines(confidence: Confidence, children: int, device: torch.device) -> tuple[Tensor, Tensor]:
    index = torch.arange(children).clamp(max=len(confidence.base) - 1)
    lines = torch.tensor([confidence.base, confidence.slope], dtype=torch.float64)[:, index].to(device)
    return lines[0], lines[1]


# Of the demo pair at temperature 0.6, drawn without replacement.
DEFAULT_CONFIDENCE = Confidence((0.41, 0.16, 0.12, 0.09, 0.08), (0.5, 0.5, 0.4, 0.3, 0.3))


@dataclass(frozen=True)
class Growth:
    """How trees grow.

    by:        what nodes are kept for: their "slot"'s value, the "node"'s own, or their key in a stochastic "beam"
    size:      nodes of a tree, root included, at most
    width:     nodes drafted on a level, at most
    depth:     levels
    threshold: slots of less value stay empty; with one node a level, a chain that ends early
    confidence: by "slot", where the text is sampled: what values are made of; None for DySpec's own
    """

    by: Literal["slot", "node", "beam"]
    size: int
    width: int
    depth: int
    threshold: float = 0.0
    confidence: Confidence | None = None

    def __post_init__(self) -> None:
        for name in ("width", "depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be in [0, 1], got {self.threshold}")
        if self.slots > MAX_SLOTS:
            raise ValueError(f"depth levels of width nodes may be at most {MAX_SLOTS} with the root, got {self.slots}")
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
    slot:   fp64, the slot's value, 0 where it stays empty
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
    visible: int,
    first_row: Tensor,
    filters: Filters,
    value_temperature: float,
    lap: Lap,
) -> Drafted:
    """A tree for each sequence, of growth.size nodes on a GPU; on a CPU of as many as one of them has.

    visible: cache rows that hold the longest prefix.
    first_row: LongTensor[B], the roots' noise; that of slot s is first_row + s.
    value_temperature: of the draft's probabilities as values where filters.temperature is 0.
    """
    root, lengths = sequences.root, sequences.lengths
    batch, device = len(root), root.device
    trim, seed = host_sees(device), sequences.seed

    # The level above: its slots are first .. first + n - 1, and what they see of the slots up to their own.
    first, tokens = 0, root[:, None]
    key = torch.zeros(batch, 1, dtype=torch.float64, device=device)
    slot = torch.ones_like(key)
    node = key if growth.by == "beam" else slot
    sees = torch.ones(batch, 1, 1, dtype=torch.bool, device=device)
    above = torch.zeros_like(tokens)  # slots of the parents
    levels: list[_Level] = []
    logits: list[Tensor] = []
    for depth in range(1, growth.depth + 1):
        slots = torch.arange(first, first + tokens.shape[1], device=device)
        if depth == 1:
            feed = root_feed(sequences, visible, nodes=2)
        else:
            feed = Feed(
                tokens=tokens.clamp(min=0),
                positions=(lengths + depth - 1)[:, None].expand_as(tokens),
                rows=lengths[:, None] + slots,
                parent_rows=lengths[:, None] + above,
                lengths=lengths,
                visible_rows=visible + first + len(slots),
                ancestor_mask=sees,
            )
        after = draft(feed, cache)[:, -len(slots) :]  # [B, n, V]
        lap("draft")
        rows = first_row[:, None] + slots
        if growth.by == "beam":
            beam = stochastic_beam(after, node, key, growth.width, **filters._asdict(), seed=seed, rows=rows)
            check_distributions("draft", after, sequences, depth - 1)
            level = _beam_level(beam)
        else:
            drawing = filters if growth.by == "slot" else filters._replace(temperature=0.0)
            drawn = gumbel_topk(after, min(growth.width, after.shape[-1]), **drawing._asdict(), seed=seed, rows=rows)
            check_distributions("draft", drawn.keys, sequences, depth - 1)
            sampled, temperature = drawing.temperature > 0, filters.temperature or value_temperature
            logprobs = drawn.logprobs if sampled else _logprobs(after, drawn.tokens, temperature)
            confidence = growth.confidence if sampled else None
            squares = None if confidence is None else sum_of_squares(after, temperature)
            slots_value, children_worth = values(logprobs.double().exp(), squares, confidence)
            if growth.by == "node":
                slots_value = children_worth
            level = _best_level(drawn.tokens, slots_value, children_worth, node, slot, growth.width)
        there = (level.slot > 0) & (level.slot >= growth.threshold) & (depth <= sequences.room)[:, None]
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
        if trim and not (tokens >= 0).any():
            break
    drafted = _assembled(levels, torch.cat(logits, 1), growth, root, first_row, trim)
    lap("sampling")
    return drafted


def values(probs: Tensor, squares: Tensor | None, confidence: Confidence | None) -> tuple[Tensor, Tensor]:
    """The values of the slots below a node of worth 1, and the worth of the children drawn there; fp64 [..., K].

    probs: fp64 [..., K], Q of the children in draw order, 0 for an absent one; squares: [..., 1], the sum of Q(v)^2
    over all tokens, for a confidence.
    """
    before = pad(probs[..., :-1], (1, 0))
    remaining = (1 - before.cumsum(-1)).clamp(min=0)  # R_k
    if confidence is None:
        return remaining, torch.minimum(probs, remaining)  # more by rounding, if at all
    assert squares is not None
    base, slope = confidence.of(probs.shape[-1], probs.device)
    accept = base + slope * (probs / remaining.clamp(min=TINY)).clamp(max=1)
    expected = base + slope * ((squares - (before**2).cumsum(-1)) / remaining.clamp(min=TINY) ** 2).clamp(0, 1)
    reached = (1 - pad(accept[..., :-1], (1, 0))).cumprod(-1)
    return (reached * expected).where(remaining > 0, 0), reached * accept


def sum_of_squares(logits: Tensor, temperature: float) -> Tensor:
    """The sum over tokens of squared probabilities, fp64 [..., 1], for logits [..., V] at a temperature."""
    scores = logits / temperature
    total = scores.logsumexp(-1, keepdim=True).double()
    return ((2 * scores).logsumexp(-1, keepdim=True).double() - 2 * total).exp().nan_to_num()


def _logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of tokens [B, n, K] by logits [B, n, V] at a temperature; -inf for a token of -1."""
    scores = logits / temperature
    logprobs = scores.gather(-1, tokens.clamp(min=0)) - scores.logsumexp(-1, keepdim=True)
    return logprobs.masked_fill(tokens < 0, -torch.inf)


def _best_level(tokens: Tensor, value: Tensor, worth: Tensor, node: Tensor, slot: Tensor, width: int) -> _Level:
    """The `width` best of the slots below n nodes worth `node` [B, n], which were drawn in slots of value `slot`.

    tokens: LongTensor[B, n, K], -1 where absent; value, worth: [B, n, K] of `values`.
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
    """Children of one parent come in the order drawn, so a rank counts the parent's children before."""
    parent = beam.parent.clamp(min=0)
    rank = (parent[:, :, None] == parent[:, None, :]).tril(-1).sum(-1)
    return _Level(parent, rank, beam.tokens, (beam.tokens >= 0).double(), beam.logprobs, beam.keys)


def _assembled(
    levels: list[_Level], logits: Tensor, growth: Growth, root: Tensor, first_row: Tensor, trim: bool
) -> Drafted:
    """The best slots of all levels as trees in heavy-path order; logits: [B, slots but the last level's, V]."""
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
    below: Callable[[tuple[int, ...]], tuple[Sequence[float], Sequence[float]]], size: int, max_depth: int
) -> list[tuple[int, ...]]:
    """DySpec's algorithm 1 as published: the drafted nodes as paths of ranks, in the order they are drawn.

    below(path): `values` of the node at `path`. The reference of `grow_tree`, which asks the draft once for each node;
    O(size log size) beside that.
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
