"""Ancestor masks: which nodes of its tree each node sees, as one integer per node, as bools, or as packed bits.

Each node sees itself and its ancestors. For nodes in depth-first order the subtree of node j is [j, end[j]), so

    node i sees node j    iff    j <= i < end[j]

and the N integers end[j] = j + (nodes in the subtree of j), called `subtree_end`, are the whole mask. A tree that still
grows is not in depth-first order: it needs an ancestor mask, bool [i, j], or the same mask packed into 32-bit words.
For PyTorch's attention the mask is a bias, 0 where a node sees a cache row and -inf elsewhere.

A sliding window of w positions can be computed from the mask alone. Node numbers rise along a path, so the distance
from node i up to node j is the number of nodes after j that i sees. Node j is in the window of i if this number is less
than w. A query that sees n nodes of the tree sees the last w - n rows of the prefix: w positions in all.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from heavypath.kernels.implementation import choose_impl
from heavypath.kernels.language import tl, triton

_WORDS = tl.constexpr(8)  # words of 32 nodes that a program packs in one iteration


class PackedAncestors(NamedTuple):
    """An ancestor mask [Q, N] or [B, Q, N] with 32 nodes in a word; the result of `pack_ancestors`.

    words:  int32 [..., Q, 2 * ceil(N / 64)]; bit j % 32 of word j // 32 is column j
    nodes:  N
    window: the sliding window that the mask was narrowed to; None for a mask of all ancestors
    counts: int32 [..., Q], how many nodes each query sees; None without a window
    """

    words: Tensor
    nodes: int
    window: int | None = None
    counts: Tensor | None = None


def pack_ancestors(mask: Tensor, window: int | None = None, *, impl: str = "auto") -> PackedAncestors:
    """Pack a bool mask [..., Q, N], once for all calls of `tree_attention` that share it and the sliding window.

    impl: see `implementation`; "triton" is one launch
    """
    if choose_impl("pack_ancestors", impl, mask) == "triton":
        return _launch_pack(mask.contiguous(), window)
    counts = None
    if window is not None:
        mask = narrowed(mask, window)
        counts = mask.sum(-1, dtype=torch.int32)
    bits = pad(mask, (0, -mask.shape[-1] % 64)).unflatten(-1, (-1, 32))
    places = torch.arange(32, device=mask.device)
    return PackedAncestors((bits.long() << places).sum(-1).to(torch.int32), mask.shape[-1], window, counts)


@triton.jit(do_not_specialize=["nodes", "window"])
def _pack_kernel(
    mask_ptr,  # [.., Q, nodes], bytes
    words_ptr,  # [.., Q, 2 * ceil(nodes / 64)]
    counts_ptr,  # [.., Q] if HAS_WINDOW
    nodes,
    window,
    HAS_WINDOW: tl.constexpr,
):
    """Each program packs the row of one query."""
    query = tl.program_id(0).to(tl.int64)
    mask_ptr += query * nodes
    count = tl.cdiv(nodes, 64) * 2
    words_ptr += query * count
    if HAS_WINDOW:
        bit = tl.arange(0, 32)
        seen = tl.full([], 0, tl.int32)
        for first in range(0, count, _WORDS):
            node = (first + tl.arange(0, _WORDS)[:, None]) * 32 + bit[None, :]
            seen += tl.sum(tl.load(mask_ptr + node, mask=node < nodes, other=0).to(tl.int32))
        tl.store(counts_ptr + query, tl.minimum(seen, window))
        before = tl.full([], 0, tl.int32)
        for first in range(0, count, _WORDS):
            word = first + tl.arange(0, _WORDS)
            node = word[:, None] * 32 + bit[None, :]
            sees = tl.load(mask_ptr + node, mask=node < nodes, other=0).to(tl.int32)
            place = tl.cumsum(tl.reshape(sees, [_WORDS * 32]), 0)
            behind = seen - before - tl.reshape(place, [_WORDS, 32])
            before += tl.sum(sees)
            sees = tl.where(behind < window, sees, 0)
            tl.store(words_ptr + word, tl.sum(sees << bit[None, :], 1), mask=word < count)
    else:
        pack_row(mask_ptr, words_ptr, nodes)


@triton.jit
def pack_row(mask_ptr, words_ptr, nodes):
    """Pack a query's bytes [nodes] into its words [2 * ceil(nodes / 64)]."""
    count = tl.cdiv(nodes, 64) * 2
    bit = tl.arange(0, 32)
    for first in range(0, count, _WORDS):
        word = first + tl.arange(0, _WORDS)
        node = word[:, None] * 32 + bit[None, :]
        sees = tl.load(mask_ptr + node, mask=node < nodes, other=0).to(tl.int32)
        tl.store(words_ptr + word, tl.sum(sees << bit[None, :], 1), mask=word < count)


def _launch_pack(mask: Tensor, window: int | None) -> PackedAncestors:
    """Launch the kernel of `pack_ancestors` on a contiguous mask."""
    queries = mask.shape[:-1]
    nodes = mask.shape[-1]
    words = mask.new_empty((*queries, 2 * triton.cdiv(nodes, 64)), dtype=torch.int32)
    counts = None if window is None else torch.empty(queries, dtype=torch.int32, device=mask.device)
    if words.numel():
        with torch.cuda.device_of(mask):
            _pack_kernel[(queries.numel(),)](
                mask_ptr=mask.view(torch.int8),
                words_ptr=words,
                counts_ptr=counts,
                nodes=nodes,
                window=0 if window is None else window,
                HAS_WINDOW=window is not None,
                num_warps=1,
                enable_fp_fusion=False,
            )
    return PackedAncestors(words, nodes, window, counts)


def unpack_ancestors(packed: PackedAncestors) -> Tensor:
    """Return the bool mask [..., Q, N] of a packed one."""
    bits = packed.words[..., None] >> torch.arange(32, device=packed.words.device, dtype=torch.int32)
    return (bits & 1).bool().flatten(-2)[..., : packed.nodes]


def interval_mask(subtree_end: Tensor) -> Tensor:
    """Return the bool mask [..., N, N] of subtree_end [..., N]: [i, j] is true where j <= i < end[j]."""
    index = torch.arange(subtree_end.shape[-1], device=subtree_end.device)
    return (index[:, None] < subtree_end[..., None, :]).tril_()


def narrowed(ancestors: Tensor, window: int) -> Tensor:
    """Return the ancestor mask [..., Q, N] narrowed to a sliding window: `window` positions, the query's included."""
    counted = ancestors.cumsum(-1, dtype=torch.int32)
    return ancestors & (counted[..., -1:] - counted < window)


def attention_bias(
    ancestors: Tensor, lengths: int | Tensor, rows: int, dtype: torch.dtype, window: int | None = None
) -> Tensor:
    """Return the additive mask [B or 1, 1, Q, rows] of a tree after its prefix: 0 for visible rows, else -inf.

    ancestors: bool [Q, N] or [B, Q, N], which of the N nodes each of the Q querying nodes sees
    lengths:   number of prefix rows, an int for all sequences or LongTensor[B]; the tree's rows follow them
    rows:      number of cache rows that the mask covers
    window:    how many positions a node sees, with its own; None for all
    """
    queries, nodes = ancestors.shape[-2:]
    if window is not None:
        ancestors = narrowed(ancestors, window)
        bias = attention_bias(ancestors, lengths, rows, dtype)
        before = ancestors.sum(-1) - window + (lengths if isinstance(lengths, int) else lengths[:, None])  # [.., Q]
        unseen = torch.arange(rows, device=ancestors.device) < before.view(-1, 1, queries, 1)
        return bias.masked_fill(unseen, -torch.inf)
    if isinstance(lengths, int):
        bias = torch.zeros(*ancestors.shape[:-1], rows, dtype=dtype, device=ancestors.device)
        bias[..., lengths : lengths + nodes].masked_fill_(~ancestors, -torch.inf)
        if lengths + nodes < rows:
            bias[..., lengths + nodes :] = -torch.inf
        return bias.view(-1, 1, queries, rows)
    tree = torch.zeros(ancestors.shape, dtype=dtype, device=ancestors.device).masked_fill_(~ancestors, -torch.inf)
    tree = tree.view(-1, 1, queries, nodes)
    batch = max(len(tree), len(lengths))
    bias = torch.zeros(batch, 1, queries, rows, dtype=dtype, device=ancestors.device)
    bias.masked_fill_((torch.arange(rows, device=lengths.device) >= lengths[:, None, None, None] + nodes), -torch.inf)
    columns = lengths[:, None, None, None] + torch.arange(nodes, device=lengths.device)
    return bias.scatter_(3, columns.expand(batch, 1, queries, nodes), tree.expand(batch, -1, -1, -1))


class Visible(NamedTuple):
    """Which cache rows the nodes of a tree see: arguments of `tree_attention`.

    length:      number of prefix rows in every sequence, if lengths is None
    lengths:     LongTensor [] or [B], number of prefix rows in each sequence
    subtree_end: int or long tensor [N] or [B, N]; or None, and then
    ancestors:   bool [Q, N] or [B, Q, N], or the words of `PackedAncestors`; if both are None, the tree is a chain
    nodes:       N
    first_row:   LongTensor[B]; rows before it are left padding
    window:      how many positions a node sees, with its own
    counts:      int32 [Q] or [B, Q] of `PackedAncestors`, if the words are already narrowed to the window
    """

    length: int
    lengths: Tensor | None
    subtree_end: Tensor | None
    ancestors: Tensor | None
    nodes: int
    first_row: Tensor | None
    window: int | None
    counts: Tensor | None = None

    def ancestor_mask(self) -> Tensor:
        """Return the bool ancestor mask [Q, N] or [B, Q, N]; narrowed to the window only if it was packed for it."""
        if self.subtree_end is not None:
            return interval_mask(self.subtree_end)
        assert self.ancestors is not None
        if self.ancestors.dtype == torch.bool:
            return self.ancestors
        return unpack_ancestors(PackedAncestors(self.ancestors, self.nodes))

    def packed(self) -> PackedAncestors:
        """Return the ancestors as words, narrowed to the window if there is one."""
        assert self.ancestors is not None
        if self.ancestors.dtype != torch.bool and (self.window is None or self.counts is not None):
            return PackedAncestors(self.ancestors, self.nodes, self.window, self.counts)
        return pack_ancestors(self.ancestor_mask(), self.window)

    def path_lengths(self) -> Tensor:
        """Return how many nodes the path from the root to each node has, both included: int32 [N] or [B, N]."""
        assert self.subtree_end is not None
        # Every node before node i is an ancestor of it, except those whose subtree ended before i.
        end = self.subtree_end.long()
        ended = torch.zeros(*end.shape[:-1], self.nodes + 1, dtype=torch.int32, device=end.device)
        ended = ended.scatter_add_(-1, end, torch.ones_like(end, dtype=torch.int32)).cumsum(-1, dtype=torch.int32)
        return torch.arange(1, self.nodes + 1, dtype=torch.int32, device=end.device) - ended[..., : self.nodes]
