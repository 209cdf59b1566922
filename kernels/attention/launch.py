"""Launches of the kernel of `tree_attention`. A cached plan holds tiles, splits and all else that follows from shapes.

Without a CUDA graph a model calls attention for each layer of each token, so the host's time counts. Checks, tile
selection and Triton's variant lookup would take most of it. They depend on the layouts of tensors, not on addresses and
values, so all layers of a forward pass share a plan.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from heavypath.kernels.attention.kernel import MIN_SPLIT, tree_attention_kernel
from heavypath.kernels.attention.layouts import Layouts, is_in_place
from heavypath.kernels.attention.masks import Visible
from heavypath.kernels.attention.variant import Launch, current_stream, variant_of
from heavypath.kernels.tickets import tickets

_ROOMY = (9, 10)


class Tiles(NamedTuple):
    """Block sizes, warps and pipeline stages of a launch."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def tiles_for(dtype: torch.dtype, head_dim: int, rows: int, capped: bool, generation: int) -> Tiles:
    """Choose tiles that do not spill, keep two blocks of keys in flight, and from 64 query rows on can use wgmma.

    rows:       query rows per key head
    capped:     whether there is a soft cap, which takes registers
    generation: 9 (Hopper) and 10 (data-centre Blackwell) have 227 KB of shared memory, and matrix instructions that
                read operands from it
    """
    roomy = generation in _ROOMY
    if dtype == torch.float32:  # exact products, which do not use tensor cores
        return Tiles(16 if rows <= 16 or head_dim > 128 else 32, 32, 8 if head_dim <= 64 else 16, 2)
    if rows <= 16:
        return Tiles(16, 64 if head_dim <= 128 else 32, 4, 3)
    if head_dim > 128:
        return Tiles(128 if generation == 9 and rows > 64 else 64, 32, 8, 3) if roomy else Tiles(32, 32, 4, 2)
    if head_dim <= 32:
        return Tiles(64, 64, 4, 3)
    if head_dim > 64 and not roomy:
        return Tiles(64, 64, 8, 3)
    return Tiles(64, 64, 4, 3) if rows <= 64 else Tiles(128, 32 if capped else 64, 8, 3)


class LaunchPlan(NamedTuple):
    """Everything about a launch that follows from the layouts of its tensors; called, it launches.

    All layers of a forward pass share it.

    in_place:     whether the kernel can read query, key and value without a copy, if their addresses are aligned
    out:          shape of the output
    parts, tiles: sizes of the buffers of partial results and of tickets; 0 if the prefix is not split
    attend:       the launch
    """

    in_place: bool
    out: tuple[int, int, int, int]
    parts: int
    tiles: int
    attend: Launch

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, visible: Visible, softcap: float | None, scale: float
    ) -> Tensor:
        """Launch the kernel of `tree_attention` with checked arguments; returns [B, N, Hq, D]."""
        stream = None
        on_gpu = query.is_cuda
        if on_gpu:
            device = query.get_device()
            if device != torch.cuda.current_device():
                with torch.cuda.device_of(query):
                    return self(query, key, value, visible, softcap, scale)
            stream = current_stream(device)
        length, lengths, ends, _, _, first_row, window, _ = visible
        words = counts = None
        if visible.ancestors is not None:
            packed = visible.packed()
            words = packed.words.contiguous()
            counts = None if packed.counts is None else packed.counts.contiguous()
        elif ends is not None:
            ends = ends.contiguous()
            counts = None if window is None else visible.path_lengths()
        if first_row is not None:
            first_row = first_row.contiguous()
        batch, queries, heads, head_dim = self.out
        out = query.new_empty(batch, queries, heads, head_dim)  # PyTorch parses four numbers faster than a tuple
        if not on_gpu:
            out = out.float()  # Triton's interpreter truncates float32 to bfloat16 and gets bfloat16 dots wrong
        parts = counters = None
        if self.parts:
            parts = query.new_empty(self.parts, dtype=torch.float32)
            counters = tickets(self.tiles, query.device)
        self.attend(
            stream,
            (
                query,
                key,
                value,
                out,
                parts,
                counters,
                length,
                lengths,
                first_row,
                ends,
                words,
                counts,
                scale,
                softcap,
                window,
            ),
        )
        return out if on_gpu else out.to(query.dtype)


def _blocks(count: int, size: int) -> int:
    """Divide and round up. triton.cdiv, which is made for kernels, takes 3 us on the host."""
    return -(-count // size)


def _power(count: int) -> int:
    """Return the least power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def plan_launch(layouts: Layouts, nodes: int, windowed: bool, capped: bool, on_gpu: bool) -> LaunchPlan:
    """Plan launches with these layouts, for trees of `nodes` nodes, with or without a window and a soft cap."""
    query, key, value, lengths, subtree_end, ancestors, _, _ = layouts
    batch, heads, queries, head_dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    rows = queries * group
    if on_gpu:
        gpu = torch.cuda.get_device_properties(query.device)
        processors = gpu.multi_processor_count
        generation = gpu.major
    else:
        processors = 16
        generation = 9
    block_m, block_n, warps, stages = tiles_for(query.dtype, head_dim, rows, capped, generation)
    tiles = _blocks(rows, block_m)
    # As many programs as can run at the same time (two of 4 warps share a multiprocessor), whatever the batch size.
    # The number of splits is a power of two, so that few variants are compiled.
    programs = processors * (2 if warps <= 4 else 1) // (tiles * kv_heads)
    most = _power(_blocks(key.shape[2], MIN_SPLIT))
    splits = min(1 << max(programs.bit_length() - 1, 0), most, 32)
    block_d = max(16, _power(head_dim))
    # A limit on registers keeps ptxas from spilling to fit one more program; with 16 warps it would make ptxas spill.
    registers = None if warps == 16 and head_dim > 128 and generation in _ROOMY else min(255, (1 << 16) // (32 * warps))

    # Masks are contiguous. Without a batch dimension they hold one tree for all sequences.
    words = 0 if ancestors is None else 2 * _blocks(nodes, 64)
    own_ends = nodes if subtree_end is not None and len(subtree_end.shape) == 2 else 0
    own_words = queries if ancestors is not None and len(ancestors.shape) == 3 else 0
    sizes = {
        "queries": queries,
        "nodes": nodes,
        "kv_heads": kv_heads,
        "lengths_stride": lengths.stride[0] if lengths is not None and lengths.shape else 0,
    }
    strides = {
        "ends_stride": own_ends,
        "words_stride": own_words * words,
        "counts_stride": own_ends or own_words,
        "word_count": words,
        "query_b": query.stride[0] // 8,
        "query_h": query.stride[1] // 8,
        "query_n": query.stride[2] // 8,
        "key_b": key.stride[0] // 8,
        "key_h": key.stride[1] // 8,
        "key_s": key.stride[2] // 8,
        "value_b": value.stride[0] // 8,
        "value_h": value.stride[1] // 8,
        "value_s": value.stride[2] // 8,
    }
    constants = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "BLOCK_N": block_n,
        "SPLITS": splits,
        "MIN_SPLIT": MIN_SPLIT,
        "MERGED": min(block_m, 32 * warps * 64 // block_d),  # rows merged at a time: 64 numbers of each thread
    }
    tiling = {
        "BLOCK_M": block_m,
        "TOUCHED": _power(block_m // group if block_m % group == 0 else (block_m - 2) // group + 2),
        "TREE_BLOCKS": _power(_blocks(nodes, block_n)),
        "UPCAST": not on_gpu,
    }
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers, "enable_fp_fusion": True}
    wide = max(key.shape[2], *sizes.values(), *strides.values()) >= 1 << 31
    dtypes = tuple(None if layout is None else layout.dtype for layout in layouts)
    kind = (query.device, dtypes, windowed, capped, wide, *constants.values())
    attend = variant_of(tree_attention_kernel, (*kind, *tiling.values()), tuple(options.items()))
    return LaunchPlan(
        in_place=all(map(is_in_place, (query, key, value))),
        out=(batch, queries, heads, head_dim),
        parts=batch * kv_heads * splits * rows * (head_dim + 2) if splits > 1 else 0,
        tiles=batch * kv_heads * tiles if splits > 1 else 0,
        attend=Launch(attend, (tiles, splits, batch * kv_heads), sizes | strides | constants | tiling),
    )
