"""Rotary embedding of queries and keys, fused with writing the new keys and values into the cache.

    x' = round(x) cos + rotate_half(x) sin      for each head x [D] of the queries and keys of a token
    keys[b, h, row] = key',  values[b, h, row] = value

rotate_half([low, high]) = [-high, low]; the sine that is passed already has these signs, so that column c of x' is
x[c] cos[c] + x[(c + D/2) mod D] sin[c]. In models with QK norm (Qwen3) each head of queries and keys gets an RMS norm
first, as in `rms_norm`. Su et al. 2021, "RoFormer". In 16 bits the kernel rounds where transformers does: both
products, and their sum.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false

from typing import NamedTuple

import torch
from torch import Tensor

from heavypath.kernels.implementation import choose_impl, in_rows, operator
from heavypath.kernels.language import tl, triton
from heavypath.kernels.layers.rms_norm import Norm, normalized
from heavypath.kernels.layers.rounding import rounded

_ELEMENTS = 1024  # that a program rotates at the same time


class Projected(NamedTuple):
    """A layer's projections of each token: query [B, N, Hq, D], key and value [B, N, Hkv, D]."""

    query: Tensor
    key: Tensor
    value: Tensor


class Turns(NamedTuple):
    """Cosine and sine of each token's position; the sine has the signs of rotate_half.

    cos, sin:  [B, N, 1, D] of the tokens; or [P, D] of all positions, and then
    positions: LongTensor[B, N] in 0 .. P - 1
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor | None = None

    @classmethod
    def at(cls, table: Tensor, positions: Tensor, *, impl: str = "auto") -> "Turns":
        """Cosines and sines of positions LongTensor[B, N] from a table [P, 2, D]; the Triton kernel does the lookup."""
        if choose_impl("Turns.at", impl, positions) == "triton":
            return cls(table[:, 0], table[:, 1], positions)
        return cls(*table[positions][:, :, :, None].unbind(2))


class HeadNorms(NamedTuple):
    """RMS norms of each query head and of each key head, with weights [D] (QK norm)."""

    query: Norm
    key: Norm


@operator
def rotate_and_store(
    projected: Projected,
    turns: Turns,
    keys: Tensor,
    values: Tensor,
    cache_rows: Tensor,
    norms: HeadNorms | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """Rotate queries and keys, store keys and values in the cache, and return the queries, [B, N, Hq, D].

    projected, turns: tensors of one dtype
    keys, values: [B, Hkv, S, D], a layer's cache, changed in place
    cache_rows:   LongTensor[B, N] in 0 .. S - 1, the rows that are written
    norms:        QK norms, or None

    impl "triton" supports fp32, fp16 and bf16, an even D, and caches of equal strides with contiguous columns. It does
    not check that `cache_rows` lie within the cache. Raises ValueError if the kernel does not support the shapes,
    dtypes or strides.
    """
    if choose_impl("rotate_and_store", impl, projected.query) == "triton":
        return _launch(projected, turns, keys, values, cache_rows, norms)
    query, key, value = projected
    if norms is not None:
        query = normalized(query, norms.query)
        key = normalized(key, norms.key)
    heads = query.shape[2]
    states = torch.cat([query, key], 2)
    # rotate_half is a roll by half of the columns and a change of signs. The sine already has the signs.
    cos = turns.cos
    sin = turns.sin
    if turns.positions is not None:
        cos, sin = (each[turns.positions][:, :, None] for each in (cos, sin))
    turned = torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, -1), sin)
    store_rows(keys, turned[:, :, heads:], cache_rows)
    store_rows(values, value, cache_rows)
    return turned[:, :, :heads]


def store_rows(cache: Tensor, new: Tensor, cache_rows: Tensor) -> None:
    """Store new [B, N, H, D] in a cache [B, H, S, D] at rows LongTensor[B, N]; new may have fewer columns."""
    if new.shape[-1] < cache.shape[-1]:
        cache = cache[..., : new.shape[-1]]
    if len(cache) == 1:
        cache.index_copy_(2, cache_rows[0], new.transpose(1, 2))
    else:
        sequence = torch.arange(len(cache), device=cache_rows.device)[:, None]
        cache.transpose(1, 2)[sequence, cache_rows] = new


@triton.jit
def _turned(x, there, weight, epsilon, cos, sin, turn, column, like, HALF: tl.constexpr, INTERPRETED: tl.constexpr):
    """Load the heads at addresses x [HEADS, D / 2], norm them if there is a weight, and rotate: lower and upper halves.

    turn: offsets of each head's cosines and sines, [HEADS, D / 2]
    """
    low = tl.load(x, mask=there, other=0.0).to(tl.float32)
    high = tl.load(x + HALF, mask=there, other=0.0).to(tl.float32)
    if weight is not None:
        inside = column < HALF
        scale = tl.rsqrt(tl.sum(low * low + high * high, 1) / (2 * HALF) + epsilon)[:, None]
        low_weight = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        high_weight = tl.load(weight + HALF + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        low = rounded(low_weight * rounded(low * scale, like, INTERPRETED), like, INTERPRETED)
        high = rounded(high_weight * rounded(high * scale, like, INTERPRETED), like, INTERPRETED)
    cos_low = tl.load(cos + turn, mask=there, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + turn + HALF, mask=there, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + turn, mask=there, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + turn + HALF, mask=there, other=0.0).to(tl.float32)
    new_low = rounded(low * cos_low, like, INTERPRETED) + rounded(high * sin_low, like, INTERPRETED)
    new_high = rounded(high * cos_high, like, INTERPRETED) + rounded(low * sin_high, like, INTERPRETED)
    return rounded(new_low, like, INTERPRETED), rounded(new_high, like, INTERPRETED)


@triton.jit
def _place(positions, token, tokens):
    """Return each token's row in the tables of cosines and sines."""
    if positions is not None:
        token = tl.load(positions + token, mask=token < tokens, other=0)
    return token


@triton.jit(do_not_specialize=["tokens", "nodes", "rows_b", "rows_n"])
def _rotary_kernel(
    query,
    key,
    value,
    cos,
    sin,
    positions,
    keys,
    values,
    out,
    rows,
    query_weight,
    key_weight,
    query_epsilon,
    key_epsilon,
    tokens,
    nodes,
    query_row,
    key_row,
    value_row,
    turn_row,
    cache_b,
    cache_h,
    cache_s,
    rows_b,
    rows_n,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Each program does HEADS heads, of one token or several: first those of queries, then of keys and values."""
    block = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    query_blocks = tl.cdiv(tokens * QUERY_HEADS, HEADS)
    if block < query_blocks:
        index = block * HEADS + tl.arange(0, HEADS)
        token = index // QUERY_HEADS
        head = index % QUERY_HEADS
        there = (token < tokens)[:, None] & (column < HALF)[None, :]
        token = token.to(tl.int64)
        at = (token * query_row + head * (2 * HALF))[:, None] + column[None, :]
        turn = (_place(positions, token, tokens) * turn_row)[:, None] + column[None, :]
        low, high = _turned(
            query + at, there, query_weight, query_epsilon, cos, sin, turn, column, out, HALF, INTERPRETED
        )
        to = (index.to(tl.int64) * (2 * HALF))[:, None] + column[None, :]
        tl.store(out + to, low, mask=there)
        tl.store(out + to + HALF, high, mask=there)
    else:
        index = (block - query_blocks) * HEADS + tl.arange(0, HEADS)
        token = index // KEY_HEADS
        head = index % KEY_HEADS
        exists = token < tokens
        there = exists[:, None] & (column < HALF)[None, :]
        batch = (token // nodes).to(tl.int64)
        row = tl.load(rows + batch * rows_b + (token % nodes) * rows_n, mask=exists, other=0)
        token = token.to(tl.int64)
        at = (token * key_row + head * (2 * HALF))[:, None] + column[None, :]
        turn = (_place(positions, token, tokens) * turn_row)[:, None] + column[None, :]
        low, high = _turned(key + at, there, key_weight, key_epsilon, cos, sin, turn, column, out, HALF, INTERPRETED)
        to = (batch * cache_b + head.to(tl.int64) * cache_h + row * cache_s)[:, None] + column[None, :]
        tl.store(keys + to, low, mask=there)
        tl.store(keys + to + HALF, high, mask=there)
        at = (token * value_row + head * (2 * HALF))[:, None] + column[None, :]
        tl.store(values + to, tl.load(value + at, mask=there, other=0.0), mask=there)
        tl.store(values + to + HALF, tl.load(value + at + HALF, mask=there, other=0.0), mask=there)


def _launch(
    projected: Projected, turns: Turns, keys: Tensor, values: Tensor, cache_rows: Tensor, norms: HeadNorms | None
) -> Tensor:
    """Check the arguments and launch the kernel of `rotate_and_store`."""
    _check(projected, turns, keys, values, cache_rows)
    for weight, _ in norms or ():
        if weight.shape != projected.query.shape[3:] or weight.stride(0) != 1:
            raise ValueError(f"the weights of norms must be contiguous [D], got {weight.shape}, {weight.stride()}")
    query, key, value = map(_by_token, projected)
    cos, sin, positions = turns
    if positions is None:
        cos = _by_token(cos)
        sin = _by_token(sin)
    kv_heads = keys.shape[1]
    nodes = cache_rows.shape[1]
    tokens, heads, head_dim = query.shape
    out = query.new_empty(*projected.query.shape)
    block = max(8, triton.next_power_of_2(head_dim // 2))
    at_once = max(1, _ELEMENTS // (2 * block))
    (query_weight, query_epsilon), (key_weight, key_epsilon) = ((None, 0.0), (None, 0.0)) if norms is None else norms
    with torch.cuda.device_of(query):
        _rotary_kernel[(triton.cdiv(tokens * heads, at_once) + triton.cdiv(tokens * kv_heads, at_once),)](
            query,
            key,
            value,
            cos,
            sin,
            None if positions is None else positions.contiguous(),
            keys,
            values,
            out,
            cache_rows,
            query_weight,
            key_weight,
            query_epsilon,
            key_epsilon,
            tokens,
            nodes,
            query.stride(0),
            key.stride(0),
            value.stride(0),
            cos.stride(0),
            keys.stride(0),
            keys.stride(1),
            keys.stride(2),
            cache_rows.stride(0),
            cache_rows.stride(1),
            QUERY_HEADS=heads,
            KEY_HEADS=kv_heads,
            HALF=head_dim // 2,
            HEADS=at_once,
            BLOCK=block,
            INTERPRETED=not query.is_cuda,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


def _check(projected: Projected, turns: Turns, keys: Tensor, values: Tensor, cache_rows: Tensor) -> None:
    query, key, value = projected
    batch, nodes, _, head_dim = query.shape
    kv_heads = key.shape[2]
    by_token = (batch, nodes, kv_heads, head_dim)
    of_cache = (batch, kv_heads, keys.shape[2], head_dim)
    given = {"key": (key, by_token), "value": (value, by_token), "keys": (keys, of_cache), "values": (values, of_cache)}
    turned = (batch, nodes, 1, head_dim) if turns.positions is None else (len(turns.cos), head_dim)
    given |= {"cos": (turns.cos, turned), "sin": (turns.sin, turned)}
    for name, (each, shape) in given.items():
        if each.shape != shape or each.dtype != query.dtype:
            raise ValueError(f"{name} must be {query.dtype} {[*shape]}, got {each.dtype} {[*each.shape]}")
    for name, each in (("cache_rows", cache_rows), ("positions", turns.positions)):
        if each is not None and (each.shape != (batch, nodes) or each.dtype != torch.long):
            raise ValueError(f"{name} must be a LongTensor {[batch, nodes]}, got {each.dtype} {[*each.shape]}")
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16) or head_dim % 2:
        got = f"{query.dtype} and heads of {head_dim}"
        raise ValueError(f"impl 'triton' has float32, float16 and bfloat16, and heads of even size; got {got}")
    for names, one, other in (("cos and sin", turns.cos, turns.sin), ("keys and values", keys, values)):
        if one.stride() != other.stride() or one.stride(-1) != 1:
            got = f"{[*one.stride()]} and {[*other.stride()]}"
            raise ValueError(f"{names} must have equal strides and contiguous columns, got strides {got}")


def _by_token(states: Tensor) -> Tensor:
    """View [B, N, H, D] as [B * N, H, D] with contiguous heads and columns; copy only if the strides require it."""
    flat = in_rows(states.flatten(0, 1))
    return flat if flat.shape[1] == 1 or flat.stride(1) == flat.shape[2] else flat.contiguous()
