"""How an entry of an EAGLE head begins and ends: what its layers are given, and what is kept of their output.

    begin   [norm_e(E[token]); norm_f(f)], and f itself         f: a row [F] of a field of states, E: [V, E]
    end     h = x + a;  kept[row] = h;  norm(h)                 x, a: [H]

An entry is stored a row before its token, at a position one lower, since it was computed from the token before, too.
Without a token before the sequence's first one, that is at the row and the position of the token itself. With L the
number of tokens before the tree's root, rows and positions are so min(L, 1) less than the nodes'. PyTorch takes eleven
operations for the begin of an entry, and three for its end; the kernels are a launch each. They round where `rms_norm`
does. Source of the entries: Li et al. 2025, "EAGLE-3", section 3.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from heavypath.kernels.attention.masks import PackedAncestors, pack_row
from heavypath.kernels.implementation import choose_impl, in_rows
from heavypath.kernels.language import tl, triton
from heavypath.kernels.layers.rms_norm import MAX_COLUMNS, Norm, add_rms_norm, normalized
from heavypath.kernels.layers.rotary import store_rows
from heavypath.kernels.layers.rounding import rounded


class EntryNodes(NamedTuple):
    """n drafted nodes of each sequence, as a model would be given them; LongTensors [B, n], lengths [B].

    parents: the rows of the nodes' parents
    lengths: the number of tokens before each root
    mask:    bool [n, M] or [B, n, M], which nodes each node sees
    """

    tokens: Tensor
    rows: Tensor
    positions: Tensor
    parents: Tensor
    lengths: Tensor
    mask: Tensor


class Inputs(NamedTuple):
    """What the layers of a head begin with.

    states: [B * n, F], the features, normed only if that was requested
    joined: [B * n, E + F], embeddings and features after their norms
    """

    states: Tensor
    joined: Tensor


class NodeEntries(NamedTuple):
    """The entries of n nodes of each sequence.

    rows, positions: LongTensor[B, n]
    before:    LongTensor[B], the number of entries before the tree
    ancestors: the nodes' mask, which the kernel packs
    inputs:    of the head's layers
    """

    rows: Tensor
    positions: Tensor
    before: Tensor
    ancestors: PackedAncestors | Tensor
    inputs: Inputs


class EntryNorms(NamedTuple):
    """RMS norms of embeddings and of features; None for none. keeps_normed: whether `states` are normed, too."""

    embedded: Norm | None
    features: Norm | None
    keeps_normed: bool = False


def entry_inputs(
    features: Tensor,
    tokens: Tensor | None,
    table: Tensor,
    norms: EntryNorms,
    *,
    features_first: bool = False,
    impl: str = "auto",
) -> Inputs:
    """The inputs of entries of features [B, n, F].

    tokens: LongTensor[B, n], rows of the table [V, E]; None if row i of the table, [B * n, E], is entry i's
    features_first: whether features are before embeddings in `joined`
    impl:   see `implementation`; "triton" supports fp32, fp16 and bf16
    """
    if choose_impl("entry_inputs", impl, features) == "triton":
        return _launch_begin(features, tokens, table, norms, None, features_first=features_first)[0]
    states = features.flatten(0, 1)
    embedded = table if tokens is None else embedding(tokens.flatten(), table)
    normed = _normed(states, norms.features)
    both = [_normed(embedded, norms.embedded), normed]
    return Inputs(normed if norms.keeps_normed else states, torch.cat(both[::-1] if features_first else both, -1))


def node_entries(
    outputs: Tensor, nodes: EntryNodes, table: Tensor, norms: EntryNorms, *, impl: str = "auto", looked_up: bool = True
) -> NodeEntries:
    """The entries of drafted nodes, whose features are their parents' outputs [B, S, F].

    looked_up: whether the table [V, E] is to be read at the nodes' tokens; else row i of it, [B * n, E], is entry i's
    impl:      see `implementation`; "triton" is one launch, and does not check rows
    """
    tokens = nodes.tokens if looked_up else None
    if choose_impl("node_entries", impl, outputs) == "triton":
        inputs, entries = _launch_begin(outputs, tokens, table, norms, nodes)
        assert entries is not None
        return entries
    before = (nodes.lengths - 1).clamp(min=0)
    shift = (nodes.lengths - before)[:, None]
    parents = (nodes.parents - shift)[..., None].expand(-1, -1, outputs.shape[-1])
    inputs = entry_inputs(outputs.gather(1, parents), tokens, table, norms, impl="torch")
    return NodeEntries(nodes.rows - shift, nodes.positions - shift, before, nodes.mask, inputs)


def end_entries(
    hidden: Tensor,
    added: Tensor,
    norm: Norm | None,
    outputs: Tensor,
    rows: Tensor,
    *,
    keeps_normed: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Store hidden + added in outputs [B, S, H] at rows LongTensor[B, n], and return its norm, [B * n, H].

    hidden, added: [B * n, H]
    norm:          None to return the sum itself; keeps_normed: whether the norm is stored in place of the sum
    impl:          see `implementation`; "triton" supports fp32, fp16 and bf16, and does not check rows
    """
    if choose_impl("end_entries", impl, hidden) == "triton":
        return _launch_end(hidden, added, norm, outputs, rows, keeps_normed)
    total = hidden + added
    normed = None
    if norm is not None:
        total, normed = add_rms_norm(hidden, added, norm, impl="torch")
    normed = total if normed is None else normed
    kept = normed if keeps_normed else total
    store_rows(outputs[:, None], kept.view(*rows.shape, 1, kept.shape[-1]), rows)
    return normed


def _normed(states: Tensor, norm: Norm | None) -> Tensor:
    return states if norm is None else normalized(states, norm)


@triton.jit
def _unit(x, weight, epsilon, column, like, COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr):
    """The RMS norm of a row x if there is a weight, rounded as in `rms_norm`."""
    if weight is not None:
        w = tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x) / COLUMNS + epsilon)
        x = rounded(w * rounded(x * scale, like, INTERPRETED), like, INTERPRETED)
    return x


@triton.jit(do_not_specialize=["nodes", "mask_b", "seen"])
def _begin_kernel(
    features,  # [B, any, FEATURES]
    tokens,  # [B, n], or None
    table,  # [any, EMBEDDED]
    embedded_weight,  # [EMBEDDED], or None
    feature_weight,  # [FEATURES], or None
    embedded_epsilon,
    feature_epsilon,
    parents,  # [B, n] if PLACED, as the next two
    rows,
    positions,
    lengths,  # [B] if PLACED
    mask,  # bytes [n, seen] or [B, n, seen] if PLACED
    out_rows,  # [B, n] if PLACED, as the next one
    out_positions,
    before,  # [B] if PLACED
    words,  # [n, any] or [B, n, any] if PLACED
    states,  # [B * n, FEATURES]
    joined,  # [B * n, EMBEDDED + FEATURES]
    nodes,
    seen,
    mask_b,
    feature_b,
    feature_s,
    table_s,
    EMBEDDED: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEPS_NORMED: tl.constexpr,
    PLACED: tl.constexpr,
    FEATURES_FIRST: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Each program does an entry."""
    entry = tl.program_id(0).to(tl.int64)
    sequence = entry // nodes
    parent = entry % nodes
    column = tl.arange(0, BLOCK)
    if PLACED:
        shift = tl.minimum(tl.load(lengths + sequence), 1)
        parent = tl.load(parents + entry) - shift
        tl.store(out_rows + entry, tl.load(rows + entry) - shift)
        tl.store(out_positions + entry, tl.load(positions + entry) - shift)
        if entry % nodes == 0:
            tl.store(before + sequence, tl.load(lengths + sequence) - shift)
        if (mask_b > 0) | (sequence == 0):
            node = entry % nodes
            line = tl.where(mask_b > 0, entry, node)
            pack_row(mask + sequence * mask_b + node * seen, words + line * (tl.cdiv(seen, 64) * 2), seen)
    row = entry
    if tokens is not None:
        row = tl.load(tokens + entry)
    joined += entry * (EMBEDDED + FEATURES)
    x = tl.load(table + row * table_s + column, mask=column < EMBEDDED, other=0.0).to(tl.float32)
    x = _unit(x, embedded_weight, embedded_epsilon, column, joined, EMBEDDED, INTERPRETED)
    tl.store(joined + (FEATURES if FEATURES_FIRST else 0) + column, x, mask=column < EMBEDDED)
    at = features + sequence * feature_b + parent * feature_s + column
    f = tl.load(at, mask=column < FEATURES, other=0.0).to(tl.float32)
    normed = _unit(f, feature_weight, feature_epsilon, column, joined, FEATURES, INTERPRETED)
    tl.store(joined + (0 if FEATURES_FIRST else EMBEDDED) + column, normed, mask=column < FEATURES)
    tl.store(states + entry * FEATURES + column, normed if KEEPS_NORMED else f, mask=column < FEATURES)


@triton.jit(do_not_specialize=["nodes", "rows_b", "rows_n"])
def _end_kernel(
    hidden,
    added,
    weight,
    outputs,
    rows,
    normed,
    nodes,
    rows_b,
    rows_n,
    output_b,
    output_s,
    epsilon,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEPS_NORMED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Each program does an entry."""
    entry = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    at = entry * COLUMNS + column
    row = tl.load(rows + (entry // nodes) * rows_b + (entry % nodes) * rows_n)
    x = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
    x = rounded(x + tl.load(added + at, mask=inside, other=0.0).to(tl.float32), normed, INTERPRETED)
    n = _unit(x, weight, epsilon, column, normed, COLUMNS, INTERPRETED)
    kept = outputs + (entry // nodes) * output_b + row * output_s + column
    tl.store(kept, n if KEEPS_NORMED else x, mask=inside)
    tl.store(normed + at, n, mask=inside)


def _launch_begin(
    features: Tensor,
    tokens: Tensor | None,
    table: Tensor,
    norms: EntryNorms,
    nodes: EntryNodes | None,
    *,
    features_first: bool = False,
) -> tuple[Inputs, NodeEntries | None]:
    """Launch the kernel of `entry_inputs`; with nodes that of `node_entries`, and return rows and masks, too."""
    batch, count = features.shape[:2] if nodes is None else nodes.tokens.shape
    width = table.shape[-1]
    columns = features.shape[-1]
    _check(features, table, *(each and each.weight for each in (norms.embedded, norms.features)))
    features = in_rows(features)
    table = in_rows(table)
    states = features.new_empty(batch * count, columns)
    joined = features.new_empty(batch * count, width + columns)
    (embedded_weight, embedded_epsilon), (feature_weight, feature_epsilon) = (
        (None, 0.0) if each is None else (each.weight.contiguous(), each.epsilon)
        for each in (norms.embedded, norms.features)
    )
    rows = positions = before = words = mask = None
    if nodes is not None:
        nodes = EntryNodes._make(each.contiguous() for each in nodes)
        rows, positions = (torch.empty_like(nodes.tokens) for _ in range(2))
        before = torch.empty_like(nodes.lengths)
        mask = nodes.mask
        words = mask.new_empty((*mask.shape[:-1], 2 * triton.cdiv(mask.shape[-1], 64)), dtype=torch.int32)
    block = triton.next_power_of_2(max(width, columns))
    if batch * count:
        with torch.cuda.device_of(features):
            _begin_kernel[(batch * count,)](
                features,
                None if tokens is None else tokens.contiguous(),
                table,
                embedded_weight,
                feature_weight,
                embedded_epsilon,
                feature_epsilon,
                None if nodes is None else nodes.parents,
                None if nodes is None else nodes.rows,
                None if nodes is None else nodes.positions,
                None if nodes is None else nodes.lengths,
                None if mask is None else mask.view(torch.int8),
                rows,
                positions,
                before,
                words,
                states,
                joined,
                count,
                0 if mask is None else mask.shape[-1],
                mask.stride(0) if mask is not None and mask.dim() == 3 else 0,
                features.stride(0),
                features.stride(1),
                table.stride(0),
                EMBEDDED=width,
                FEATURES=columns,
                BLOCK=block,
                KEEPS_NORMED=norms.keeps_normed,
                PLACED=nodes is not None,
                FEATURES_FIRST=features_first,
                INTERPRETED=not features.is_cuda,
                num_warps=min(32, max(4, block // 512)),
                enable_fp_fusion=False,
            )
    inputs = Inputs(states, joined)
    if rows is None or positions is None or before is None or words is None or mask is None:
        return inputs, None
    return inputs, NodeEntries(rows, positions, before, PackedAncestors(words, mask.shape[-1]), inputs)


def _launch_end(
    hidden: Tensor, added: Tensor, norm: Norm | None, outputs: Tensor, rows: Tensor, keeps_normed: bool
) -> Tensor:
    """Launch the kernel of `end_entries`."""
    count, columns = hidden.shape
    _check(hidden, added, outputs, None if norm is None else norm.weight)
    if outputs.stride(-1) != 1 or added.shape != hidden.shape or rows.numel() != count:
        got = f"{[*hidden.shape]}, {[*added.shape]}, {[*rows.shape]}, outputs of strides {[*outputs.stride()]}"
        raise ValueError(f"hidden and added must be [B * n, H], rows [B, n], outputs of contiguous columns; got {got}")
    normed = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    block = triton.next_power_of_2(columns)
    if count:
        with torch.cuda.device_of(hidden):
            _end_kernel[(count,)](
                hidden.contiguous(),
                added.contiguous(),
                None if norm is None else norm.weight.contiguous(),
                outputs,
                rows,
                normed,
                rows.shape[1],
                rows.stride(0),
                rows.stride(1),
                outputs.stride(0),
                outputs.stride(1),
                0.0 if norm is None else norm.epsilon,
                COLUMNS=columns,
                BLOCK=block,
                KEEPS_NORMED=keeps_normed,
                INTERPRETED=not hidden.is_cuda,
                num_warps=min(32, max(4, block // 512)),
                enable_fp_fusion=False,
            )
    return normed


def _check(first: Tensor, *others: Tensor | None) -> None:
    """Raise ValueError for tensors of several dtypes, or of one or a width that the kernels do not support."""
    given = [first, *(each for each in others if each is not None)]
    alike = {each.dtype for each in given} == {first.dtype}
    if (
        not alike
        or first.dtype not in (torch.float32, torch.float16, torch.bfloat16)
        or any(each.shape[-1] > MAX_COLUMNS for each in given)
    ):
        got = [(str(each.dtype), [*each.shape]) for each in given]
        raise ValueError(
            f"impl 'triton' takes tensors of one dtype, float32, float16 or bfloat16, of at most {MAX_COLUMNS} "
            f"columns; got {got}"
        )
