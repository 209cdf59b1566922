"""Draft a static tree's tokens level by level, with one forward pass of the draft for each level."""

from dataclasses import dataclass

import torch
from torch import Tensor

from heavypath.kernels.noise import Noise
from heavypath.kernels.step_kernels import step_kernels
from heavypath.kernels.trees.levels import CommonNodes, Drawn, NodeInputs, Scored, Trees
from heavypath.speculative.decoding.drafted import (
    Drafted,
    Lap,
    Reach,
    any_drafted,
    check_distributions,
    feed_of,
    root_feed,
)
from heavypath.speculative.decoding.rules import Rules
from heavypath.speculative.decoding.sequences import Sequences, node_rows, race_rows, root_rows
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.models.caches import RowCache
from heavypath.speculative.models.forward import host_can_read
from heavypath.speculative.trees.tree import ROOT, TokenTree


@dataclass(frozen=True)
class TreeLevel:
    """How the level below one depth is drafted: the n nodes of this depth that have children, and their m children.

    nodes:         the n nodes
    mask:          bool [n, N], which of the tree's nodes each of them attends to
    logit_rows:    LongTensor[l], where the logits after these nodes are stored among the tree's. l is n, but after the
                   root it is D, the number of distributions that a draft has there (`Draft.root_distributions`)
    branches:      LongTensor[n], the draw number of the root's child above each node, see `Feed`
    children:      LongTensor[m], the numbers of the children in the tree
    draws:         LongTensor[m]: child i is draw number `draws[i]` of the l * most_children draws that are made
    most_children: number of draws from each of the l distributions, the most that any of them needs
    """

    nodes: CommonNodes
    mask: Tensor
    logit_rows: Tensor
    branches: Tensor
    children: Tensor
    draws: Tensor
    most_children: int


@dataclass(frozen=True)
class DeviceTree:
    """The top levels of a static tree, N nodes in heavy-path order (`TokenTree.reordered`), on a device.

    nodes:         all nodes
    ranks, subtree_end: LongTensor[N], as `TokenTree`'s
    whole_numbers: LongTensor[N + D - 1], the nodes' numbers in the whole tree, from which noise rows are made. If a
                   draft has D > 1 distributions after the root, D - 1 larger numbers follow, for the further ones
    row_depths:    LongTensor[N + D - 1], the depths of the nodes, then D - 1 zeros
    levels:        what is drafted at each depth, the root's children first
    """

    nodes: CommonNodes
    ranks: Tensor
    subtree_end: Tensor
    whole_numbers: Tensor
    row_depths: Tensor
    levels: tuple[TreeLevel, ...]

    def __len__(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, eq=False)
class StaticDrafter:
    """Drafts a static tree for each sequence.

    A node is absent where the draft's support ran out, or where it is deeper than its own sequence has tokens left to
    write. On a CPU the trees are their roots alone where no draft proposes anything.

    tree: the tree to draft; root_tree: the tree of only the root
    rules: how children are drawn
    """

    tree: DeviceTree
    rules: Rules
    root_tree: DeviceTree

    @property
    def depth(self) -> int:
        """The number of levels below the root that it drafts."""
        return len(self.tree.levels)

    def __call__(self, draft: Draft, cache: RowCache, state: Sequences, reach: Reach, lap: Lap) -> Drafted:
        """Draft the trees, with one call of the draft for each level; arguments as in `Drafter`."""
        tree = self.tree
        rules = self.rules
        device = state.root.device
        kernels = step_kernels(device)
        batch = len(state.root)
        size = len(tree)  # N
        most_levels = len(tree.levels)
        noise_rows = self._noise_rows(state)  # [B, N + D - 1]
        if most_levels == 0:
            return _only_root(state, noise_rows, tree, logits=None)
        trees = _blank(state, noise_rows[:, :size], tree, rules.replacement)
        may_be_alone = reach.trims and host_can_read(device) and not draft.proposes_every_token
        feed = root_feed(state, reach, size, most_levels)
        level_noise = noise_rows[:, :1]  # [B, l]
        root_logit_rows = tree.levels[0].logit_rows
        if len(root_logit_rows) > 1:
            level_noise = noise_rows.index_select(1, root_logit_rows)
        logits = inputs = None
        for depth, level in enumerate(tree.levels):
            distributions = len(level.logit_rows)  # l
            after = draft(feed, cache)  # [B, any, V]
            after = after[:, -distributions:]  # [B, l, V]
            if rules.replacement and depth > 0:
                # A draft may have computed two distributions after equal sequences: by rounding, by dropout, or because
                # it is a user's own. The first of them is taken for both.
                first_alike = kernels.alike(trees, level.nodes)  # [B, l]
                after = after.gather(1, first_alike[..., None].expand_as(after))
            lap("draft")

            tokens, keys, _ = kernels.draw(
                after.flatten(0, 1),
                level.most_children,
                rules.drawing_filters,
                noise=Noise(state.seed, level_noise.flatten()),
                replacement=rules.replacement,
                uniform_fill=rules.fill,
            )
            check_distributions("draft", keys.view(batch, distributions, -1), state, depth)
            if depth == 0 and may_be_alone and not any_drafted(tokens):
                lap("sampling")
                root_logits = after[:, :1].contiguous()
                return _only_root(state, noise_rows[:, :1], self.root_tree, root_logits)

            if logits is None:
                vocab_size = after.shape[-1]
                logits = after.new_empty(batch, noise_rows.shape[1], vocab_size)  # [B, N + D - 1, V]
            scored = Scored(after, logits, level.logit_rows)
            drawn = Drawn(tokens.view(batch, -1), level.children, level.draws, scored)
            depth_below = depth + 1
            if depth_below == most_levels:
                inputs = kernels.place(trees, drawn, tree.nodes, True)  # the target reads them next
                lap("sampling")
                break
            below = tree.levels[depth_below]
            inputs = kernels.place(trees, drawn, below.nodes, False)
            lap("sampling")
            visible_rows = reach.visible_rows + size
            feed = feed_of(inputs, state, visible_rows, below.mask, depth_below, below.branches)
            level_noise = inputs.noise_rows
        assert inputs is not None
        return _drafted(tree, trees.tokens, inputs, logits)

    def _noise_rows(self, state: Sequences) -> Tensor:
        """The noise rows, LongTensor[B, N + D - 1], of the nodes and of further distributions after the root."""
        roots = root_rows(state.noise, state.lengths)
        if self.rules.verification == "race":
            return race_rows(roots, self.tree.row_depths)
        return node_rows(roots, self.tree.whole_numbers)


def _blank(state: Sequences, noise_rows: Tensor, tree: DeviceTree, joins: bool) -> Trees:
    """Trees with memory for the nodes of `tree`, of which none has been placed yet.

    joins: whether a place for texts is made, by which nodes with equal tokens from the root on share their logits
    """
    root = state.root
    tokens = root.new_empty(len(root), len(tree))
    texts = None
    if joins:
        texts = torch.empty_like(tokens).zero_()
    return Trees(tokens, root, noise_rows, state.lengths, state.left, texts)


def _only_root(state: Sequences, noise_rows: Tensor, tree: DeviceTree, logits: Tensor | None) -> Drafted:
    """The drafted trees of a step that drafts nothing: `tree` is the root alone, `logits` the draft's after it."""
    trees = _blank(state, noise_rows, tree, joins=False)
    kernels = step_kernels(state.root.device)
    inputs = kernels.place(trees, None, tree.nodes, True)
    return _drafted(tree, trees.tokens, inputs, logits)


def _drafted(tree: DeviceTree, tokens: Tensor, inputs: NodeInputs, logits: Tensor | None) -> Drafted:
    """The `Drafted` of a static tree, whose shape all sequences share: arguments as its fields."""
    return Drafted(
        tokens=tokens,
        parents=tree.nodes.parents,
        ranks=tree.ranks,
        depths=tree.nodes.depths,
        subtree_end=tree.subtree_end,
        inputs=inputs,
        draft_rows=None,
        logits=logits,
    )


def static(tree: TokenTree, depth: int, draft: Draft, rules: Rules, device: torch.device) -> StaticDrafter:
    """The drafter of the top `depth` levels of a static tree; for 0 levels, of the root alone."""
    top = device_tree(tree, depth, device, draft.root_distributions)
    root_tree = device_tree(ROOT, 0, device)
    return StaticDrafter(top, rules, root_tree)


def device_tree(whole: TokenTree, depth: int, device: torch.device, root_distributions: int = 1) -> DeviceTree:
    """Make the `DeviceTree` of the top `depth` levels of a tree.

    root_distributions: D, the number that a draft has after the root; its child j is drawn from number j mod D
    """
    tree, whole_numbers = whole.truncated(depth)
    parents = tree.parents
    depths = tree.depths
    ranks = tree.ranks
    mask = tree.mask()  # [N, N]
    size = len(tree)

    def common(nodes: Tensor) -> CommonNodes:
        return CommonNodes(
            nodes.to(device),
            parents[nodes].to(device),
            depths[nodes].to(device),
        )

    levels = []
    more = root_distributions - 1 if tree.depth else 0  # distributions after the root besides the first
    further = torch.arange(more, device="cpu")
    in_branch = mask & (depths == 1)  # [N, N], the root's child above each node
    branches = (in_branch * ranks).sum(1)
    for level in range(tree.depth):
        children = (depths == level + 1).nonzero()[:, 0]
        nodes, parent = parents[children].unique(return_inverse=True)
        logit_rows = nodes
        drawn_from = parent  # of each child, the distribution it is drawn from, and the number of the draw
        draw = ranks[children]
        if level == 0:
            logit_rows = torch.cat([nodes, size + further])
            drawn_from = draw % root_distributions
            draw = draw // root_distributions
        most_children = int(draw.max()) + 1
        draws = drawn_from * most_children + draw
        levels.append(
            TreeLevel(
                nodes=common(nodes),
                mask=mask[nodes].to(device),
                logit_rows=logit_rows.to(device),
                branches=branches[nodes].to(device),
                children=children.to(device),
                draws=draws.to(device),
                most_children=most_children,
            )
        )
    whole_numbers = torch.cat([whole_numbers, len(whole) + further])
    row_depths = torch.cat([depths, torch.zeros_like(further)])
    return DeviceTree(
        nodes=common(torch.arange(size, device="cpu")),
        ranks=ranks.to(device),
        subtree_end=tree.subtree_end.to(device),
        whole_numbers=whole_numbers.to(device),
        row_depths=row_depths.to(device),
        levels=tuple(levels),
    )
