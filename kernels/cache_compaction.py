"""Move the accepted rows of a key-value cache together, in place, in every layer.

After verification, node path[j] of the tree, at cache row prefix + path[j], is token prefix + j of the text:

    row prefix + j  <-  row prefix + path[j]        j = 1 .. length

A row that is written may be one that is still to be read, so all rows are read before any is written. A row with
path[j] = j, common in heavy-path order, is in place already.

The kernel. One launch serves all layers, whose keys and values are allocations of their own: a table on the device says
where each lies. A program owns all rows of one cache, sequence and head, or a block of their columns if the path is
long. So all that it reads before it writes fits in registers. It moves bits, whatever the dtype, 16 bytes at a time
where addresses and strides allow, and returns early where nothing moves.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from collections.abc import Sequence
from functools import cache, lru_cache
from math import gcd

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.implementation import choose_impl, operator
from heavypath.kernels.language import tl, triton
from heavypath.kernels.step_kernels import kernels_by

MAX_PATH = 2048  # columns of path that the kernel takes
_TILE = 8192  # units that a program moves, at most: 16 for each thread of 16 warps
_UNITS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}  # by bytes


@operator
def compact_cache(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    path: Tensor,
    length: Tensor,
    prefix_length: Tensor,
    *,
    impl: str = "auto",
) -> None:
    """Keep the accepted rows of keys and values (lists of [B, Hkv, S, D], one per layer), in place.

    path: LongTensor[B, P], node 0, accepted nodes, then anything; length: LongTensor[B], accepted nodes, < P;
    prefix_length: LongTensor[B], cache rows before the root.

    impl: see `implementation`; "triton" is one launch without host synchronisation, for P up to 2,048. All layers have
        one Hkv, D and element size, and elements of a row side by side (a last stride of 1). S and other strides may
        differ.

    Triton's first call with certain caches copies their addresses to the device: before a CUDA graph captures the
    function, call it once with these caches (length 0 moves nothing).

    Raises ValueError for bad shapes, dtypes, devices or options, and on CPU for rows outside the cache, which the
    kernel leaves as they are on a GPU. Raises RuntimeError if a graph captures the first call.
    """
    impl = choose_impl("compact_cache", impl, path, native=True)
    if len(keys) != len(values):
        raise ValueError(f"keys and values must have one entry per layer, got {len(keys)} and {len(values)}")
    if path.dim() != 2:
        raise ValueError(f"path must be a LongTensor [B, P], got {path.dtype} {[*path.shape]}")
    batch = len(path)
    for name, value, shape in (
        ("path", path, path.shape),
        ("length", length, (batch,)),
        ("prefix_length", prefix_length, (batch,)),
    ):
        if value.dtype != torch.long or value.shape != shape:
            raise ValueError(f"{name} must be a LongTensor {[*shape]}, got {value.dtype} {[*value.shape]}")
        if value.device != path.device:
            raise ValueError(f"{name} must be on the path's device, {path.device}, got {value.device}")
    for key, value in zip(keys, values, strict=True):
        shape = key.shape
        if len(shape) != 4 or shape[0] != batch or shape != value.shape:
            raise ValueError(
                f"keys and values must be [{batch}, Hkv, S, D] of one shape, got {[*shape]} and {[*value.shape]}"
            )
        if not key.device == value.device == path.device:
            raise ValueError(
                f"keys and values must be on the path's device, {path.device}, got {key.device} and {value.device}"
            )
    caches = (*keys, *values)
    if impl == "triton":
        _check_kernel_takes(caches, path)
    if path.device.type == "cpu" and batch and caches:
        _check_rows(path, length, prefix_length, min(tensor.shape[2] for tensor in caches))
    kernels_by(impl).compact(caches, path, length, prefix_length)


def _check_kernel_takes(caches: Sequence[Tensor], path: Tensor) -> None:
    if path.shape[1] > MAX_PATH:
        raise ValueError(f"impl 'triton' takes paths of at most {MAX_PATH}, got {path.shape[1]}; take impl 'torch'")
    kinds = set()
    for tensor in caches:
        _, heads, _, head_dim = tensor.shape
        kinds.add((heads, head_dim, tensor.element_size()))
        if tensor.stride(3) != 1 and head_dim > 1:
            raise ValueError(
                "impl 'triton' needs keys and values with a last stride of 1, "
                f"got strides {[*tensor.stride()]} of {[*tensor.shape]}; take impl 'torch'"
            )
    if len(kinds) > 1:
        raise ValueError(
            "impl 'triton' needs one (Hkv, D, bytes of an element) in all keys and values, "
            f"got {', '.join(map(str, sorted(kinds)))}; take impl 'torch'"
        )


def _check_rows(path: Tensor, length: Tensor, prefix_length: Tensor, rows: int) -> None:
    node = path.numpy()
    last = length.numpy()[:, None]
    prefix = prefix_length.numpy()[:, None]
    if last.min() < 0 or last.max() >= node.shape[1]:
        raise ValueError(f"length must be in 0 .. {node.shape[1] - 1} for path {[*node.shape]}, got {length.tolist()}")
    used = (prefix + node)[np.arange(node.shape[1]) <= last]
    if used.min() < 0 or used.max() >= rows:
        raise ValueError(f"prefix_length + path must lie in the cache's rows 0 .. {rows - 1}, got {used.tolist()}")


def reference(caches: Sequence[Tensor], path: Tensor, length: Tensor, prefix_length: Tensor) -> None:
    """Move the rows of one cache after the other, in PyTorch."""
    node, last, prefix = (field.cpu().numpy() for field in (path, length, prefix_length))
    place = np.arange(node.shape[1])
    moves = (place > 0) & (place <= last[:, None]) & (node != place)  # rows already in place stay
    sequence, position = moves.nonzero()
    if not len(sequence):
        return
    source = prefix[sequence] + node[sequence, position]
    destination = prefix[sequence] + position
    sequence, source, destination = (
        torch.from_numpy(index).to(path.device) for index in (sequence, source, destination)
    )
    for tensor in caches:
        tensor[sequence, :, destination] = tensor[sequence, :, source]  # PyTorch reads the whole right side first


@triton.jit(do_not_specialize=["path_ptr", "length_ptr", "prefix_ptr", "P"])
def _compact_kernel(
    table_ptr,  # [caches, 5]: address; strides of sequences, heads and rows in units; rows S
    path_ptr,  # [B, P]
    length_ptr,  # [B], as prefix_ptr
    prefix_ptr,
    P,
    UNIT: tl.constexpr,  # the integer that bits travel in
    VECTOR: tl.constexpr,  # addresses and strides are multiples of this many units; one access moves 2 of 8 bytes
    ROW: tl.constexpr,  # units of a row
    BLOCK_P: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
):
    """A program for each sequence, (head, block of columns) and cache."""
    sequence = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(ROW, BLOCK_ROW)
    head = (tl.program_id(1) // blocks).to(tl.int64)
    column = tl.program_id(1) % blocks * BLOCK_ROW + tl.arange(0, BLOCK_ROW)
    place = tl.arange(0, BLOCK_P)

    # No load waits for another here: what takes time is the number of loads that follow one another.
    node = tl.load(path_ptr + sequence * P + place, mask=place < P, other=0)
    length = tl.load(length_ptr + sequence)
    prefix = tl.load(prefix_ptr + sequence)
    table_ptr += tl.program_id(2) * 5
    cache_ptr = tl.load(table_ptr).to(tl.pointer_type(UNIT))
    cache_ptr = tl.multiple_of(cache_ptr, VECTOR * UNIT.primitive_bitwidth // 8)
    sequence_stride = tl.multiple_of(tl.load(table_ptr + 1), VECTOR)
    head_stride = tl.multiple_of(tl.load(table_ptr + 2), VECTOR)
    row_stride = tl.multiple_of(tl.load(table_ptr + 3), VECTOR)
    rows = tl.load(table_ptr + 4)

    source = prefix + node
    destination = prefix + place
    moves = (place > 0) & (place < P) & (place <= length) & (node != place)
    moves = moves & (tl.minimum(source, destination) >= 0) & (tl.maximum(source, destination) < rows)
    if tl.max(moves.to(tl.int32)) == 0:
        return

    cache_ptr += sequence * sequence_stride + head * head_stride + column[None, :]
    source_ptr = cache_ptr + (source * row_stride)[:, None]
    destination_ptr = cache_ptr + (destination * row_stride)[:, None]
    mask = moves[:, None] & (column < ROW)[None, :]
    moved = tl.load(source_ptr, mask=mask)
    tl.debug_barrier()  # one thread's destination is another's source
    tl.store(destination_ptr, moved, mask=mask)


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=64)
def _table(device: torch.device, row_bytes: int, caches: tuple[tuple[int, ...], ...]) -> tuple[Tensor, int]:
    """The kernel's table of caches (address, strides in bytes, rows), and the power of two that divides its bytes."""
    if _capturing():
        raise RuntimeError("compact_cache must run once with these keys and values before a CUDA graph captures it")
    alignment = gcd(16, row_bytes, *(number for address, *strides, _ in caches for number in (address, *strides)))
    unit = min(alignment, max(_UNITS))
    table = [(address, *(stride // unit for stride in strides), rows) for address, *strides, rows in caches]
    return torch.tensor(table, device=device), alignment


_table_for_ever = cache(_table)  # a graph reads its table as long as it exists


def launch(caches: Sequence[Tensor], path: Tensor, length: Tensor, prefix_length: Tensor) -> None:
    """Move the rows by one launch."""
    batch, places = path.shape
    if not caches:
        return
    _, heads, _, head_dim = caches[0].shape
    if 0 in (batch, heads, head_dim) or places < 2:
        return
    size = caches[0].element_size()
    described = tuple(
        (tensor.data_ptr(), *(size * stride for stride in tensor.stride()[:3]), tensor.shape[2]) for tensor in caches
    )
    with torch.cuda.device_of(path):
        table, alignment = (_table_for_ever if _capturing() else _table)(path.device, size * head_dim, described)
        unit = min(alignment, max(_UNITS))
        row = size * head_dim // unit
        block_places = triton.next_power_of_2(places)
        block_row = min(triton.next_power_of_2(row), _TILE // block_places)
        _compact_kernel[(batch, heads * triton.cdiv(row, block_row), len(caches))](
            table_ptr=table,
            path_ptr=path.contiguous(),
            length_ptr=length.contiguous(),
            prefix_ptr=prefix_length.contiguous(),
            P=places,
            UNIT=_UNITS[unit],
            VECTOR=alignment // unit,
            ROW=row,
            BLOCK_P=block_places,
            BLOCK_ROW=block_row,
            num_warps=min(16, max(1, block_places * block_row // 128)),
            enable_fp_fusion=False,
        )
