"""The matrices A and P of Kimi Delta Attention, where each key column has a gate: a kernel over (node, ancestor) pairs.

    A_ij = sum_d k_id k_jd e^(G_id - G_jd)        P_ij = sum_d q_id k_jd e^(G_id - G_jd)        j above i, or i itself

Queries and keys are normalised, and queries divided by sqrt(Dk). A and P cannot be products of two matrices, since
e^(-G_j) overflows. So only pairs of a node and an ancestor are computed, N x depth of them, and no exponent is above 0.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false

import torch
from torch import Tensor

from heavypath.kernels.language import tl, triton
from heavypath.kernels.recurrent.paths import BLOCK, Paths

_BLOCK = tl.constexpr(BLOCK)
_COLUMNS = 16


@triton.jit(do_not_specialize=["N"])
def _pairs_kernel(
    query_ptr,  # [B, N, HEADS, DK], rows of a node `query_node` apart
    key_ptr,
    totals_ptr,  # fp64 [B, N, HEADS, DK]
    mask_ptr,  # [B, N, N], bytes
    above_ptr,  # int32 [B, blocks, N], from `Paths.outside`
    count_ptr,  # int32 [B, blocks]
    of_keys_ptr,  # fp32 [B, HEADS, N, N]: A, written where a node sees the other
    of_queries_ptr,  # fp32 [B, HEADS, N, N]: P
    N,
    query_batch,
    query_node,
    key_batch,
    key_node,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    BK: tl.constexpr,
):
    """Each program does the pairs of 16 nodes in a head of a sequence."""
    batch = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    head = tl.program_id(2)
    place = tl.arange(0, _BLOCK)
    columns = tl.arange(0, BK)
    node = (block * _BLOCK + place).to(tl.int64)
    real = node < N
    query_ptr += batch * query_batch + head * DK
    key_ptr += batch * key_batch + head * DK
    totals_ptr += (batch * N * HEADS + head) * DK
    mask_ptr += batch * N * N
    above_ptr += (batch * tl.num_programs(1) + block) * N
    pairs = (batch * HEADS + head) * N * N
    count = tl.load(count_ptr + batch * tl.num_programs(1) + block)
    rounded = tl.cdiv(count, _BLOCK) * _BLOCK
    for start in range(0, rounded + _BLOCK, _BLOCK):  # the block itself comes last
        which = start + place
        outside = which < count
        there = outside | ((which >= rounded) & real)
        other = tl.load(above_ptr + which, mask=outside, other=0).to(tl.int64)
        other = tl.where(which >= rounded, node, other)
        at = node[:, None] * N + other[None, :]
        seen = tl.load(mask_ptr + at, mask=real[:, None] & there[None, :], other=0) != 0
        of_keys = tl.zeros([_BLOCK, _BLOCK], tl.float32)
        of_queries = tl.zeros([_BLOCK, _BLOCK], tl.float32)
        query_square = tl.zeros([_BLOCK], tl.float32)
        key_square = tl.zeros([_BLOCK], tl.float32)
        square = tl.zeros([_BLOCK], tl.float32)
        for first in range(0, DK, BK):
            column = (first + columns)[None, :]
            query = tl.load(query_ptr + node[:, None] * query_node + column, mask=real[:, None], other=0.0)
            key = tl.load(key_ptr + node[:, None] * key_node + column, mask=real[:, None], other=0.0)
            their = tl.load(key_ptr + other[:, None] * key_node + column, mask=there[:, None], other=0.0)
            query = query.to(tl.float32)
            key = key.to(tl.float32)
            their = their.to(tl.float32)
            total = tl.load(totals_ptr + node[:, None] * (HEADS * DK) + column, mask=real[:, None], other=0.0)
            theirs = tl.load(totals_ptr + other[:, None] * (HEADS * DK) + column, mask=there[:, None], other=0.0)
            gap = (total[:, None, :] - theirs[None, :, :]).to(tl.float32)
            faded = tl.exp(tl.where(seen[:, :, None], gap, float("-inf"))) * their[None, :, :]
            of_keys += tl.sum(key[:, None, :] * faded, 2)
            of_queries += tl.sum(query[:, None, :] * faded, 2)
            query_square += tl.sum(query * query, 1)
            key_square += tl.sum(key * key, 1)
            square += tl.sum(their * their, 1)
        norm = (1.0 / tl.sqrt(square + 1e-6))[None, :]
        of_keys *= (1.0 / tl.sqrt(key_square + 1e-6))[:, None] * norm
        of_queries *= (1.0 / tl.sqrt(query_square + 1e-6))[:, None] * norm
        tl.store(of_keys_ptr + pairs + at, of_keys, mask=seen)
        tl.store(of_queries_ptr + pairs + at, of_queries * DK**-0.5, mask=seen)


def launch_pairs(query: Tensor, key: Tensor, total: Tensor, paths: Paths) -> tuple[Tensor, Tensor]:
    """Return A and P fp32 [B, H, N, N] of trees in one pass; undefined where a node does not see the other.

    query, key: [B, N, H, Dk] with contiguous columns; Dk is a power of two, 16 or more; total: fp64 [B, N, H, Dk]
    """
    batch, nodes, heads, columns = key.shape
    of_keys, of_queries = torch.empty(2, batch, heads, nodes, nodes, dtype=torch.float32, device=key.device)
    above, count = paths.outside
    with torch.cuda.device_of(key):
        _pairs_kernel[(batch, above.shape[1], heads)](
            query,
            key,
            total,
            paths.mask.contiguous().view(torch.int8),
            above,
            count,
            of_keys,
            of_queries,
            nodes,
            query.stride(0),
            query.stride(1),
            key.stride(0),
            key.stride(1),
            HEADS=heads,
            DK=columns,
            BK=min(columns, _COLUMNS),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return of_keys, of_queries
