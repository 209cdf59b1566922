"""The work of a step between forward passes on a CPU: calls of the compiled kernels in steps.cpp.

Arguments and results are those of the references in `trees.levels`, `cache_compaction` and `commit`.
"""

from collections.abc import Sequence
from ctypes import addressof

import torch
from torch import Tensor

from heavypath.kernels.native.recording import Arguments, fields, launch
from heavypath.kernels.nodes import Nodes, Verified
from heavypath.kernels.trees.levels import CommonNodes, Drawn, First, NodeInputs, Trees


class _First(Arguments):
    _fields_ = fields("batch nodes *previous *root *lengths *tokens *cache_rows *parent_rows *mask")


class _Place(Arguments):
    _fields_ = fields(
        "batch given children drawn whole *tokens tokens_step *noise_rows noise_step *roots *lengths *left "
        "*drawn_tokens *child *draw *node *parent *depth *out"
    )


class _Alike(Arguments):
    _fields_ = fields("batch nodes given *tokens *texts *node *parent *first")


class _RowCopies(Arguments):
    _fields_ = fields("batch count row_bytes from_batch from_row to_batch to_row *from_ *to *places")


class _Rows(Arguments):
    _fields_ = fields("*first batch_stride head_stride row_stride row_bytes heads")


class _Compaction(Arguments):
    _fields_ = fields("batch path_length caches *path *length *prefix *cache")


class _Commit(Arguments):
    _fields_ = fields(
        "batch nodes path_length stops branching vocab *numbers number_step *output output_step *stop "
        "*seen seen_step *counts counts_step *tokens *parents *ranks *depths tree_step *path *length *after"
    )


def first_nodes(previous: Tensor, root: Tensor, lengths: Tensor, nodes: int) -> First:
    """Return a step's first two nodes."""
    batch = len(root)
    tokens, cache_rows, parent_rows = torch.empty(3, batch, 2, dtype=torch.long, device="cpu").unbind()
    mask = torch.empty(batch, 2, nodes, dtype=torch.bool, device="cpu")
    call = _First(batch, nodes, previous, root, lengths, tokens, cache_rows, parent_rows, mask)
    launch("first_nodes", call)
    return First(tokens, cache_rows, parent_rows, mask)


def place(trees: Trees, drawn: Drawn | None, given: CommonNodes, whole: bool) -> NodeInputs:
    """Write drawn tokens into the trees, in place, and return the nodes of the next pass."""
    tokens, _, noise_rows, *_ = trees
    roots, lengths, left = (each.contiguous() for each in (trees.roots, trees.lengths, trees.left))
    batch = len(tokens)
    drawn_tokens = child = draw = None
    if drawn is not None:
        drawn_tokens, child, draw = (each.contiguous() for each in drawn[:3])
        if drawn.scored is not None:
            copy_rows(drawn.scored.logits, drawn.scored.of_trees, drawn.scored.rows)
    node, parent, depth = (each.contiguous() for each in given)
    out = torch.empty(5, batch, node.shape[0], dtype=torch.long, device="cpu")
    noise_rows = noise_rows if noise_rows.stride(1) == 1 else noise_rows.contiguous()
    call = _Place(
        batch,
        node.shape[0],
        0 if child is None else child.shape[0],
        0 if drawn_tokens is None else drawn_tokens.shape[1],
        whole,
        tokens,
        tokens.stride(0),
        noise_rows,
        noise_rows.stride(0),
        roots,
        lengths,
        left,
        drawn_tokens,
        child,
        draw,
        node,
        parent,
        depth,
        out,
    )
    launch("place", call)
    return NodeInputs(*out.unbind())


def alike(trees: Trees, given: CommonNodes) -> Tensor:
    """For each node of a level, return the first node with the same path of tokens, LongTensor[B, n]."""
    (tokens, *_, texts) = trees
    node, parent, _ = given
    count = node.shape[0]
    first = torch.empty(len(tokens), count, dtype=torch.long, device="cpu")
    call = _Alike(*tokens.shape, count, tokens, texts, node, parent, first)
    launch("alike", call)
    return first


def copy_rows(rows: Tensor, to: Tensor, places: Tensor) -> None:
    """Set to[b, places[i]] = rows[b, i], for rows [B, n, V] and to [B, N, V] of one dtype with contiguous columns.

    places: LongTensor[n], below N, which is not checked. This takes half the time of PyTorch's `index_copy_`.

    Raises ValueError for tensors that do not fit: other memory would be overwritten.
    """
    size = rows.element_size()
    batch, count, vocab = rows.shape
    fits = to.dtype == rows.dtype and to.shape[0] == batch and to.shape[2] == vocab and places.shape[0] == count
    if not fits or rows.stride(2) != 1 or to.stride(2) != 1:
        given = [f"{each.dtype} {[*each.shape]} with strides {each.stride()}" for each in (rows, to)]
        raise ValueError(
            "copy_rows needs rows [B, n, V] and [B, N, V] of one type, with a last stride of 1, and n places; "
            f"got {' and '.join(given)}, and {places.shape[0]} places"
        )
    call = _RowCopies(
        batch,
        count,
        vocab * size,
        rows.stride(0) * size,
        rows.stride(1) * size,
        to.stride(0) * size,
        to.stride(1) * size,
        rows,
        to,
        places,
    )
    launch("copy_rows", call)


def compact(caches: Sequence[Tensor], path: Tensor, length: Tensor, prefix_length: Tensor) -> None:
    """Move the accepted rows of caches [B, heads, rows, D] to the prefix's end, in place."""
    if any(cache.stride(3) != 1 for cache in caches):  # then each column is moved alone
        caches = [numbers[..., None] for cache in caches for numbers in cache.unbind(3)]
    rows = (_Rows * len(caches))()
    for own, cache in zip(rows, caches, strict=True):
        size = cache.element_size()
        batch_stride, head_stride, row_stride, _ = cache.stride()
        own.first = cache.data_ptr()
        own.heads = cache.shape[1]
        own.row_bytes = cache.shape[3] * size
        own.batch_stride = size * batch_stride
        own.head_stride = size * head_stride
        own.row_stride = size * row_stride
    call = _Compaction(
        *path.shape, len(caches), path.contiguous(), length.contiguous(), prefix_length.contiguous(), addressof(rows)
    )
    call.kept += rows, caches
    launch("compact", call)


def commit(
    state: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    nodes: Nodes,
    depths: Tensor,
    verified: Verified,
    branching: int,
) -> None:
    """Commit verified trees: update the tensors of a `State` in place."""
    numbers, output, stops, seen, counts = state
    batch, count = nodes.tokens.shape
    assert nodes.ranks is not None
    shapes = [nodes.parents, nodes.ranks, depths]
    one_shape = all(each.dim() == 1 for each in shapes)
    if not one_shape:
        shapes = [each.expand(batch, -1) for each in shapes]
    parents, ranks, depths = (each.contiguous() for each in shapes)
    path, length, after = (each.contiguous() for each in verified)
    call = _Commit(
        batch,
        count,
        path.shape[1],
        stops.shape[0],
        branching,
        seen.shape[1],
        numbers,
        numbers.stride(0),
        output,
        output.stride(0),
        stops.contiguous(),
        seen,
        seen.stride(0),
        counts,
        counts.stride(0),
        nodes.tokens.contiguous(),
        parents,
        ranks,
        depths,
        0 if one_shape else count,
        path,
        length,
        after,
    )
    launch("commit", call)
