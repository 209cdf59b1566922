"""Kernels of `levels`: the step's first two nodes, the placing of a level, and nodes whose paths have equal tokens.

Placing is one launch. A program for each sequence writes the drawn tokens into the trees, and gathers the nodes of the
next pass; others store the logits that the tokens were drawn from.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportReturnType=false

import torch
from torch import Tensor

from heavypath.kernels.implementation import in_rows
from heavypath.kernels.language import tl, triton
from heavypath.kernels.trees.levels import CommonNodes, Drawn, First, NodeInputs, Trees

_BLOCK = tl.constexpr(128)  # nodes that a program reads in one iteration
_LOGITS = 2048  # that a program stores


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


@triton.jit(do_not_specialize=["N", "DRAWS", "CHILDREN", "GIVEN", "BATCH", "SCORED", "tokens_b"])
def _place_kernel(
    tokens_ptr,  # [B, N], in place, rows tokens_b apart
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
    tokens_b,
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
        sequence = program.to(tl.int64)
        tokens_ptr += sequence * tokens_b
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
            tl.store(noise_rows_ptr + out, tl.load(noise_ptr + sequence * N + node, mask=here, other=0), mask=here)
    elif logits_ptr is not None:
        blocks = tl.cdiv(V, LOGITS)  # programs for each node
        scored = (program - BATCH) // blocks
        logits_ptr += (scored // SCORED).to(tl.int64) * logits_b + (scored % SCORED).to(tl.int64) * logits_n
        row = tl.load(logit_rows_ptr + scored % SCORED)
        of_trees_ptr += (scored // SCORED).to(tl.int64) * of_trees_b + row * of_trees_n
        column = (program - BATCH) % blocks * LOGITS + tl.arange(0, LOGITS)
        tl.store(of_trees_ptr + column, tl.load(logits_ptr + column, mask=column < V, other=0.0), mask=column < V)


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
    sequence = tl.program_id(0).to(tl.int64)
    tokens_ptr += sequence * N
    texts_ptr += sequence * N
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
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


def first_nodes(previous: Tensor, root: Tensor, lengths: Tensor, nodes: int) -> First:
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


def place(trees: Trees, drawn: Drawn | None, given: CommonNodes, whole: bool) -> NodeInputs:
    """Compute `place_by_torch` by the kernel."""
    batch, nodes = trees.tokens.shape
    count = len(given.nodes)
    device = trees.tokens.device
    drawn_tokens = children = draws = logits = of_trees = rows = None
    storing = columns = 0
    if drawn is not None:
        drawn_tokens, children, draws = (each.contiguous() for each in drawn[:3])
        if drawn.scored is not None:
            logits, of_trees, rows = drawn.scored
            logits = in_rows(logits)
            rows = rows.contiguous()
            columns = logits.shape[2]
            storing = batch * len(rows) * triton.cdiv(columns, _LOGITS)
    inputs = NodeInputs(*(torch.empty(batch, count, dtype=torch.long, device=device) for _ in NodeInputs._fields))
    with torch.cuda.device_of(trees.tokens):
        _place_kernel[(batch + storing,)](
            tokens_ptr=trees.tokens,
            noise_ptr=trees.noise_rows.contiguous(),
            roots_ptr=trees.roots.contiguous(),
            lengths_ptr=trees.lengths.contiguous(),
            left_ptr=trees.left.contiguous(),
            drawn_ptr=drawn_tokens,
            children_ptr=children,
            draws_ptr=draws,
            nodes_ptr=given.nodes.contiguous(),
            parents_ptr=given.parents.contiguous(),
            depths_ptr=given.depths.contiguous(),
            fed_tokens_ptr=inputs.tokens,
            positions_ptr=inputs.positions,
            cache_rows_ptr=inputs.cache_rows,
            parent_rows_ptr=inputs.parent_rows,
            noise_rows_ptr=inputs.noise_rows,
            logits_ptr=logits,
            of_trees_ptr=of_trees,
            logit_rows_ptr=rows,
            N=nodes,
            DRAWS=0 if drawn_tokens is None else drawn_tokens.shape[1],
            CHILDREN=0 if children is None else len(children),
            GIVEN=count,
            BATCH=batch,
            SCORED=0 if rows is None else len(rows),
            V=columns,
            tokens_b=trees.tokens.stride(0),
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


def alike(trees: Trees, given: CommonNodes) -> Tensor:
    """Compute `alike` by the kernel."""
    batch, nodes = trees.tokens.shape
    count = len(given.nodes)
    first = torch.empty(batch, count, dtype=torch.long, device=trees.tokens.device)
    with torch.cuda.device_of(trees.tokens):
        _alike_kernel[(batch, triton.cdiv(count, _BLOCK.value))](
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
