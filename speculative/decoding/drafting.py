"""Draft a static tree's tokens level by level, with one forward pass of the draft for each level."""

import torch
from torch import Tensor

from heavypath.kernels.noise import Noise
from heavypath.kernels.sampling import draw_unchecked
from heavypath.speculative.decoding.device_tree import DeviceTree, Level
from heavypath.speculative.decoding.drafted import Drafted, Lap, check_distributions, root_feed
from heavypath.speculative.decoding.rules import Rules
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.drafts.feed import Feed
from heavypath.speculative.models.caches import RowCache


def root_alone(state: Sequences, noise_rows: Tensor, tree: DeviceTree) -> Drafted:
    """A tree without drafts; noise_rows: LongTensor[B, 1]."""
    tokens = state.root[:, None].clone()  # a copy, because the step moves the state on
    return _drafted(tree, tokens, noise_rows, logits=None)


def draft_tree(
    draft: Draft,
    cache: RowCache,
    tree: DeviceTree,
    state: Sequences,
    *,
    visible_rows: int,
    noise_rows: Tensor,
    rules: Rules,
    lap: Lap,
) -> Drafted:
    """Draft a static tree for each sequence.

    visible_rows: cache rows that hold the longest prefix; noise_rows: LongTensor[B, N] of the nodes. A node is absent
    where the draft's support ran out, or where it is deeper than its own sequence has tokens left to write.
    """
    root, lengths = state.root, state.lengths
    tokens = torch.full((len(root), len(tree)), -1, device=root.device)
    tokens[:, 0] = root
    texts = torch.zeros_like(tokens)  # for each node the first one with the same text
    logits = None
    for depth, level in enumerate(tree.levels):
        if depth == 0:
            feed = root_feed(state, visible_rows, len(tree))
        else:
            feed = Feed(
                tokens=tokens.index_select(1, level.nodes).clamp(min=0),
                positions=(lengths + depth)[:, None].expand(-1, len(level.nodes)),
                cache_rows=lengths[:, None] + level.nodes,
                parent_rows=lengths[:, None] + level.parents,
                prefix_lengths=lengths,
                visible_rows=visible_rows + len(tree),
                ancestor_mask=level.mask,
            )
        after = draft(feed, cache)[:, -len(level.nodes) :]  # [B, n, V]
        if rules.replacement and depth > 0:
            after = _alike_after_equal_texts(after, tokens, texts, level)
        lap("draft")
        children = draw_unchecked(
            after.flatten(0, 1),
            level.most_children,
            filters=rules.drawing_filters,
            noise=Noise(state.seed, noise_rows.index_select(1, level.nodes).flatten()),
            replacement=rules.replacement,
            uniform_fill=rules.fill,
        )
        check_distributions("draft", children.keys.view(len(root), len(level.nodes), -1), state, depth)
        tokens.index_copy_(1, level.children, children.tokens.view(len(root), -1).index_select(1, level.draws))
        if logits is None:
            logits = after.new_empty(len(root), len(tree), after.shape[-1])
        logits.index_copy_(1, level.nodes, after)
        lap("sampling")
    return _drafted(tree, tokens.where(tree.depths <= state.room[:, None], -1), noise_rows, logits)


def _alike_after_equal_texts(after: Tensor, tokens: Tensor, texts: Tensor, level: Level) -> Tensor:
    """The logits [B, n, V] after a level's nodes, where nodes with the same text get those of the first of them.

    Verification takes the children of equal siblings for draws from one distribution. A draft may have computed two:
    by rounding, by dropout, or because it is a user's own. `texts` LongTensor[B, N] is known above the level, and
    extended to it.
    """
    above, token = texts.index_select(1, level.parents), tokens.index_select(1, level.nodes)
    same = (above[:, :, None] == above[:, None]) & (token[:, :, None] == token[:, None])  # [B, n, n]
    first = same.int().argmax(-1)
    texts.index_copy_(1, level.nodes, level.nodes[first])
    return after.gather(1, first[..., None].expand_as(after))


def _drafted(tree: DeviceTree, tokens: Tensor, noise_rows: Tensor, logits: Tensor | None) -> Drafted:
    """What was drafted of a static tree, whose shape all sequences share."""
    return Drafted(
        tokens=tokens,
        parents=tree.parents,
        ranks=tree.ranks,
        depths=tree.depths,
        subtree_end=tree.subtree_end,
        noise_rows=noise_rows,
        draft_rows=None,
        logits=logits,
    )
