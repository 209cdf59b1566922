"""Layouts of the tensors of `tree_attention`: what the function and its kernel take.

A check reads no values, so a launch whose tensors have known layouts needs none.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MAX_NODES = 2048  # of a tree: each of 64 blocks of 32 keys has a bit in one word of the kernel
MOST_HEADS = 65_535  # key heads of all sequences together: CUDA's limit for the last dimension of a grid


class TensorLayout(NamedTuple):
    """A tensor's shape, strides, dtype and device."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Layouts(NamedTuple):
    """The layouts of query, key and value, and of the tensors of `Visible`; None for a tensor that is not given."""

    query: TensorLayout
    key: TensorLayout
    value: TensorLayout
    lengths: TensorLayout | None
    subtree_end: TensorLayout | None
    ancestors: TensorLayout | None
    first_row: TensorLayout | None
    counts: TensorLayout | None


def is_in_place(layout: TensorLayout) -> bool:
    """Whether 16-byte loads and 32-bit offsets within a block can read a tensor of this layout."""
    strides = [stride for stride, size in zip(layout.stride[:-1], layout.shape, strict=False) if size > 1]
    return layout.stride[-1] == 1 and all(stride % 8 == 0 for stride in strides) and layout.stride[2] < 1 << 24


def in_place(tensor: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy if the kernel cannot read it in place."""
    layout = TensorLayout(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    if tensor.data_ptr() % 16 == 0 and is_in_place(layout):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def check_layouts(layouts: Layouts, nodes: int) -> None:
    """Raise ValueError for shapes, dtypes or devices that do not fit each other, or a tree of `nodes` nodes."""
    query, key, value, lengths, subtree_end, ancestors, first_row, _ = layouts
    if not len(query.shape) == len(key.shape) == 4 or key.shape != value.shape or query.shape[::3] != key.shape[::3]:
        raise ValueError(
            "expected query [B, Hq, N, D] and key, value [B, Hkv, S, D], "
            f"got {[*query.shape]}, {[*key.shape]} and {[*value.shape]}"
        )
    batch, heads, queries, _ = query.shape
    kv_heads = key.shape[1]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"query heads must be a multiple of key heads, got {heads} and {kv_heads}")
    if not query.dtype == key.dtype == value.dtype or not query.dtype.is_floating_point:
        raise ValueError(f"expected one floating-point dtype, got {query.dtype}, {key.dtype} and {value.dtype}")
    given = {"key": key, "value": value, "prefix_length": lengths, "subtree_end": subtree_end}
    for name, layout in (given | {"ancestor_mask": ancestors, "first_row": first_row}).items():
        if layout is not None and layout.device != query.device:
            raise ValueError(f"{name} must be on the query's device, {query.device}, got {layout.device}")
    if subtree_end is not None:
        _check_mask("subtree_end", subtree_end, (torch.int32, torch.long), ((nodes,), (batch, nodes)))
    if ancestors is not None:
        columns = nodes if ancestors.dtype == torch.bool else 2 * -(-nodes // 64)
        dtypes = (torch.bool, torch.int32)
        shape = (queries, columns)
        _check_mask("ancestor_mask", ancestors, dtypes, (shape, (batch, *shape)))
    if nodes < queries:
        raise ValueError(f"got {queries} queries of a tree of {nodes} nodes")
    if lengths is not None:
        _check_mask("prefix_length", lengths, (torch.long,), ((), (batch,)), "an int, or ")
    if first_row is not None:
        _check_mask("first_row", first_row, (torch.long,), ((batch,),))


def check_kernel_takes(query: TensorLayout, nodes: int, kv_heads: int) -> None:
    """Raise ValueError for layouts that only impl "torch" takes."""
    head_dim = query.shape[-1]
    most = MOST_HEADS // kv_heads
    if head_dim % 8 or not 16 <= head_dim <= 256:
        raise ValueError(f"impl 'triton' has head sizes 16 to 256 in steps of 8, got {head_dim}; take impl 'torch'")
    if nodes > MAX_NODES or query.shape[0] > most:
        got = f"{MAX_NODES} nodes and {most} sequences of {kv_heads} key heads, got {nodes} and {query.shape[0]}"
        raise ValueError(f"impl 'triton' takes at most {got}; take impl 'torch'")
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"impl 'triton' has float32, float16 and bfloat16, got {query.dtype}; take impl 'torch'")


def _check_mask(
    name: str,
    layout: TensorLayout,
    dtypes: tuple[torch.dtype, ...],
    shapes: tuple[tuple[int, ...], ...],
    otherwise: str = "",
) -> None:
    if layout.dtype not in dtypes or layout.shape not in shapes:
        wanted = " or ".join(str([*shape]) for shape in dict.fromkeys(shapes))
        raise ValueError(
            f"{name} must be {otherwise}{' or '.join(map(str, dtypes))} {wanted}, got {layout.dtype} {[*layout.shape]}"
        )
