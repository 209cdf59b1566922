"""Grow a tree where the draft is confident: DySpec, EAGLE-2's expansion and re-ranking, and RSD-S's stochastic beam.

A slot of a tree is a place for the next draw below a node. `kernels.growing` says what it is worth, which is known
before its token is drawn. A slot counts with the least of three values: its own, that of the slot of its parent, and
that of the sibling before it. So the N slots of largest value are a tree. DySpec's heap finds it with a draft call for
each node (`heap_tree`); here a level is drafted in one call:

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

import torch
from torch import Tensor

from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.sequence_scores import sequence_scores
from heavypath.kernels.trees.assembly import assemble
from heavypath.kernels.trees.growing import grow
from heavypath.kernels.trees.slots import Level, Policy, Roots, Slots
from heavypath.speculative.decoding.drafted import Drafted, Lap, Reach, check_distributions, feed_of, root_feed
from heavypath.speculative.decoding.growth import Growth
from heavypath.speculative.decoding.rules import Rules
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.models.caches import RowCache
from heavypath.speculative.models.host import host_can_read


def heap_tree(
    below: Callable[[tuple[int, ...]], tuple[Sequence[float], Sequence[float]]],
    size: int,
    max_depth: int,
    threshold: float = 0.0,
) -> list[tuple[int, ...]]:
    """DySpec's algorithm 1 as published, with a draft call for each node: what `grow_tree` must find.

    Returns the drafted nodes as paths of ranks, in the order in which they are drawn, without the root.

    below(path): `kernels.growing.values` of the node at `path`, asked once for each node. O(size log size) beside that.
    threshold: slots of less value stay empty.
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
    while queue and queue[0][0] < 0 and -queue[0][0] >= threshold and len(nodes) < size:
        negative, _, rank, parent = heapq.heappop(queue)
        nodes.append((*nodes[parent], rank))
        worths.append(worths[parent] * rows[parent][1][rank])
        offer(parent, rank + 1, -negative)
        offer(len(nodes) - 1, 0, -negative)
    return nodes[1:]


def grow_tree(
    draft: Draft,
    cache: RowCache,
    growth: Growth,
    state: Sequences,
    *,
    reach: Reach,
    root_rows: Tensor,
    rules: Rules,
    lap: Lap,
) -> Drafted:
    """Grow a tree for each sequence: of growth.size nodes on a GPU or by ranks; else of as many as the largest one has.

    root_rows: LongTensor[B], the roots' noise rows; slot s of a tree has its root's row + s
    """
    batch, device = len(state.root), state.root.device
    can_trim = reach.trims and host_can_read(device)
    filters = rules.draft_filters if growth.by == "beam" else rules.drawing_filters
    roots = Roots(state.root, state.lengths, root_rows, state.left)
    slots = Slots.room_for(batch, growth.slots, device)
    feed, noise_rows = root_feed(state, reach, 2, growth.depth), root_rows[:, None]
    level = Level(0, 1, 0, feed.ancestor_mask[:, 1:, :1])  # the root, which sees itself
    logits: list[Tensor] = []
    while True:
        after = draft(feed, cache)[:, -level.size :]  # [B, n, V]
        if rules.by_sequence:
            after = sequence_scores(after, state.settings[:, 1])
        lap("draft")
        most = min(growth.width, after.shape[-1])
        drawn = gumbel_topk(after, most, **filters._asdict(), seed=state.seed, rows=noise_rows)
        check_distributions("draft", drawn.keys, state, level.depth)
        level, fed = grow(slots, level, drawn, after, roots, _policy(growth, rules, device))
        logits.append(after)
        lap("sampling")
        if level.depth == growth.depth or (can_trim and not (slots.tokens[:, level.first : level.end] >= 0).any()):
            break
        feed, noise_rows = feed_of(fed, state, reach.visible_rows + level.end, level.mask, level.depth), fed.noise_rows
    tree = assemble(slots, roots, level, growth.size, trims=can_trim)
    every = torch.cat(logits, 1)  # after the slots of all levels but the last
    drafted = Drafted(
        tokens=tree.tokens,
        parents=tree.parents,
        ranks=tree.ranks,
        depths=tree.depths,
        subtree_end=tree.subtree_end,
        fed=tree.fed,
        draft_rows=tree.slots,
        logits=every.flatten(0, 1).index_select(0, tree.inner.flatten()).view(*tree.tokens.shape, -1),
    )
    lap("sampling")
    return drafted


def _policy(growth: Growth, rules: Rules, device: torch.device) -> Policy:
    """How slots are chosen."""
    noisy = (rules.draft_filters if growth.by == "beam" else rules.drawing_filters).temperature > 0
    return Policy(
        by=growth.by,
        width=growth.width,
        threshold=growth.threshold,
        noisy=noisy,
        temperature=rules.draft_filters.temperature or rules.value_temperature,
        lines=None if growth.confidence is None or not noisy else growth.confidence.lines(growth.width, device),
    )
