"""Trained heads on a CPU, by heads.cpp: inputs of a head's passes, features kept of the target, Medusa heads."""

from collections.abc import Sequence
from ctypes import addressof, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from heavypath.kernels.layers.rms_norm import Norm
from heavypath.kernels.native.library import thread_count
from heavypath.kernels.native.products import TYPES, Blocks, NormStruct, WeightStruct
from heavypath.kernels.native.recording import Arguments, fields, launch


class _RootEntries(Arguments):
    _fields_ = fields(
        "batch most rows row_bytes *root *lengths *drafted *known *text *features *outputs text_step features_step "
        "outputs_step *present *tokens *entry_rows *prefix *mask *given"
    )


class _NodeEntries(Arguments):
    _fields_ = fields(
        "batch count row_bytes *lengths *cache_rows *positions *parent_rows *outputs outputs_step *prefix *rows "
        "*places *given"
    )


class _Keep(Arguments):
    _fields_ = (
        *fields("batch nodes taps width columns *tap *norm"),
        ("joined", NormStruct),
        ("fc", WeightStruct),
        *fields("*tokens *cache_rows *features features_step *text text_step *scratch threads"),
    )


class _Medusa(Arguments):
    _fields_ = fields(
        "batch heads layers width vocab *layer layer_step *lm_head lm_head_step *lengths *states states_step *logits "
        "logits_step *scratch threads"
    )


class Entries(NamedTuple):
    """The inputs of one pass of a head: n entries of each sequence.

    tokens, positions, rows: LongTensor[B, n]
    prefix: LongTensor[B], cache rows before the columns of the mask
    mask:   bool [B, n, M] or [n, M]
    given:  [B, n, F], features or states that are read with the tokens
    present: LongTensor[1], the n in use now: the first B * n rows of each tensor are; None if all are
    """

    tokens: Tensor
    positions: Tensor
    rows: Tensor
    prefix: Tensor
    mask: Tensor
    given: Tensor
    present: Tensor | None = None


class Kept(NamedTuple):
    """What a head keeps of B sequences: the tensors of a `HeadCache`.

    features: [B, rows, F]; outputs: [B, rows, H]; tokens: LongTensor[B, rows]; known: LongTensor[B]
    """

    features: Tensor
    outputs: Tensor
    tokens: Tensor
    known: Tensor


def root_entries(root: Tensor, lengths: Tensor, drafted: Tensor | None, most: int, kept: Kept) -> Entries:
    """Entries for all tokens that the head has not read yet, up to the roots (LongTensor[B]).

    lengths: tokens before the roots; most: entries of a sequence, at most; `kept.known` is changed in place
    """
    features, outputs, text, known = kept
    batch = len(root)
    size = features.element_size()
    tokens, rows = torch.empty(2, batch * most, dtype=torch.long, device="cpu").unbind()
    prefix = tokens.new_empty(batch)
    present = tokens.new_empty(1)
    mask = tokens.new_empty(batch, most, most, dtype=torch.bool)
    given = features.new_empty(batch, most, features.shape[2])
    call = _RootEntries(
        batch,
        most,
        features.shape[1],
        size * features.shape[2],
        root.contiguous(),
        lengths.contiguous(),
        None if drafted is None else drafted.contiguous(),
        known,
        text,
        features,
        outputs,
        text.stride(0),
        size * features.stride(0),
        size * outputs.stride(0),
        present,
        tokens,
        rows,
        prefix,
        mask,
        given,
    )
    launch("root_entries", call)
    tokens = tokens.view(batch, most)
    rows = rows.view(batch, most)
    return Entries(tokens, rows, rows, prefix, mask, given, present)


def node_entries(nodes: tuple[Tensor, Tensor, Tensor], lengths: Tensor, outputs: Tensor) -> tuple[Tensor, ...]:
    """Positions, rows, prefix and given states for entries of drafted nodes, as in `Entries`.

    nodes: positions, cache rows and parents' rows of the nodes, LongTensor[B, n] each
    outputs: [B, rows, H]
    """
    positions, cache_rows, parent_rows = (each.contiguous() for each in nodes)
    batch, count = positions.shape
    size = outputs.element_size()
    rows, places = torch.empty(2, batch, count, dtype=torch.long, device="cpu").unbind()
    prefix = rows.new_empty(batch)
    given = outputs.new_empty(batch, count, outputs.shape[2])
    call = _NodeEntries(
        batch,
        count,
        size * outputs.shape[2],
        lengths.contiguous(),
        cache_rows,
        positions,
        parent_rows,
        outputs,
        size * outputs.stride(0),
        prefix,
        rows,
        places,
        given,
    )
    launch("node_entries", call)
    return places, rows, prefix, given


def keep(
    taps: Sequence[Tensor],
    norms: tuple[Sequence[Norm | None], Norm | None],
    fc: Blocks | None,
    tokens: Tensor,
    cache_rows: Tensor,
    to: tuple[Tensor, Tensor | None],
) -> None:
    """Store a head's features of hidden states [B, N, H] of tokens LongTensor[B, N]: normed, concatenated, projected.

    norms: a norm (or None) for each tap, and one for their concatenation
    fc:    the projection whose product is stored; None to store the concatenation
    to:    features [B, rows, F] and, if tokens are kept, LongTensor[B, rows]
    """
    (features, text), (each, joined), taps = to, norms, [each.contiguous() for each in taps]
    batch, nodes, width = taps[0].shape
    places = (c_void_p * len(taps))(*(tap.data_ptr() for tap in taps))
    structures = (NormStruct * len(taps))()
    for own, norm in zip(structures, each, strict=True):
        own.take(norm)
    call = _Keep(
        batch,
        nodes,
        len(taps),
        width,
        features.shape[2],
        addressof(places),
        addressof(structures),
        tokens=tokens.contiguous(),
        cache_rows=cache_rows.contiguous(),
        features=features,
        features_step=features.stride(0),
        text=text,
        text_step=0 if text is None else text.stride(0),
        scratch=torch.empty(batch * nodes * len(taps) * width, dtype=torch.float32, device="cpu"),
        threads=thread_count(0 if fc is None else fc.weight.nbytes),
    )
    call.joined.take(joined)
    if fc is not None:
        call.fc = fc.struct
    call.kept += taps, places, structures, norms, fc
    launch(f"keep_{TYPES[features.dtype]}", call)


class MedusaWeights(NamedTuple):
    """Weights of Medusa heads: `layers[j][k]` of layer j and head k, and an lm_head for each head, or one for all."""

    layers: Sequence[Sequence[Blocks]]
    lm_heads: Sequence[Blocks]


def medusa(weights: MedusaWeights, states: Tensor, lengths: Tensor, heads: int, logits: Tensor) -> None:
    """Write the logits of the first `heads` Medusa heads into `logits` [B, any, V].

    states: [B, rows, H]; each sequence's row lengths - 1 is read, or zeros if its length is 0
    """
    layers = weights.layers
    batch, _, width = states.shape
    vocab = logits.shape[2]
    every = [blocks for layer in layers for blocks in layer]
    structures = (WeightStruct * len(every))(*(blocks.struct for blocks in every))
    lm_heads = (WeightStruct * len(weights.lm_heads))(*(blocks.struct for blocks in weights.lm_heads))
    read = sum(blocks.weight.nbytes for layer in layers for blocks in layer[:heads])
    call = _Medusa(
        batch,
        heads,
        len(layers),
        width,
        vocab,
        addressof(structures),
        len(layers[0]) if layers else 0,
        addressof(lm_heads),
        int(len(lm_heads) > 1),
        lengths.contiguous(),
        states,
        states.stride(0),
        logits,
        logits.stride(0),
        torch.empty(2 * heads * batch * width, dtype=torch.float32, device="cpu"),
        thread_count(read + weights.lm_heads[0].weight.nbytes),
    )
    call.kept += weights, structures, lm_heads
    launch(f"medusa_{TYPES[states.dtype]}", call)
