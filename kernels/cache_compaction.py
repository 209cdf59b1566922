"""Move the accepted rows of a key-value cache together, in place, in every layer.

After verification, node path[j] of the tree, at cache row prefix + path[j], is token prefix + j of the text:

    row prefix + j  <-  row prefix + path[j]        j = 1 .. length

path rises along the tree and path[j] >= j, so a row is never overwritten before it has been read as long as all are
read before any is written.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


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

    Raises ValueError for bad shapes, dtypes or options, and on CPU for rows outside the cache.
    """
    if impl not in ("auto", "torch"):
        raise ValueError(f"compact_cache has impl 'auto' or 'torch', got {impl!r}")
    if len(keys) != len(values):
        raise ValueError(f"keys and values must have one entry per layer, got {len(keys)} and {len(values)}")
    batch = len(path)
    for name, value, shape in (
        ("path", path, (batch, path.shape[-1])),
        ("length", length, (batch,)),
        ("prefix_length", prefix_length, (batch,)),
    ):
        if value.dtype != torch.long or value.shape != shape:
            raise ValueError(f"{name} must be a LongTensor {[*shape]}, got {value.dtype} {[*value.shape]}")
    for key, value in zip(keys, values, strict=True):
        if key.dim() != 4 or key.shape[0] != batch or key.shape != value.shape:
            raise ValueError(
                f"keys and values must be [{batch}, Hkv, S, D] of one shape, got {[*key.shape]} and {[*value.shape]}"
            )
    if path.device.type == "cpu" and batch and keys:
        _check_rows(path, length, prefix_length, min(cache.shape[2] for cache in (*keys, *values)))
    _compact_reference(keys, values, path, length, prefix_length)


def _check_rows(path: Tensor, length: Tensor, prefix_length: Tensor, rows: int) -> None:
    if length.min() < 0 or length.max() >= path.shape[1]:
        raise ValueError(f"length must be in 0 .. {path.shape[1] - 1} for path {[*path.shape]}, got {length.tolist()}")
    accepted = torch.arange(path.shape[1]) <= length[:, None]
    used = (prefix_length[:, None] + path)[accepted]
    if used.min() < 0 or used.max() >= rows:
        raise ValueError(f"prefix_length + path must lie in the cache's rows 0 .. {rows - 1}, got {used.tolist()}")


def _compact_reference(
    keys: Sequence[Tensor], values: Sequence[Tensor], path: Tensor, length: Tensor, prefix_length: Tensor
) -> None:
    place = torch.arange(path.shape[1], device=path.device)
    moves = (place <= length[:, None]) & (path != place)  # rows already in place stay
    sequence, position = moves.nonzero(as_tuple=True)
    if not len(sequence):
        return
    source = prefix_length[sequence] + path[sequence, position]
    destination = prefix_length[sequence] + position
    for cache in (*keys, *values):
        cache[sequence, :, destination] = cache[sequence, :, source]  # the right side is read whole first
