"""Inputs of a model's passes over a tree: the step's first two nodes, then each drawn level, then all nodes.

A node i of a tree whose prefix has `length` tokens has the inputs

    token[i], or 0 if it is absent        position = length + depth[i]
    cache row = length + i                parent's row = length + parent[i]         noise row, which is given

In PyTorch operations this is a dozen launches a level on a few numbers each. `place` is one launch. A program for each
sequence writes the drawn tokens into the trees, and gathers the nodes of the next pass; others store the logits.

If siblings are independent draws, two of them may have the same token, and then the same path of tokens. The logits
after both must be equal, because verification treats the children of both as draws from one distribution. So with

    text[i]    the first node of the level whose path from the root has the same tokens as node i's

`alike` returns for each node of a level the node whose logits to use.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportReturnType=false

from typing import NamedTuple

import torch
from torch import Tensor

from heavypath.kernels.implementation import choose_impl, operator
from heavypath.kernels.language import tl, triton
from heavypath.kernels.step_kernels import copy_rows, kernels_by

_BLOCK = tl.constexpr(128)  # nodes that a program reads in one iteration
_LOGITS = 2048  # that a program stores


class NodeInputs(NamedTuple):
    """n nodes of each sequence as input of a forward pass and of a draw after it; LongTensor[B, n] each.

    tokens:      0 for an absent node
    positions:   in the sequence
    cache_rows:  the cache row of each node
    parent_rows: the cache row of each node's parent; for the root it is undefined if all nodes are given
    noise_rows:  the noise row of each node, from which its random numbers come
    """

    tokens: Tensor
    positions: Tensor
    cache_rows: Tensor
    parent_rows: Tensor
    noise_rows: Tensor

    @classmethod
    def of(
        cls, lengths: Tensor, tokens: Tensor, depths: Tensor, nodes: Tensor, parents: Tensor, noise_rows: Tensor
    ) -> "NodeInputs":
        """Compute the formula at the top; lengths LongTensor[B], tokens and noise_rows [B, n], others [B, n] or [n]."""
        before = lengths[:, None]
        return cls(tokens.clamp(min=0), before + depths, before + nodes, before + parents, noise_rows)


class First(NamedTuple):
    """A step's first two nodes: the token before the root, and the root.

    tokens, cache_rows, parent_rows: LongTensor[B, 2]; cache rows equal positions; a parent's row may be -1
    ancestor_mask: bool [B, 2, M], which of the tree's first M nodes they see
    """

    tokens: Tensor
    cache_rows: Tensor
    parent_rows: Tensor
    ancestor_mask: Tensor


class CommonNodes(NamedTuple):
    """n nodes of trees that all have one shape; LongTensor[n] each: node numbers, parents and depths."""

    nodes: Tensor
    parents: Tensor
    depths: Tensor


class Scored(NamedTuple):
    """Logits after some of a tree's nodes, to be stored among those of all nodes.

    logits, of_trees: [B, n, V] and [B, N, V] of one dtype; of_trees is written in place
    rows: LongTensor[n]: the logits i are stored in row rows[i]
    """

    logits: Tensor
    of_trees: Tensor
    rows: Tensor


class Drawn(NamedTuple):
    """The draws for a level: node children[i] of a tree gets token draws[i] of that tree's D tokens.

    tokens:   LongTensor[B, D]
    children: LongTensor[m]
    draws:    LongTensor[m]
    scored:   the logits from which the tokens were drawn, to be stored; None to store none
    """

    tokens: Tensor
    children: Tensor
    draws: Tensor
    scored: Scored | None = None


class Trees(NamedTuple):
    """Trees of N nodes, all of one shape, while they are drafted.

    tokens:     LongTensor[B, N], of the nodes placed so far; -1 for an absent node
    roots:      LongTensor[B], the tokens of the roots, which are placed first
    noise_rows: LongTensor[B, N]
    lengths:    LongTensor[B], tokens before the root
    left:       LongTensor[B], tokens that a sequence may still write; at depth `left` and deeper all nodes are absent
    texts:      LongTensor[B, N], text[i] of the formula at the top, filled level by level; None if siblings differ
    """

    tokens: Tensor
    roots: Tensor
    noise_rows: Tensor
    lengths: Tensor
    left: Tensor
    texts: Tensor | None


def first_nodes(previous: Tensor, root: Tensor, lengths: Tensor, nodes: int) -> First:
    """Return a step's first two nodes. All LongTensor[B]: the token before the root, the root, and its cache row.

    A sequence of one token has none before the root: then both nodes are the root.

    nodes: columns of the mask
    """
    cache_rows = (lengths[:, None] + torch.arange(-1, 1, device=lengths.device)).clamp_(min=0)
    tree_rows = lengths[:, None] + torch.arange(nodes, device=lengths.device)
    return First(
        tokens=torch.stack([previous, root], 1),
        cache_rows=cache_rows,
        parent_rows=cache_rows - 1,
        ancestor_mask=cache_rows[..., None] == tree_rows[:, None],
    )


@operator
def place(
    trees: Trees, drawn: Drawn | None, given: CommonNodes, *, whole: bool = False, impl: str = "auto"
) -> NodeInputs:
    """Write drawn tokens into trees.tokens, in place, and gather the nodes of the model's next pass.

    drawn: None for trees of only the root
    given: the nodes of the next pass: those of one depth, or all nodes
    whole: whether they are all nodes; then those too deep for their sequence become absent
    impl:  see `implementation`; "triton" is one launch. Only the device is checked
    """
    return kernels_by(choose_impl("place", impl, trees.tokens, native=True)).place(trees, drawn, given, whole)


def alike(trees: Trees, given: CommonNodes) -> Tensor:
    """For each node of a level return the index in the level of the first node with the same path: LongTensor[B, n].

    Extends trees.texts to the level, in place.
    """
    assert trees.texts is not None
    above = trees.texts.index_select(1, given.parents)
    token = trees.tokens.index_select(1, given.nodes)
    same = (above[:, :, None] == above[:, None]) & (token[:, :, None] == token[:, None])  # [B, n, n]
    first = same.int().argmax(-1)
    trees.texts.index_copy_(1, given.nodes, given.nodes[first])
    return first


def place_by_torch(trees: Trees, drawn: Drawn | None, given: CommonNodes, whole: bool) -> NodeInputs:
    """Compute `place` in PyTorch."""
    tokens = trees.tokens
    tokens[:, 0] = trees.roots
    if drawn is not None:
        if drawn.scored is not None:
            copy_rows(drawn.scored.logits, drawn.scored.of_trees, drawn.scored.rows)
        tokens.index_copy_(1, drawn.children, drawn.tokens.index_select(1, drawn.draws))
    if whole:
        absent = given.depths > (trees.left[:, None] - 1).clamp(min=0)
        here = tokens.masked_fill_(absent, -1)
        noise_rows = trees.noise_rows
    else:
        here = tokens.index_select(1, given.nodes)
        noise_rows = trees.noise_rows.index_select(1, given.nodes)
    return NodeInputs.of(trees.lengths, here, given.depths, given.nodes, given.parents, noise_rows)


@triton.jit(do_not_specialize=["NODES"])
def _first_kernel(
    previous_ptr,  # [B], as the next two
    root_ptr,
    lengths_ptr,
    tokens_ptr,  # [B, 2], as the next two
    cache_rows_ptr,
    parent_rows_ptr,
    mask_ptr,  # [B, 2, NODES], bytes
    NODES,
    BLOCK: tl.constexpr,
):
    """Each program does one sequence."""
    sequence = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + sequence)
    which = tl.arange(0, 2)
    out = 2 * sequence + which
    row = tl.maximum(length - 1 + which, 0)
    token = tl.where(which == 0, tl.load(previous_ptr + sequence), tl.load(root_ptr + sequence))
    tl.store(tokens_ptr + out, token)
    tl.store(cache_rows_ptr + out, row)
    tl.store(parent_rows_ptr + out, row - 1)
    for start in range(0, NODES, BLOCK):
        node = start + tl.arange(0, BLOCK)
        seen = row[:, None] == length + node[None, :]
        place = out[:, None] * NODES + node[None, :]
        tl.store(mask_ptr + place, seen.to(tl.int8), mask=(which[:, None] < 2) & (node < NODES)[None, :])


@triton.jit
def _store_logits(
    job, logits, of_trees, rows, SCORED, V, logits_b, logits_n, of_trees_b, of_trees_n, LOGITS: tl.constexpr
):
    """Store LOGITS logits after one node; a node has cdiv(V, LOGITS) jobs."""
    blocks = tl.cdiv(V, LOGITS)
    node = job // blocks
    i = node % SCORED
    sequence = (node // SCORED).to(tl.int64)
    token = (job % blocks) * LOGITS + tl.arange(0, LOGITS)
    x = tl.load(logits + sequence * logits_b + i.to(tl.int64) * logits_n + token, mask=token < V, other=0.0)
    to = of_trees + sequence * of_trees_b + tl.load(rows + i) * of_trees_n
    tl.store(to + token, x, mask=token < V)


@triton.jit
def _place_nodes(
    sequence,
    tokens_ptr,
    noise_ptr,
    roots_ptr,
    lengths_ptr,
    left_ptr,
    drawn_ptr,
    children_ptr,
    draws_ptr,
    nodes_ptr,
    parents_ptr,
    depths_ptr,
    fed_tokens_ptr,
    positions_ptr,
    cache_rows_ptr,
    parent_rows_ptr,
    noise_rows_ptr,
    N,
    DRAWS,
    CHILDREN,
    GIVEN,
    HAS_DRAWN: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Place the drawn tokens of one sequence, and gather its nodes; arguments as in `_place_kernel`."""
    tokens_ptr += sequence * N
    noise_ptr += sequence * N
    length = tl.load(lengths_ptr + sequence)
    tl.store(tokens_ptr, tl.load(roots_ptr + sequence))
    if HAS_DRAWN:
        for start in range(0, CHILDREN, BLOCK):
            i = start + tl.arange(0, BLOCK)
            child = tl.load(children_ptr + i, mask=i < CHILDREN, other=0)
            draw = tl.load(draws_ptr + i, mask=i < CHILDREN, other=0)
            token = tl.load(drawn_ptr + sequence * DRAWS + draw, mask=i < CHILDREN, other=0)
            tl.store(tokens_ptr + child, token, mask=i < CHILDREN)
    tl.debug_barrier()  # tokens that other threads have stored are read below
    for start in range(0, GIVEN, BLOCK):
        i = start + tl.arange(0, BLOCK)
        here = i < GIVEN
        node = tl.load(nodes_ptr + i, mask=here, other=0)
        depth = tl.load(depths_ptr + i, mask=here, other=0)
        token = tl.load(tokens_ptr + node, mask=here, other=0, volatile=True)
        if WHOLE:
            room = tl.maximum(tl.load(left_ptr + sequence) - 1, 0)
            token = tl.where(depth <= room, token, -1)
            tl.store(tokens_ptr + node, token, mask=here)
        out = sequence * GIVEN + i
        tl.store(fed_tokens_ptr + out, tl.maximum(token, 0), mask=here)
        tl.store(positions_ptr + out, length + depth, mask=here)
        tl.store(cache_rows_ptr + out, length + node, mask=here)
        tl.store(parent_rows_ptr + out, length + tl.load(parents_ptr + i, mask=here, other=0), mask=here)
        tl.store(noise_rows_ptr + out, tl.load(noise_ptr + node, mask=here, other=0), mask=here)


@triton.jit(do_not_specialize=["N", "DRAWS", "CHILDREN", "GIVEN", "BATCH", "SCORED"])
def _place_kernel(
    tokens_ptr,  # [B, N], in place
    noise_ptr,  # [B, N]
    roots_ptr,  # [B], as the next two
    lengths_ptr,
    left_ptr,
    drawn_ptr,  # [B, DRAWS]; None if CHILDREN is 0
    children_ptr,  # [CHILDREN], as draws_ptr
    draws_ptr,
    nodes_ptr,  # [GIVEN], as parents_ptr and depths_ptr
    parents_ptr,
    depths_ptr,
    fed_tokens_ptr,  # [B, GIVEN], as all below
    positions_ptr,
    cache_rows_ptr,
    parent_rows_ptr,
    noise_rows_ptr,
    logits_ptr,  # [B, SCORED, V]; None if there are none
    of_trees_ptr,  # [B, N, V]
    logit_rows_ptr,  # [SCORED]
    N,
    DRAWS,
    CHILDREN,
    GIVEN,
    BATCH,
    SCORED,
    V,
    logits_b,
    logits_n,
    of_trees_b,
    of_trees_n,
    HAS_DRAWN: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    LOGITS: tl.constexpr,
):
    """The first BATCH programs do one sequence each. Each other one stores LOGITS logits after a node."""
    program = tl.program_id(0)
    if program < BATCH:
        _place_nodes(
            program.to(tl.int64),
            tokens_ptr,
            noise_ptr,
            roots_ptr,
            lengths_ptr,
            left_ptr,
            drawn_ptr,
            children_ptr,
            draws_ptr,
            nodes_ptr,
            parents_ptr,
            depths_ptr,
            fed_tokens_ptr,
            positions_ptr,
            cache_rows_ptr,
            parent_rows_ptr,
            noise_rows_ptr,
            N,
            DRAWS,
            CHILDREN,
            GIVEN,
            HAS_DRAWN,
            WHOLE,
            BLOCK,
        )
    elif logits_ptr is not None:
        _store_logits(
            program - BATCH,
            logits_ptr,
            of_trees_ptr,
            logit_rows_ptr,
            SCORED,
            V,
            logits_b,
            logits_n,
            of_trees_b,
            of_trees_n,
            LOGITS,
        )


@triton.jit(do_not_specialize=["N", "GIVEN"])
def _alike_kernel(
    tokens_ptr,  # [B, N]
    texts_ptr,  # [B, N], in place
    nodes_ptr,  # [GIVEN], as parents_ptr
    parents_ptr,
    first_ptr,  # [B, GIVEN]
    N,
    GIVEN,
    BLOCK: tl.constexpr,
):
    """Each program does a block of a level's nodes of one sequence. Of texts it reads only the level above."""
    sequence = tl.program_id(1).to(tl.int64)
    tokens_ptr += sequence * N
    texts_ptr += sequence * N
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = i < GIVEN
    node = tl.load(nodes_ptr + i, mask=here, other=0)
    token = tl.load(tokens_ptr + node, mask=here, other=0)
    above = tl.load(texts_ptr + tl.load(parents_ptr + i, mask=here, other=0), mask=here, other=0)
    first = i
    for other in range(GIVEN):
        their_token = tl.load(tokens_ptr + tl.load(nodes_ptr + other))
        their_above = tl.load(texts_ptr + tl.load(parents_ptr + other))
        same = (their_token == token) & (their_above == above)
        first = tl.where(same, tl.minimum(first, other), first)
    tl.store(first_ptr + sequence * GIVEN + i, first.to(tl.int64), mask=here)
    tl.store(texts_ptr + node, tl.load(nodes_ptr + first, mask=here, other=0), mask=here)


def launch_first_nodes(previous: Tensor, root: Tensor, lengths: Tensor, nodes: int) -> First:
    """Compute `first_nodes` by the kernel."""
    batch = len(root)
    device = root.device
    tokens, cache_rows, parent_rows = (torch.empty(batch, 2, dtype=torch.long, device=device) for _ in range(3))
    mask = torch.empty(batch, 2, nodes, dtype=torch.bool, device=device)
    with torch.cuda.device_of(root):
        _first_kernel[(batch,)](
            previous_ptr=previous,
            root_ptr=root,
            lengths_ptr=lengths,
            tokens_ptr=tokens,
            cache_rows_ptr=cache_rows,
            parent_rows_ptr=parent_rows,
            mask_ptr=mask.view(torch.int8),
            NODES=nodes,
            BLOCK=_BLOCK.value,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return First(tokens, cache_rows, parent_rows, mask)


def launch_place(trees: Trees, drawn: Drawn | None, given: CommonNodes, whole: bool) -> NodeInputs:
    """Compute `place_by_torch` by the kernel."""
    batch, nodes = trees.tokens.shape
    count = len(given.nodes)
    device = trees.tokens.device
    logits = of_trees = rows = None
    storing = columns = 0
    if drawn is not None and drawn.scored is not None:
        logits, of_trees, rows = drawn.scored
        logits = logits if logits.stride(2) == 1 else logits.contiguous()
        columns = logits.shape[2]
        storing = batch * len(rows) * triton.cdiv(columns, _LOGITS)
    inputs = NodeInputs(*(torch.empty(batch, count, dtype=torch.long, device=device) for _ in NodeInputs._fields))
    with torch.cuda.device_of(trees.tokens):
        _place_kernel[(batch + storing,)](
            tokens_ptr=trees.tokens,
            noise_ptr=trees.noise_rows.contiguous(),
            roots_ptr=trees.roots,
            lengths_ptr=trees.lengths,
            left_ptr=trees.left,
            drawn_ptr=None if drawn is None else drawn.tokens.contiguous(),
            children_ptr=None if drawn is None else drawn.children,
            draws_ptr=None if drawn is None else drawn.draws,
            nodes_ptr=given.nodes,
            parents_ptr=given.parents,
            depths_ptr=given.depths,
            fed_tokens_ptr=inputs.tokens,
            positions_ptr=inputs.positions,
            cache_rows_ptr=inputs.cache_rows,
            parent_rows_ptr=inputs.parent_rows,
            noise_rows_ptr=inputs.noise_rows,
            logits_ptr=logits,
            of_trees_ptr=of_trees,
            logit_rows_ptr=rows,
            N=nodes,
            DRAWS=0 if drawn is None else drawn.tokens.shape[1],
            CHILDREN=0 if drawn is None else len(drawn.children),
            GIVEN=count,
            BATCH=batch,
            SCORED=0 if rows is None else len(rows),
            V=columns,
            logits_b=0 if logits is None else logits.stride(0),
            logits_n=0 if logits is None else logits.stride(1),
            of_trees_b=0 if of_trees is None else of_trees.stride(0),
            of_trees_n=0 if of_trees is None else of_trees.stride(1),
            HAS_DRAWN=drawn is not None,
            WHOLE=whole,
            BLOCK=_BLOCK.value,
            LOGITS=_LOGITS,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return inputs


def launch_alike(trees: Trees, given: CommonNodes) -> Tensor:
    """Compute `alike` by the kernel."""
    batch, nodes = trees.tokens.shape
    count = len(given.nodes)
    first = torch.empty(batch, count, dtype=torch.long, device=trees.tokens.device)
    with torch.cuda.device_of(trees.tokens):
        _alike_kernel[(triton.cdiv(count, _BLOCK.value), batch)](
            tokens_ptr=trees.tokens,
            texts_ptr=trees.texts,
            nodes_ptr=given.nodes,
            parents_ptr=given.parents,
            first_ptr=first,
            N=nodes,
            GIVEN=count,
            BLOCK=_BLOCK.value,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return first
